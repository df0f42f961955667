"""How the parts of a pre-training run fit together: engine, hooks of the outer loop, final comparison."""

import functools
import itertools

from bert_packed import checkpoint, input_pipeline, metrics_log, training
from bert_packed.engines.tensorflow import TensorFlowEngine
from bert_packed.losses import normalizers, pretraining_sums
from bert_packed.metrics import SUM_NAMES, means
from bert_packed.modeling import build_pretraining_model
from bert_packed.optimization import build_optimizer, build_schedule
from bert_packed.reports.packed_vs_unpacked import Contender, compare
from data_gen import records
from data_gen.settings import InputError

NUM_TIMED_STEPS = 5


def build_engine(config, model_config, data):
    """A compiled-step engine around a new model and optimizer, seeded by the config."""
    if model_config.ablation_no_position_reset:
        _check_positions(model_config, data.spec)
    next_sentence = not model_config.ablation_no_next_sentence
    return TensorFlowEngine(
        build_pretraining_model(model_config, config.random_seed, dtype=config.dtype, remat=config.remat),
        functools.partial(pretraining_sums, mlm_loss=config.mlm_loss, next_sentence=next_sentence),
        SUM_NAMES,
        functools.partial(normalizers, mlm_loss=config.mlm_loss),
        build_optimizer(config, data.packing_factor or 1.0),
        config.packs_at_once,
    )


def _check_positions(model_config, spec):
    # The batches' own positions, which are checked, restart; these do not, and a look-up would clip them
    if spec.max_seq_length > model_config.max_position_embeddings:
        raise InputError(
            "`ablation` must not be no_position_reset where packs are longer than "
            f"max_position_embeddings={model_config.max_position_embeddings}. "
            f"Received: {spec.max_seq_length}."
        )


def make_hooks(config, model_config, data, engine, folder, first_step):
    """The hooks of the outer loop: where batches come from, and where figures and checkpoints go.

    Args:
        config, model_config, data, engine: Of the run.
        folder: Its output directory.
        first_step: Step of the checkpoint it continues from; later rows of the logs are removed.
    """
    log = metrics_log.MetricsLog(folder / "metrics.csv", metrics_log.TRAIN_COLUMNS, first_step)
    evaluate = None
    if data.eval_files:
        eval_log = metrics_log.MetricsLog(folder / "eval_metrics.csv", metrics_log.EVAL_COLUMNS, first_step)
        evaluate = functools.partial(_evaluate, config, model_config, data, engine, eval_log)

    schedule = build_schedule(config)

    def save(step, state):
        checkpoint.save_checkpoint(folder, step, engine, model_config, state, config.keep_checkpoint_max)

    return training.Hooks(
        batches=functools.partial(
            _train_batches, config, model_config, data.files, data.spec, data.num_packs
        ),
        log=log.write,
        evaluate=evaluate,
        save=save,
        learning_rate=lambda step: float(schedule(step)),
    )


def speed_rows(config, model_config, data, engine):
    """Packed against unpacked training speed, measured now; [] where no unpacked data are given.

    Trains on: call it after the last checkpoint.
    """
    if not data.unpacked_files:
        return []
    unpacked = build_engine(config, model_config, data)
    num_unpacked = sum(records.count_records(path) for path in data.unpacked_files)
    contenders = []
    for name, its_engine, factor, source in (
        ("unpacked", unpacked, 1.0, (data.unpacked_files, data.unpacked_spec, num_unpacked)),
        ("packed", engine, data.packing_factor, (data.files, data.spec, data.num_packs)),
    ):
        batches = itertools.islice(_train_batches(config, model_config, *source, 0), NUM_TIMED_STEPS)
        per_step = factor * config.train_batch_size
        contenders.append(Contender(name, its_engine.train_step, list(batches), per_step, factor))
    return compare(contenders, NUM_TIMED_STEPS)


def _train_batches(config, model_config, files, spec, num_packs, first_step):
    dataset = input_pipeline.train_batches(
        files,
        num_packs,
        spec,
        config.train_batch_size,
        config.random_seed,
        config.shuffle_buffer_size,
        first_step,
    )
    return input_pipeline.checked(dataset, files, spec, model_config)


def _evaluate(config, model_config, data, engine, log, step):
    dataset = input_pipeline.eval_batches(data.eval_files, data.eval_spec, config.eval_batch_size)
    batches = input_pipeline.checked(dataset, data.eval_files, data.eval_spec, model_config)
    sums = training.evaluate(engine, batches, config.max_eval_steps)
    log.write({"step": step, **means(sums, config.mlm_loss), "num_sequences": int(sums["num_sequences"])})
