"""Parts of a pre-training run: engine, hooks of the outer loop, comparison of speeds."""

import contextlib
import dataclasses
import functools
import itertools

import keras

from bert_packed.checkpoints import checkpoint, kept_optimizer, starting_weights
from bert_packed.config import AUTO, OBJECTIVE_HEADS
from bert_packed.core.settings import InputError
from bert_packed.data import input_pipeline
from bert_packed.data.batch_growth import GrowingBatches
from bert_packed.data.batches import CheckedBatches, ReadAhead
from bert_packed.data.dynamic_masking import MaskedBatches
from bert_packed.data.process_shards import ProcessShard
from bert_packed.models.kernels import choose_kernels
from bert_packed.models.packed_model import check_options
from bert_packed.parallel.processes import ALONE
from bert_packed.parallel.replicas import check_shares, count_replicas, group_of, make_replicas
from bert_packed.parallel.targets import devices_here
from bert_packed.runs import run_directory
from bert_packed.runs.exports import export_step
from bert_packed.runs.interleaved_timing import Contender, compare
from bert_packed.runs.objectives import choose_objective
from bert_packed.runs.pretraining_data import model_config_of, read_data
from bert_packed.runs.run_summary import tell_skipped
from bert_packed.runs.step_cost import measured_flops_per_second
from bert_packed.training import loop, metrics_log, training_metrics
from bert_packed.training.backend import TRAINING_COPIES, check_memory
from bert_packed.training.engines import make_engine
from bert_packed.training.optimization import build_optimizer, build_schedule
from bert_packed.training.profiling import Profile

NUM_TIMED_STEPS = 5
DTYPES_OF_PRODUCTS = {"float32": "float32", "mixed_bfloat16": "bfloat16"}


def build_engine(config, model_config, data, processes=ALONE, steps_before=0, target=None):
    """A compiled-step engine around a new model and optimizer, seeded by the config.

    `steps_before` is as in `build_optimizer`, `target` as in `Engine`.
    """
    target = target or devices_here()
    replicas = _choose_replicas(config, model_config, data, processes, target)
    if model_config.ablation_no_position_reset and model_config.max_position_embeddings:
        _check_positions(model_config, data.train.spec)
    objective = choose_objective(config.objective, model_config, config, data.train.num_rows)
    if config.batch_warmup_steps:
        # A step that has not grown yet fills its batch with empty packs, which must cost no time
        objective = dataclasses.replace(objective, skips_empty=True)
    kernels = choose_kernels(config.attention, model_config, data.train.spec.max_seq_length, target.platform)
    with replicas.scope() if replicas else contextlib.nullcontext():
        optimizer = build_optimizer(config, data.train.packing_factor or 1.0, steps_before)
    # For absent devices no weight is allocated; TensorFlow traces variables that have values
    is_abstract = target.devices and keras.backend.backend() == "jax"
    if not is_abstract and config.layout == "none":  # each device holds the whole model
        check_memory(model_config, TRAINING_COPIES)
    values = keras.StatelessScope(initialize_variables=False) if is_abstract else contextlib.nullcontext()
    with replicas.scope() if replicas else contextlib.nullcontext(), values:
        model = objective.build_model(
            model_config,
            config.random_seed,
            dtype=target.dtype if config.dtype == AUTO else config.dtype,
            remat=config.remat,
            num_rows=data.train.num_rows or None,
            layout=(replicas and replicas.layout) or None,
            **kernels.options,
        )
        return make_engine(model, objective, optimizer, config.packs_at_once, replicas, target)


def check_start(config, model_config, folder):
    """Refuse an `--init_checkpoint` whose place or config is wrong, before the run measures or computes.

    Raises `InputError` where it lies in `folder`, the output directory, is missing, or is another model's.
    Its tensors are checked by `start_engine`.
    """
    if config.init_checkpoint:
        run_directory.check_outside(config.init_checkpoint, folder)
        starting_weights.check(config.init_checkpoint, model_config, OBJECTIVE_HEADS[config.objective])


def start_engine(config, model_config, data, folder, latest, processes=ALONE):
    """An engine with the weights and the state that a run begins or continues with; nothing is written.

    `latest` is the run's checkpoint to continue from; None for a start, from `--init_checkpoint` if given.
    Returns the engine and the `state.json` of `latest`, or None. Raises `InputError` where a checkpoint is
    damaged, or another model's.
    """
    steps_before = 0
    if config.keep_optimizer_state:
        # Needed before the optimizer is built: its schedule begins at that step
        steps_before = kept_optimizer.steps_before(latest, config.init_checkpoint)
    engine = build_engine(config, model_config, data, processes, steps_before)
    if config.layout != "none":
        processes.say(engine.replicas.layout.describe(model_config))
    if latest:
        state = checkpoint.restore_checkpoint(latest, engine)
        processes.say(run_directory.describe_continuation(folder, latest))
        return engine, state
    if config.init_checkpoint:
        found = starting_weights.load(
            config.init_checkpoint, engine.weights(), model_config, engine.model.head
        )
        processes.say("\n".join(found.lines()))
    if config.keep_optimizer_state:  # of `--init_checkpoint`, too
        kept_optimizer.load(config.init_checkpoint, engine)
        processes.say(f"  its optimizer's moments, of {steps_before:,} steps, are kept")
    return engine, None


def _choose_replicas(config, model_config, data, processes, target):
    """The devices that a run is spread over; raises `InputError` where they cannot share its packs."""
    packs = {"micro_batch_size": config.packs_at_once}
    if data.eval.files:
        packs["eval_batch_size"] = config.eval_batch_size
    if config.layout == "none":
        # Data parallelism alone, every device holds the whole model
        replicas = make_replicas(config.distribution, processes.strategy, target)
        check_shares(replicas, **packs)
        return replicas
    if keras.backend.backend() != "jax":
        raise InputError(
            f"`layout` must be none unless KERAS_BACKEND=jax. Received: {config.layout}, under "
            f"{keras.backend.backend()}."
        )
    check_options(model_config, layout=config.layout)
    from bert_packed.parallel.layouts import make_layout_replicas  # JAX, which need not be installed

    replicas = make_layout_replicas(
        config.layout, config.mesh_shape, distribution=config.distribution, target=target
    )
    replicas.layout.check(model_config, **packs)
    return replicas


def _check_positions(model_config, spec):
    # The batches' own positions, which are checked, restart; these do not, and a look-up would clip them
    if spec.max_seq_length > model_config.max_position_embeddings:
        raise InputError(
            "`ablation` must not be no_position_reset where packs are longer than "
            f"max_position_embeddings={model_config.max_position_embeddings}. "
            f"Received: {spec.max_seq_length}."
        )


def machine_rate(config):
    """Operations per second that this machine reaches at matrix products of a run's dtype; measured now."""
    return measured_flops_per_second(dtype=DTYPES_OF_PRODUCTS[config.dtype])


def make_scale(config, model_config, data, engine, flops_per_second):
    """Reference quantities of a step's logged rates: `training_metrics.Scale`.

    `flops_per_second` is of one device, measured; None for no figure.
    """
    num_devices = engine.replicas.num_whole if engine.replicas else 1
    return training_metrics.Scale(
        positions_per_step=config.train_batch_size * data.train.spec.max_seq_length,
        model_flops=functools.partial(engine.objective.model_flops, model_config),
        peak_flops=flops_per_second and flops_per_second * num_devices,
    )


def make_hooks(
    config, model_config, data, engine, folder, first_step, evaluation_due, show, scale, processes=ALONE
):
    """The hooks of the outer loop: where batches come from, and where figures and checkpoints go.

    Args:
        folder: Output directory of the run.
        first_step: Step of the checkpoint it continues from; later rows of the logs are removed.
        evaluation_due: True if that step is still to be evaluated.
        show: Called with a line for people about each row of the training log.
        scale: Of `make_scale`.
        processes: All evaluate, the first writes, and the others wait for a checkpoint.
    """
    objective = engine.objective
    logs = _open_logs(config, data, objective, folder, first_step, evaluation_due, processes)
    log = logs[0]
    evaluate = None
    if data.eval.files:
        evaluate = functools.partial(
            evaluate_packs, config, model_config, data.eval, engine, logs[1], processes
        )
    schedule = build_schedule(config)

    def save(step, state):
        for one in logs:
            one.flush_to_disk()
        # In every process: they fetch parts of the weights from each other's devices
        held = engine.to_save(keeps=processes.is_first)
        processes.first_decides(
            # A string, since the decision travels to the other processes as JSON
            lambda: str(checkpoint.save_checkpoint(folder, step, held, model_config, state))
        )

    def export(step):
        held = engine.to_save(keeps=processes.is_first)
        processes.first_decides(
            lambda: str(export_step(folder, step, engine.model, held.weights(), config, data))
        )

    reading = []  # the batches of the loop

    def batches(first_step):
        reading[:] = [
            train_batches(config, model_config, objective, data.train, data.masking, processes, first_step)
        ]
        return reading[0]

    def note_skipped(step, why):
        # Each process knows where its own packs are from
        tell_skipped(step, why, reading[0].sources)
        run_directory.record_skipped(folder, processes.index, step, why, reading[0].sources)

    def prune():
        if processes.is_first:
            checkpoint.prune_checkpoints(folder, config.keep_checkpoint_max)

    return loop.Hooks(
        batches=batches,
        log=log.write,
        show=show if processes.is_first else lambda _: None,
        evaluate=evaluate,
        save=save,
        export=export if config.export_every else None,
        prune=prune,
        learning_rate=lambda step: float(schedule(step)),
        means=objective.means,
        tell_skipped=note_skipped,
        shows_progress=processes.is_first,
        num_processes=processes.num,
        scale=scale,
        profile=Profile(folder / run_directory.EVENTS_FOLDER / "profile", config.steps_to_profile),
    )


def _open_logs(config, data, objective, folder, first_step, evaluation_due, processes):
    """The log of training and, with held-out data, of evaluations; both are checked before one changes."""
    # An evaluation that is due is made again: its row may or may not have been written
    evaluated = first_step - 1 if evaluation_due else first_step
    logs = [
        (folder / metrics_log.TRAIN_FILE, metrics_log.train_columns(objective), config.log_steps, first_step),
        (folder / metrics_log.EVAL_FILE, metrics_log.eval_columns(objective), config.eval_steps, evaluated),
    ][: 2 if data.eval.files else 1]
    kept = []

    def read():
        for path, _, every, last_step in logs:
            due = loop.due_steps(every, config, last_step)
            kept.append(metrics_log.rows_to_keep(path, last_step, due, config.accept_lost_rows))

    processes.first_decides(read)
    if not processes.is_first:
        return [metrics_log.NoLog()] * len(logs)
    return [
        metrics_log.MetricsLog(path, columns, rows)
        for (path, columns, *_), rows in zip(logs, kept, strict=True)
    ]


def speed_rows(config, model_config, data, engine, processes=ALONE):
    """Rows that compare packed and unpacked training speed, measured now; [] without unpacked data.

    The engine takes training steps: call this after the last checkpoint.
    """
    if not data.unpacked.files:
        return []
    # Its own weights: it only gives the time of a step, which does not depend on them
    unpacked = build_engine(config, model_config, data, processes)
    # Full steps, as all are after the batch has grown
    config = dataclasses.replace(config, initial_batch_size=0, batch_warmup_steps=0)
    contenders = []
    for name, its_engine, packs, factor in (
        ("unpacked", unpacked, data.unpacked, 1.0),
        ("packed", engine, data.train, data.train.packing_factor),
    ):
        batches = train_batches(config, model_config, engine.objective, packs, data.masking, processes)
        with contextlib.closing(batches):
            some = list(itertools.islice(batches, NUM_TIMED_STEPS))
        # By the factor of all data: these few packs may hold more or fewer sequences
        per_step = factor * config.train_batch_size
        contenders.append(Contender(name, its_engine.train_step, some, per_step, factor))
    return compare(contenders, NUM_TIMED_STEPS)


def time_step(config):
    """Seconds of a step of a run that has not begun: the median of a few, after one that compiles."""
    data = read_data(config)
    model_config = model_config_of(config, data)
    engine = build_engine(config, model_config, data)
    with contextlib.closing(
        train_batches(config, model_config, engine.objective, data.train, data.masking)
    ) as batches:
        some = list(itertools.islice(batches, NUM_TIMED_STEPS))
    row, *_ = compare([Contender("steps", engine.train_step, some, 1.0, 1.0)], NUM_TIMED_STEPS)
    return row["seconds_per_step"]


def train_batches(config, model_config, objective, packs, masking, processes=ALONE, first_step=0):
    """`ReadAhead` of the endless batches of a run from `first_step` on, this process's part of each.

    `packs` are `PackedFiles`; `masking` is `DynamicMasking`, or None for the masks of the records.
    """
    shard, batch_size, first_batch = shard_of(config, processes), config.train_batch_size, first_step
    growth = config.growth
    if growth:
        # Read micro-batch by micro-batch: a step is as many of them as it has grown to
        batch_size = config.packs_at_once
        first_batch = growth.packs_before(first_step) // batch_size
    packed = input_pipeline.train_batches(
        packs.index,
        packs.spec,
        batch_size,
        config.random_seed,
        config.shuffle_buffer_size,
        first_batch,
        objective.features,
        shard,
    )
    batches = CheckedBatches(packed, packs.files, packs.spec, model_config, objective.features)
    if masking:
        batches = MaskedBatches(batches, masking, packs.index, shard, batch_size, first_batch)
    if growth:
        batches = GrowingBatches(batches, growth, first_step)
    return ReadAhead(batches)


def shard_of(config, processes):
    """The packs of a step that this process reads."""
    num, index = processes.num, processes.index
    if config.layout != "none":
        # The processes that share one copy of the model compute the same packs
        index, num = group_of(index, num, count_replicas(config.layout, config.mesh_shape))
    return ProcessShard(config.packs_at_once, index, num)


def evaluate_packs(config, model_config, packs, engine, log, processes, step):
    """Evaluate `packs`, `PackedFiles`, and write the row of figures of a step to `log`."""
    features = engine.objective.features
    packed = input_pipeline.eval_batches(
        packs.files, packs.spec, config.eval_batch_size, features, shard_of(config, processes), packs.index
    )
    batches = CheckedBatches(packed, packs.files, packs.spec, model_config, features)
    with contextlib.closing(ReadAhead(batches)) as batches:
        sums = loop.evaluate(engine, batches, config.max_eval_steps)
    log.write({"step": step, **engine.objective.means(sums), "num_sequences": int(sums["num_sequences"])})
