"""Command line: pre-train a packed BERT, or a packed Mamba."""

import dataclasses
import sys

from bert_packed.config import ablate, load_model_config, override_dropout
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json
from bert_packed.parallel import cluster
from bert_packed.records.inputs import find_files
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training.engines import choose_backend

INPUTS = "input_file", "eval_input_file", "unpacked_input_file"
# The run is complete and reported, but its speed could not be compared
STATUS_NOT_COMPARED = 3
DESCRIPTION = """
Pre-trains a packed BERT: masked language model and next-sentence prediction on packed TFRecords, with
--objective=mlm the masked language model alone. With --objective=causal_lm a packed Mamba: every next token.

OUTPUT_DIR receives checkpoints, metrics.csv, eval_metrics.csv and TensorBoard events. The same command
continues a stopped run. SIGTERM and Ctrl-C save at the next step and stop.
--compile_only=FOLDER compiles the training step and reports on its program instead.
Flagfiles of whole runs are in configs/; --flagfile=demo.flags takes under two minutes on two cores.
"""


def main(config):
    """Train, evaluate and report one run; returns an exit status."""
    # Before the import of TensorFlow, which takes seconds; but in a cluster only after all have met, or the
    # others would wait for a process that has left
    if not config.sample_data and config.distribution != "multi_worker":
        for name in INPUTS:
            if getattr(config, name):
                find_files(getattr(config, name), name)
    backend = choose_backend()
    if config.compile_only:
        from bert_packed.runs.compile_only import compile_run

        if config.sample_data:
            from data_gen.sample_data import build_missing

            build_missing()
        return compile_run(config, backend)
    with cluster.start(config.distribution, backend) as processes:
        return _run(config, backend, processes)


def _run(config, backend, processes):
    # TensorFlow: not for --help
    from bert_packed.models.flash_attention import choose_attention
    from bert_packed.parallel.targets import devices_here
    from bert_packed.runs import pretraining, run_directory, vocabulary
    from bert_packed.runs.exports import check_export
    from bert_packed.runs.objectives import choose_objective
    from bert_packed.runs.pretraining_data import check_fits, check_held_out, read_data
    from bert_packed.runs.run_summary import describe_cost, describe_run, show_row
    from bert_packed.training import loop
    from bert_packed.training.backend import out_of_memory_names

    if config.sample_data:
        from data_gen.sample_data import build_missing

        processes.first_decides(lambda: build_missing() and None)
    config = run_directory.with_dtype(config, processes)
    data = read_data(config, processes)
    model_config = override_dropout(load_model_config(config.bert_config_file, data.train.vocab_size), config)
    model_config = ablate(model_config, config.ablation)
    check_fits(data, model_config, config)
    check_export(config, model_config, data)
    facts = {"model": dataclasses.asdict(model_config), **data.facts}
    with run_directory.locked(config.output_dir, processes) as folder:
        latest = run_directory.agree(folder, config, facts, print, processes)
        if not latest:
            pretraining.check_start(config, model_config, folder)
            features = choose_objective(config.objective, model_config, config).features
            check_held_out(data, model_config, config, features, pretraining.shard_of(config, processes))
        attention = choose_attention(
            config.attention, model_config, data.train.spec.max_seq_length, devices_here().platform
        )
        processes.say(describe_run(config, model_config, data, attention.description))
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
            config, model_config, data, engine, folder, first_step, due, show_row, scale, processes
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
            return 128 + stopped_by
        metrics = _report(config, folder, engine) if processes.is_first else None
        # After the report: whatever befalls the comparison, the run's figures are out
        try:
            with out_of_memory_names("the comparison of speeds", "micro_batch_size"):
                speed = pretraining.speed_rows(config, model_config, data, engine, processes)
        except (InputError, OSError, MemoryError) as error:
            reason = " ".join(str(error).split())
            print(f"the run is complete; its speed could not be compared: {reason}", file=sys.stderr)
            return STATUS_NOT_COMPARED
        if speed and processes.is_first:
            print()
            print_table(speed)
            _write(config, metrics, speed)
    return 0


def _report(config, folder, engine):
    """Print the last figures of the run and write them to `--json`; returns them."""
    from bert_packed.runs.run_summary import last_figures

    metrics = last_figures(folder, engine.objective.figures)
    if engine.num_train_traces:
        print(f"compiled   {engine.num_train_traces} training program")
    print_table(metrics)
    sys.stdout.flush()
    _write(config, metrics, [])
    return metrics


def _write(config, metrics, speed):
    if config.json:
        write_json(config.json, {"metrics": metrics, "speed": speed})


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, PretrainingConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
