"""Pre-training as a function: from a config to a trained model in its output directory."""

import dataclasses
import sys
import types
from pathlib import Path

from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json
from bert_packed.parallel import cluster
from bert_packed.training.engines import choose_backend


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """What a call of `pretrain` ended with."""

    output_dir: str
    metrics: list[dict]  # the last figures, a row for training and one for the held-out data; [] if stopped
    speed: list[dict]  # packed beside unpacked training, with `unpacked_input_file`; else []
    stopped_by: int = 0  # the signal after which the run saved and stopped; 0 = it is complete
    not_compared: str = ""  # why the two speeds could not be compared


def pretrain(config, prepare=None):
    """Pre-train a model as a `PretrainingConfig` describes, or continue its run; prints as it goes.

        result = bert_packed.pretrain(PretrainingConfig(input_file="packed/*.tfrecord", output_dir="run"))

    SIGTERM and Ctrl-C save at the next step and stop. In the first step, which compiles, SIGTERM ends the
    process at once, unless there are several. In a cluster every process calls this.

    Args:
        config: `PretrainingConfig`; `compile_only` must be empty.
        prepare: Function that makes missing records; called by the first process, before any looks for them.

    Returns:
        `PretrainingResult`. Its metrics are those of the first process, [] in the others.

    Raises:
        InputError: settings, records or an earlier run in the output directory cannot be used, with the words
            of `run_pretraining.py`. It is a `ValueError`.
        OSError: a file cannot be read or written.
        MemoryError: the devices have too little memory.
    """
    if config.compile_only:
        raise InputError(f"`compile_only` must be empty to train. Received: {config.compile_only}.")
    if config.sample_data and not prepare:
        raise InputError("`sample_data` must be false without the command that makes it. Received: True.")
    backend = choose_backend()
    with cluster.start(config.distribution, backend) as processes:
        if prepare:
            processes.first_decides(lambda: prepare() and None)
        return _run(config, backend, processes)


def _run(config, backend, processes):
    # TensorFlow: not before the backend is chosen
    from bert_packed.kernels.choose import choose_kernels
    from bert_packed.parallel.targets import devices_here
    from bert_packed.runs import pretraining, run_directory, vocabulary
    from bert_packed.runs.exports import check_export
    from bert_packed.runs.objectives import choose_objective
    from bert_packed.runs.pretraining_data import check_fits, check_held_out, model_config_of, read_data
    from bert_packed.runs.run_summary import describe_cost, describe_run, show_line
    from bert_packed.training import loop
    from bert_packed.training.backend import out_of_memory_names

    config = run_directory.as_begun(config.with_eval_file(), processes)
    if not config.do_train:
        return _evaluate(config, processes)
    data = read_data(config, processes)
    config = config.resolved(data.num_packs)
    model_config = model_config_of(config, data)
    check_fits(data, model_config, config)
    check_export(config, model_config, data)
    facts = {"model": dataclasses.asdict(model_config), **data.facts}
    with run_directory.locked(config.output_dir, processes) as folder:
        latest = run_directory.agree(folder, config, facts, print, processes)
        if not latest:
            pretraining.check_start(config, model_config, folder)
            vocabulary.check_start(config.init_checkpoint, model_config, data.vocabulary)
            features = choose_objective(config.objective, model_config, config).features
            check_held_out(data, model_config, config, features, pretraining.shard_of(config, processes))
        kernels = choose_kernels(
            config.attention, model_config, data.train.spec.max_seq_length, devices_here().platform
        )
        processes.say(describe_run(config, model_config, data, kernels.description))
        engine, state = pretraining.start_engine(config, model_config, data, folder, latest, processes)
        first_step = state["step"] if state else 0
        if not latest:
            # Only now, when the new run is known to start, does an earlier one go
            processes.first_decides(lambda: run_directory.start_run(folder, config, facts))
        if processes.is_first:
            run_directory.remove_partial(folder)
            vocabulary.keep_copy(folder, data.vocabulary)
        is_complete = first_step == config.num_train_steps
        rate = pretraining.machine_rate(config) if processes.is_first and not is_complete else None
        scale = pretraining.make_scale(config, model_config, data, engine, rate)
        if rate and not latest:
            processes.say(describe_cost(config, model_config, scale.model_flops, data, rate))
        due = bool(state and state["evaluation_due"])
        hooks = pretraining.make_hooks(
            config, model_config, data, engine, folder, first_step, due, show_line, scale, processes
        )
        if is_complete:
            processes.say(f"the run is complete: {latest} holds all {first_step:,} steps")
        elif processes.is_first:
            run_directory.record_segment(folder, first_step, backend, peak_flops=scale.peak_flops)
        with run_directory.naming_last_checkpoint(folder):
            stopped_by = loop.train(engine, config, hooks, first_step, state)
        if stopped_by:
            if processes.is_first:
                print("stopped after saving; the same command continues", file=sys.stderr)
            return PretrainingResult(config.output_dir, [], [], stopped_by)
        metrics = _report(config, folder, engine) if processes.is_first else []
        speed, not_compared = [], ""
        # After the report: whatever befalls the comparison, the run's figures are out
        try:
            with out_of_memory_names("the comparison of speeds", "micro_batch_size"):
                speed = pretraining.speed_rows(config, model_config, data, engine, processes)
        except (InputError, OSError, MemoryError) as error:
            not_compared = " ".join(str(error).split())
        if speed and processes.is_first:
            print()
            print_table(speed)
            _write(config, metrics, speed)
        return PretrainingResult(config.output_dir, metrics, speed, not_compared=not_compared)


def _evaluate(config, processes):
    """Evaluate the newest checkpoint of a run, or what it would start from."""
    from bert_packed.architectures.registry import OBJECTIVE_HEADS
    from bert_packed.checkpoints import checkpoint, starting_weights
    from bert_packed.runs import pretraining, run_directory
    from bert_packed.runs.pretraining_data import check_fits, model_config_of, read_eval_data
    from bert_packed.training.backend import out_of_memory_names

    data = read_eval_data(config)
    model_config = model_config_of(config, data)
    check_fits(data, model_config, config)
    newest = checkpoint.list_checkpoints(Path(config.output_dir))[-1:]
    if not newest and not config.init_checkpoint:
        raise InputError(
            f"`output_dir` must hold a checkpoint with do_train=false and no init_checkpoint. Received: "
            f"{config.output_dir}, with none."
        )
    source = str(newest[0]) if newest else config.init_checkpoint
    step = int(checkpoint.NAME.fullmatch(newest[0].name)[1]) if newest else 0
    starting_weights.check(source, model_config, OBJECTIVE_HEADS[config.objective])
    with run_directory.locked(config.output_dir, processes) as folder:
        engine = pretraining.build_engine(config, model_config, data, processes)
        found = starting_weights.load(source, engine.weights(), model_config, engine.model.head)
        if found.missing:  # their initial values would be evaluated
            raise InputError(
                f"`init_checkpoint` must have every head of objective={config.objective} to be evaluated. "
                f"Received: {source}, which lacks {', '.join(found.missing)}."
            )
        processes.say("\n".join(found.lines()))
        rows = []
        log = types.SimpleNamespace(write=rows.append)
        with out_of_memory_names("the evaluation", "eval_batch_size"):
            pretraining.evaluate_packs(config, model_config, data.eval, engine, log, processes, step)
        metrics = [{"data": "eval", **rows[0]}]
        if processes.is_first:
            print_table(metrics)
            _write_scores(folder, metrics)
            _write(config, metrics, [])
    return PretrainingResult(config.output_dir, metrics if processes.is_first else [], [])


def _write_scores(folder, metrics):
    """Write the figures of the held-out packs, where there are any, to `eval_results.json`."""
    from bert_packed.runs.run_directory import SCORES_FILE

    for row in metrics:
        if row["data"] == "eval":
            write_json(folder / SCORES_FILE, {name: value for name, value in row.items() if name != "data"})


def _report(config, folder, engine):
    """Print the last figures of the run and write them to `--json`; returns them."""
    from bert_packed.runs.run_summary import last_figures

    metrics = last_figures(folder, engine.objective.figures)
    if engine.num_train_traces:
        print(f"compiled   {engine.num_train_traces} training program")
    print_table(metrics)
    sys.stdout.flush()
    _write_scores(folder, metrics)
    _write(config, metrics, [])
    return metrics


def _write(config, metrics, speed):
    if config.json:
        write_json(config.json, {"metrics": metrics, "speed": speed})
