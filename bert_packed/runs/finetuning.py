"""How the parts of a fine-tuning run fit together: data, packs, engine, outer loop, checkpoints."""

import dataclasses
import functools
import sys
from pathlib import Path

import keras

from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.config import (
    FINETUNING_HEADS,
    ablations,
    check_at_most,
    check_heads,
    load_model_config,
    override_dropout,
)
from bert_packed.core.command_line import print_table, to_flagfile
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, write_json, write_text
from bert_packed.data.finetuning_batches import predict, train_batches
from bert_packed.runs import run_directory
from bert_packed.runs.label_names import LABELS_FILE
from bert_packed.runs.run_summary import show_row, tell_skipped
from bert_packed.runs.vocabulary import VOCAB_FILE
from bert_packed.tasks.update_packs import fit_predictions, pack_all, plan_updates
from bert_packed.training import log_interval, loop, metrics_log
from bert_packed.training.backend import compiled, out_of_memory_names
from bert_packed.training.engines import make_engine
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.optimization import (
    AdamWeightDecay,
    Lamb,
    WarmupPolynomialDecay,
    optimizer_settings,
)


@dataclasses.dataclass(frozen=True)
class LoopSteps:
    """What the outer loop asks of a config."""

    num_train_steps: int
    log_steps: int
    save_checkpoints_steps: int
    max_skipped_steps: int
    eval_steps: int = 0


def read_model_config(config, vocabulary_size=None):
    """The `ModelConfig` of a `FinetuneConfig`, for packs of its length.

    Raises:
        InputError: no shape is given, or the model has too few positions, or lets sequences see one another.
    """
    if config.bert_config_file:
        found = load_model_config(config.bert_config_file, vocabulary_size)
    elif config.init_checkpoint:
        found = starting_weights.read_config(config.init_checkpoint)
    else:
        raise InputError("`bert_config_file` must be given without `init_checkpoint`. Received: nothing.")
    check_heads(found, FINETUNING_HEADS, "bert_config_file" if config.bert_config_file else "init_checkpoint")
    if ablations(found):
        raise InputError(
            f"`init_checkpoint` must be of a model that keeps sequences apart. Received: "
            f"{config.init_checkpoint}, with {', '.join(ablations(found))}."
        )
    check_at_most(found, "max_position_embeddings", "`max_seq_length`", config.max_seq_length)
    check_at_most(found, "vocab_size", "the vocabulary of `vocab_file`", vocabulary_size or 0)
    return override_dropout(found, config)


def fine_tune(config, model_config, objective, data, inputs, vocab_path, folder, tell, show_row):
    """Train a run, from its start or from where it stopped.

    Args:
        config: `FinetuneConfig`.
        model_config: `ModelConfig`.
        objective: `Objective`.
        data: `LabelledSequences`.
        inputs: Dict from flag name to the paths that it means.
        vocab_path: Vocabulary, copied beside the checkpoints.
        folder: Output directory, locked.
        tell: Called with lines for people.
        show_row: Called with each row of the training log, for people.

    Returns:
        The model, and the signal that stopped the run or None.

    Raises:
        InputError: another run is in the directory, or the checkpoint to start from does not fit.
    """
    steps = LoopSteps(
        config.num_train_steps(len(data.sequences)),
        config.log_steps,
        config.save_checkpoints_steps,
        config.max_skipped_steps,
    )
    tell(f"plan       {steps.num_train_steps:,} steps of {config.train_batch_size} sequences")
    updates = plan_updates(
        data.sequences["lengths"],
        steps.num_train_steps,
        config.train_batch_size,
        config.max_seq_length,
        config.max_sequences_per_pack,
        config.packing_algorithm,
        config.random_seed,
    )
    updates = fit_predictions(updates, data.sequences["num_predictions"])
    num_packs = -(-updates.num_packs // config.micro_batch_size) * config.micro_batch_size
    counted = {
        "num_sequences": len(data.sequences),
        **({"classes": list(data.classes)} if data.classes else {}),
    }
    facts = _facts(model_config, inputs, vocab_path, **counted)
    latest = run_directory.find_checkpoint(folder, config, facts)
    if latest:
        latest = run_directory.find_whole_checkpoint(folder, tell)
    vocab_text = Path(vocab_path).read_bytes()  # it may be in the folder that a new start empties
    engine, schedule = _build_engine(config, model_config, objective, steps)
    first_step, state = 0, None
    if latest:
        state = checkpoint.restore_checkpoint(latest, engine)
        first_step = state["step"]
        tell(f"continues from {latest}")
    else:
        load_weights(config, model_config, engine.model, tell, folder)
        run_directory.start_run(folder, config, {**facts, "packing_factor": updates.packing_factor})
        (folder / VOCAB_FILE).write_bytes(vocab_text)
        if data.classes:
            write_text(str(folder / LABELS_FILE), "".join(f"{name}\n" for name in data.classes))
    run_directory.remove_partial(folder)
    if first_step < steps.num_train_steps:
        run_directory.record_segment(folder, first_step, keras.backend.backend())
    tell(_describe_steps(config, data, updates, steps))
    path = folder / metrics_log.TRAIN_FILE
    due = loop.due_steps(config.log_steps, steps, first_step)
    rows = metrics_log.rows_to_keep(path, first_step, due, config.accept_lost_rows)
    log = metrics_log.MetricsLog(path, metrics_log.train_columns(objective), rows)

    def save(step, state):
        log.flush_to_disk()
        checkpoint.save_checkpoint(folder, step, engine, model_config, state)

    hooks = loop.Hooks(
        batches=functools.partial(train_batches, data, updates, num_packs),
        log=lambda row: (log.write(row), show_row(row)),
        evaluate=None,
        save=save,
        prune=functools.partial(checkpoint.prune_checkpoints, folder, config.keep_checkpoint_max),
        learning_rate=lambda step: float(schedule(step)),
        means=objective.means,
        tell_skipped=tell_skipped,
        scale=log_interval.Scale(num_packs * config.max_seq_length),
    )
    with run_directory.naming_last_checkpoint(folder):
        stopped_by = loop.train(engine, steps, hooks, first_step, state)
    if engine.num_train_traces:
        tell(f"compiled   {engine.num_train_traces} training program")
    return engine.model, stopped_by


def has_results(config, model_config, inputs, vocab_path, results, evaluated):
    """Whether a run is over, as it would be now, and what it found lies in its folder.

    Args:
        config, model_config, inputs, vocab_path: As in `fine_tune`.
        results: Names of files that are written when the run is over; a run that starts removes them.
        evaluated: Paths that it reads; one that was written later than a result is to be read again.

    Raises:
        InputError: another run is in the directory.
    """
    folder = Path(config.output_dir)
    if not folder.is_dir() or not run_directory.find_checkpoint(
        folder, config, _facts(model_config, inputs, vocab_path)
    ):
        return False
    found = [folder / name for name in results]
    newest = max((Path(path).stat().st_mtime_ns for path in evaluated), default=0)
    return bool(found) and all(path.is_file() and path.stat().st_mtime_ns > newest for path in found)


def write_flags(config, folder):
    """Write down the flags of a run without training, unless the folder holds a training, with its own."""
    if not (folder / run_directory.RUN_FILE).exists():
        write_text(str(folder / run_directory.FLAGFILE), to_flagfile(config))


def train_or_load(config, model_config, objective, read_training, vocab_path, folder):
    """The model of a command: trained with `--do_train`, else as its checkpoint has it.

    Args:
        config, model_config, objective, vocab_path, folder: As in `fine_tune`.
        read_training: Function to `data` and `inputs` of `fine_tune`; called only to train.

    Returns:
        As of `fine_tune`.
    """
    if not config.do_train:
        model = load_model(config, model_config, objective, print)
        write_flags(config, folder)
        return model, None
    data, inputs = read_training()
    found = fine_tune(config, model_config, objective, data, inputs, vocab_path, folder, print, show_row)
    if found[1]:
        print("stopped after saving; the same command continues", file=sys.stderr)
    return found


def load_model(config, model_config, objective, tell):
    """The model of a config as its checkpoint has it, without training.

    Raises:
        InputError: the checkpoint does not fit, or lacks the head.
    """
    model = objective.build_model(model_config, config.random_seed, dtype=config.dtype)
    found = load_weights(config, model_config, model, tell)
    if found.missing:
        raise InputError(
            f"`init_checkpoint` must be fine-tuned for this task unless --do_train. Received: "
            f"{config.init_checkpoint}, which lacks {', '.join(found.missing)}."
        )
    return model


def load_weights(config, model_config, model, tell, folder=None):
    """Start a model from `--init_checkpoint`, where given, and tell; returns `StartingWeights` or None."""
    if not config.init_checkpoint:
        return None
    if folder:
        run_directory.check_outside(config.init_checkpoint, folder)
    found = starting_weights.load(config.init_checkpoint, named_weights(model), model_config, model.head)
    tell("\n".join(found.lines()))
    return found


def tell_scores(config, scores, folder):
    """Print the scores of a run and write them to its folder, and to `--json` where given.

    Args:
        config: `FinetuneConfig`.
        scores: Dict of float; empty where there is nothing to score against: what an earlier prediction in
            this folder scored is then removed.
        folder: Output directory.
    """
    path = folder / run_directory.SCORES_FILE
    if not scores:
        path.unlink(missing_ok=True)
        return
    print_table([{"score": name, "value": value} for name, value in scores.items()])
    for target in (path, *([config.json] if config.json else [])):
        write_json(target, scores)


def predict_packed(config, model, sequences):
    """The outputs of a model for each sequence, computed packed.

    Returns:
        As of `finetuning_batches.predict`, and the number of packs.
    """
    packs, spec = pack_all(
        sequences["lengths"], config.max_seq_length, config.max_sequences_per_pack, config.packing_algorithm
    )

    forward = compiled(lambda batch: model(batch, training=False), model)
    with out_of_memory_names("prediction", "predict_batch_size"):
        return predict(forward, sequences, packs, spec, config.predict_batch_size), len(packs)


def check_sequences(sequences, what):
    """Raises `InputError` where there is no sequence to work on."""
    if not len(sequences):
        raise InputError(f"{what} must give at least one sequence. Received: none.")


def _build_engine(config, model_config, objective, steps):
    model = objective.build_model(model_config, config.random_seed, dtype=config.dtype, remat=config.remat)
    schedule = WarmupPolynomialDecay(
        config.learning_rate,
        steps.num_train_steps,
        int(steps.num_train_steps * config.warmup_proportion),
    )
    settings = optimizer_settings(config)
    if config.optimizer == "lamb":
        optimizer = Lamb(schedule, **settings)
    else:
        optimizer = AdamWeightDecay(schedule, config.adam_bias_correction, **settings)
    return make_engine(model, objective, optimizer, config.micro_batch_size), schedule


def _facts(model_config, inputs, vocab_path, **data):
    """What a result depends on besides flags, as `run_directory.find_checkpoint` takes it."""
    return {
        "inputs": {name: _describe(paths) for name, paths in inputs.items()},
        "model": dataclasses.asdict(model_config),
        "data": {"vocab_sha256": file_sha256(vocab_path), **data},
    }


def _describe(paths):
    return [{"path": str(path), "sha256": file_sha256(path)} for path in paths]


def _describe_steps(config, data, updates, steps):
    return (
        f"data       {len(data.sequences):,} sequences of {data.sequences['lengths'].mean():.1f} tokens\n"
        f"packs      of {updates.spec.max_seq_length} tokens and up to "
        f"{updates.spec.max_sequences_per_pack} sequences: packing factor {updates.packing_factor:.3f}, "
        f"efficiency {updates.efficiency(data.sequences['lengths']):.2%}\n"
        f"step       {config.train_batch_size} sequences in at most {updates.num_packs} packs, "
        f"{config.micro_batch_size} at once; {steps.num_train_steps:,} steps"
    )
