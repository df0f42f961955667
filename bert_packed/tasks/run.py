"""Fine-tuning runs: from a model that reads texts, by packs, engine and outer loop, to scores."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import keras

from bert_packed.architectures.base_config import BaseConfig
from bert_packed.architectures.registry import FINETUNING_HEADS, override_dropout
from bert_packed.assembly.update_packs import fit_predictions, pack_all, plan_row_updates, plan_updates
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.checkpoints.export_formats import check_form, write_hugging_face
from bert_packed.core.command_line import print_table, to_flagfile
from bert_packed.core.hub import recorded_flags
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, write_folder, write_json, write_text
from bert_packed.data.batches import ReadAhead
from bert_packed.kernels.choose import Kernels, choose_kernels
from bert_packed.parallel.processes import ALONE, Alone
from bert_packed.parallel.replicas import Replicas, check_shares, make_replicas
from bert_packed.parallel.targets import devices_here
from bert_packed.runs import run_directory, vocabulary
from bert_packed.runs.exports import write_model_card
from bert_packed.runs.run_summary import show_line, tell_skipped
from bert_packed.tasks.batches import predict, train_batches
from bert_packed.tasks.config import FinetuningResult, LoopSteps
from bert_packed.tasks.evaluation import EvaluationLog, take_best
from bert_packed.text.tokenization import TextTokenizer
from bert_packed.text.vocabularies import file_name, load_text_tokenizer
from bert_packed.training import loop, metrics_log
from bert_packed.training.backend import TRAINING_COPIES, check_memory, compiled, out_of_memory_names
from bert_packed.training.engines import make_engine
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.optimization import OPTIMIZERS, WarmupStableDecay, optimizer_settings


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model's shape, how it reads texts, what it computes in kernels, and the processes of its run."""

    config: BaseConfig
    vocab_path: Path
    tokenizer: TextTokenizer
    kernels: Kernels
    processes: Alone


def read_text_model(config, processes=ALONE):
    """The `TextModel` of a `FinetuneConfig`; prints lines about the batch and the vocabulary.

    Raises `InputError` where the vocabulary or the model is missing, they do not belong together, the model
    cannot be fine-tuned with packs of this length, or there is no kernel that is asked for.
    """
    given = config.init_checkpoint, config.bert_config_file
    family = starting_weights.read_model_config(*given)
    path = vocabulary.find_vocab(config.init_checkpoint, config.vocab_file, family)
    check_form(path, family)
    tokenizer = load_text_tokenizer(path, config.do_lower_case)
    size = tokenizer.vocab_size
    model_config = starting_weights.read_model_config(*given, size)
    starting_weights.check_reads(model_config, FINETUNING_HEADS, config.max_seq_length, size, *given)
    line = vocabulary.describe_vocabulary(path, size, model_config, bool(config.init_checkpoint))
    vocabulary.check_as_trained(config, path)
    if config.do_train:
        size = count_of(config.train_batch_size, config.batch_unit)
        print(f"batch      {size} a step (train_batch_size), packed or not")
    print(line)
    model_config = override_dropout(model_config, config)
    platform = devices_here().platform
    kernels = choose_kernels(config.attention, model_config, config.max_seq_length, platform)
    return TextModel(model_config, path, tokenizer, kernels, processes)


MODEL_FOLDER = "model"  # of an export, in an output directory


def check_export(config):
    """Raise `InputError` where a model that is not trained now would take the place of one that was."""
    exported = Path(config.output_dir) / MODEL_FOLDER
    if not config.do_train and exported.exists():
        raise InputError(f"`output_dir` must hold no {MODEL_FOLDER} unless --do_train. Received: {exported}.")


@contextlib.contextmanager
def exported_model(config, text, model, folder, **details):
    """Write `model/`, a folder of transformers, whole or not at all; the body adds to the folder it is given.

    `details` are further arguments of `write_hugging_face`.
    """
    details |= {"vocab_file": str(text.vocab_path), "do_lower_case": config.do_lower_case}
    with write_folder(folder / MODEL_FOLDER) as partial:
        write_hugging_face(partial, model, named_weights(model), **details)
        yield partial
    print(f"wrote {folder / MODEL_FOLDER}")


def export_labels(config, text, classes, more, model, folder, scores):
    """`exported_model` whose outputs are `classes`, and its card; `more` are entries of `config.json`."""
    details = {"classes": classes, "max_length": config.max_seq_length, "more": more}
    with exported_model(config, text, model, folder, **details) as partial:
        write_model_card(partial, model, {"flags": recorded_flags(config), "scores": scores})


def run_task(config, text, objective, read_training, predict=None, evaluation=None, export=None, new_head=""):
    """Train a model with `--do_train`, else load it; predict, export; print and write the scores.

    Args:
        config, text, objective: `FinetuneConfig`, `TextModel` and `Objective`.
        read_training: Function that returns `LabelledSequences` and a dict from flag name to the paths that
            it names; called only to train.
        predict: Function of model and output directory that writes predictions. It returns scores, a dict of
            float, {} where there is nothing to score against, None where scores are not wanted.
        evaluation: `Evaluation` in training, or None.
        export: Function of model, output directory and the scores of `predict`; None for no export.
        new_head: Beginning of the names of weights that training does not take from the start; "" for none.

    Returns a `FinetuningResult`. Raises `InputError` where another run is in the directory, the checkpoint to
    start from does not fit, or the devices cannot share a step.
    """
    processes = text.processes
    config = run_directory.as_begun(config, processes)
    replicas = make_replicas(config.distribution, processes.strategy) if config.do_train else None
    check_shares(replicas, micro_batch_size=config.micro_batch_size)
    with run_directory.locked(config.output_dir, processes) as folder:
        if config.do_train:
            data, inputs = read_training()
            # The end of the run then depends on what is scored
            if evaluation and evaluation.config.early_stopping_patience:
                inputs = {**inputs, "eval_file": evaluation.files}
            if not len(data.sequences):
                (path, *_), *_ = inputs.values()
                raise InputError(f"{path} must give at least one sequence. Received: none.")
            model, stopped_by = _fine_tune(
                config, text, objective, data, inputs, folder, evaluation, new_head, replicas
            )
            if stopped_by:
                if processes.is_first:
                    print("stopped after saving; the same command continues", file=sys.stderr)
                return FinetuningResult(config.output_dir, {}, stopped_by)
        else:
            model = _load_model(config, text, objective)
            # The flagfile of a training that is in the folder stays
            if processes.is_first and not (folder / run_directory.RUN_FILE).exists():
                write_text(str(folder / run_directory.FLAGFILE), to_flagfile(config))

        def finish():
            if evaluation:
                take_best(config, folder, model)
            scores = predict(model, folder) if predict else None
            if export:
                export(model, folder, scores)
            if scores is not None:
                _tell_scores(config, scores, folder)
            return scores

        scores = processes.first_decides(finish)
    return FinetuningResult(config.output_dir, scores or {})


def _plan_updates(config, data, num_steps):
    given = data.sequences["lengths"], num_steps, config.train_batch_size
    sizes = config.max_seq_length, config.max_sequences_per_pack, config.packing_algorithm, config.random_seed
    if data.texts_per_row > 1:
        return plan_row_updates(*given, data.texts_per_row, *sizes)
    return plan_updates(*given, *sizes)


def _fine_tune(config, text, objective, data, inputs, folder, evaluation, new_head, replicas):
    """Train from the start, or from where a run stopped: the model, and the signal that stopped it."""
    model_config, processes = text.config, text.processes
    steps = LoopSteps(
        config.num_train_steps(len(data.sequences) // data.texts_per_row),
        config.log_steps,
        config.save_checkpoints_steps,
        config.max_skipped_steps,
        evaluation.config.eval_steps if evaluation else 0,
    )
    size = count_of(config.train_batch_size, config.batch_unit)
    print(f"plan       {count_of(steps.num_train_steps, 'step')} of {size}")
    updates = _plan_updates(config, data, steps.num_train_steps)
    # All steps have one static shape, as wide as the fullest pack and as long as the longest step, so that
    # XLA compiles once. Empty packs fill it up to whole micro-batches, or to as many packs on each device:
    # they hold no sequence, so they add nothing to a loss, a count or a gradient
    updates = fit_predictions(updates, data.sequences["num_predictions"])
    at_once = config.micro_batch_size or _round_up(updates.num_packs, replicas.num if replicas else 1)
    num_packs = _round_up(updates.num_packs, at_once)
    longest = int(data.sequences["lengths"].max())
    classes = {"classes": list(data.classes)} if data.classes else {}
    facts = _facts(text, inputs, num_sequences=len(data.sequences), longest_sequence=longest, **classes)
    vocab_text = text.vocab_path.read_bytes().decode()  # it may be in the folder that a new start empties
    latest = run_directory.agree(folder, config, facts, print, processes)
    engine, schedule = _build_engine(config, text, objective, steps, replicas)
    path = folder / metrics_log.TRAIN_FILE
    first_step, state, rows, scored, starts_whole = 0, None, [], [], False
    if latest:
        state = checkpoint.restore_checkpoint(latest, engine)
        first_step = state["step"]
        due = metrics_log.due_steps(config.log_steps, steps, first_step)
        # An evaluation that is due is made again
        last = first_step - 1 if state["evaluation_due"] else first_step
        logs = (path, first_step, due), (folder / metrics_log.EVAL_FILE, last, [])
        # A log may be damaged, so all are read before any file changes
        rows, scored = processes.first_decides(
            lambda: [metrics_log.rows_to_keep(*one, config.accept_lost_rows) for one in logs]
        )
        print(run_directory.describe_continuation(folder, latest))
    else:
        if config.init_checkpoint:
            run_directory.check_outside(config.init_checkpoint, folder)
            found = _load_weights(config, model_config, engine.model, new_head)
            starts_whole = not found.missing
        # This removes an earlier run, so it comes last: weights that cannot be loaded have raised above
        facts |= {
            "packing_factor": updates.packing_factor,
            "sequences_per_step": config.train_batch_size * data.texts_per_row,
            "num_train_steps": steps.num_train_steps,
        }

        def start():
            run_directory.start_run(folder, config, facts)
            write_text(str(folder / file_name(text.vocab_path)), vocab_text)
            if data.classes:
                names = "".join(f"{name}\n" for name in data.classes)
                write_text(str(folder / starting_weights.LABELS_FILE), names)

        processes.first_decides(start)
    if processes.is_first:
        run_directory.remove_partial(folder)
        if first_step < steps.num_train_steps:
            run_directory.record_segment(folder, first_step, keras.backend.backend())
    print(f"attention  {text.kernels.description}")
    print(_describe_steps(config, data, updates, steps))
    log = metrics_log.open_log(path, metrics_log.train_columns(objective), rows, processes)
    evaluated = None
    if evaluation:
        evaluated = EvaluationLog(evaluation, folder, engine.model, scored, processes)
        # Training may harm a model that can do its task: its start is scored, and may be the best
        if starts_whole and (evaluation.config.eval_steps or evaluation.config.keep_best):
            evaluated.evaluate(0)

    def save(step, state):
        # Rows come first: a run that continues from this checkpoint needs every row up to its step
        for one in (log, evaluated):
            if one:
                one.flush_to_disk()
        # The result is a string, since it travels to the other processes as JSON
        processes.first_decides(
            lambda: str(checkpoint.save_checkpoint(folder, step, engine, model_config, state))
        )

    def own_packs(values):
        # Every process makes whole steps, and takes its part of each micro-batch
        return Replicas(processes.num, processes.num).by_replica(values, at_once)[processes.index]

    def prune():
        if processes.is_first:
            checkpoint.prune_checkpoints(folder, config.keep_checkpoint_max)

    hooks = loop.Hooks(
        batches=lambda step: ReadAhead(train_batches(data, updates, num_packs, step, own_packs)),
        log=log.write,
        show=show_line,
        evaluate=evaluated and evaluated.evaluate,
        save=save,
        prune=prune,
        learning_rate=lambda step: float(schedule(step)),
        means=objective.means,
        tell_skipped=tell_skipped,
        shows_progress=processes.is_first,
        num_processes=processes.num,
        scale=metrics_log.Scale(num_packs * config.max_seq_length),
    )
    stopped_by = None
    # A run that ended early goes on no further
    if not (evaluated and evaluated.is_over() and not (state and state["evaluation_due"])):
        with run_directory.naming_last_checkpoint(folder):
            stopped_by = loop.train(engine, steps, hooks, first_step, state)
    if engine.num_train_traces:
        print(f"compiled   {engine.num_train_traces} training program")
    return engine.model, stopped_by


def _round_up(number, multiple):
    return -(-number // multiple) * multiple


def has_results(config, text, inputs, results, evaluated):
    """True if a run of this config is over, and its result files are newer than all paths of `evaluated`."""
    config, folder = run_directory.as_begun(config), Path(config.output_dir)
    if not folder.is_dir() or not run_directory.find_checkpoint(folder, config, _facts(text, inputs)):
        return False
    # A run that starts removes its results, so those that are there once it is over are its own
    found = [folder / name for name in results]
    newest = max((Path(path).stat().st_mtime_ns for path in evaluated), default=0)
    # A folder is an export, of training alone
    return bool(found) and all(
        path.is_dir() or (path.is_file() and path.stat().st_mtime_ns > newest) for path in found
    )


def _load_model(config, text, objective):
    """The model of a config with its checkpoint's weights; raises `InputError` where these lack the head."""
    check_memory(text.config)
    options = text.kernels.options
    model = objective.build_model(text.config, config.random_seed, dtype=config.dtype, **options)
    found = _load_weights(config, text.config, model)
    # A head with its initial, random values would predict noise
    if found.missing:
        raise InputError(
            f"`init_checkpoint` must be fine-tuned for this task unless --do_train. Received: "
            f"{config.init_checkpoint}, which lacks {', '.join(found.missing)}."
        )
    return model


def _load_weights(config, model_config, model, new_head=""):
    weights = named_weights(model)
    path = config.init_checkpoint
    if new_head:
        print(f"head       has new weights: that of {path} has other labels, or another order of them")
    found = starting_weights.load(path, weights, model_config, model.head, new_head=new_head)
    print("\n".join(found.lines()))
    return found


def _tell_scores(config, scores, folder):
    """Print scores and write them; without any remove what an earlier prediction scored."""
    if not scores:
        # Old scores beside new predictions would be taken for theirs
        (folder / run_directory.SCORES_FILE).unlink(missing_ok=True)
        return
    print_table([{"score": name, "value": value} for name, value in scores.items()])
    write_scores(config, scores, folder)


def write_scores(config, scores, folder):
    """Write scores to their file in the run's folder, and to the one that the config names."""
    for path in (folder / run_directory.SCORES_FILE, *([config.json] if config.json else [])):
        write_json(path, scores)


def forward_of(model):
    """The compiled function of a model for `predict_packed`."""
    return compiled(lambda batch: model(batch, training=False), model)


def predict_packed(config, forward, sequences):
    """The outputs of a compiled function, as `forward_of`, for each sequence, and the number of packs."""
    packs, spec = pack_all(
        sequences["lengths"], config.max_seq_length, config.max_sequences_per_pack, config.packing_algorithm
    )
    with out_of_memory_names("prediction", "predict_batch_size"):
        return predict(forward, sequences, packs, spec, config.predict_batch_size), len(packs)


def _build_engine(config, text, objective, steps, replicas):
    check_memory(text.config, TRAINING_COPIES)
    num_warmup_steps = int(steps.num_train_steps * config.warmup_proportion)
    schedule = WarmupStableDecay(config.learning_rate, steps.num_train_steps, num_warmup_steps)
    settings = optimizer_settings(config)
    if config.optimizer == "adam":
        settings["corrects_bias"] = config.adam_bias_correction
    options = {"dtype": config.dtype, "remat": config.remat, **text.kernels.options}
    with replicas.scope() if replicas else contextlib.nullcontext():
        model = objective.build_model(text.config, config.random_seed, **options)
        optimizer = OPTIMIZERS[config.optimizer](schedule, **settings)
        engine = make_engine(model, objective, optimizer, config.micro_batch_size or None, replicas)
    return engine, schedule


def _facts(text, inputs, **data):
    """Facts that a result depends on besides flags, as `run_directory.find_checkpoint` takes them."""
    described = {
        name: [{"path": str(path), "sha256": file_sha256(path)} for path in paths]
        for name, paths in inputs.items()
    }
    return {
        "inputs": described,
        "model": dataclasses.asdict(text.config),
        "data": {"vocab_sha256": file_sha256(text.vocab_path), **data},
    }


def _describe_steps(config, data, updates, steps):
    lengths, spec = data.sequences["lengths"], updates.spec
    return (
        f"data       {count_of(len(lengths), 'sequence')} of {lengths.mean():.1f} tokens\n"
        f"packs      of {spec.max_seq_length} tokens and up to "
        f"{count_of(spec.max_sequences_per_pack, 'sequence')}: packing factor {updates.packing_factor:.3f}, "
        f"efficiency {updates.efficiency(lengths):.2%}\n"
        f"step       {count_of(config.train_batch_size, config.batch_unit)} in at most "
        f"{count_of(updates.num_packs, 'pack')}, {config.micro_batch_size or 'all'} at once; "
        f"{count_of(steps.num_train_steps, 'step')}"
    )
