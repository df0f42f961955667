"""Command line: pre-train a packed BERT."""

import dataclasses
import sys

from bert_packed.config import TrainConfig, ablate, ablations, load_model_config
from data_gen.command_line import print_table, run, write_json

DESCRIPTION = """
Pre-trains a packed BERT: masked language model and next-sentence prediction on packed TFRecords.

OUTPUT_DIR receives checkpoints, metrics.csv, eval_metrics.csv and TensorBoard events. The same command
continues a stopped run. SIGTERM and Ctrl-C save at the next step and stop.
Flagfiles of whole runs are in configs/; --flagfile=demo.flags takes five minutes on two cores.
"""


def main(config):
    """Train, evaluate and report one run; returns an exit status."""
    # TensorFlow: not for --help
    from bert_packed import checkpoint, run_directory, starting_weights, training
    from bert_packed.pretraining import build_engine, make_hooks, speed_rows
    from bert_packed.run_data import read_data

    if config.sample_data:
        from data_gen.sample_data import build_missing

        build_missing()
    data = read_data(config)
    model_config = _model_config(config, data.vocab_size)
    with run_directory.locked(config.output_dir) as folder:
        latest = run_directory.open_run(folder, config, data.inputs)
        _announce(config, model_config, data)
        engine = build_engine(config, model_config, data)
        first_step, state = 0, None
        if latest:
            state = checkpoint.restore_checkpoint(latest, engine)
            first_step = state["step"]
        elif config.init_checkpoint:
            found = starting_weights.load(config.init_checkpoint, engine.weights(), model_config)
            print("\n".join(found.lines()))
        if first_step == config.num_train_steps:
            print(f"the run is complete: {latest} holds all {first_step:,} steps")
            return 0
        if latest:
            print(f"continues from {latest}")
        else:
            _announce_cost(config, model_config, data)
        hooks = make_hooks(config, model_config, data, engine, folder, first_step)
        stopped_by = training.train(engine, config, hooks, first_step, state)
        if stopped_by:
            print("stopped after saving; the same command continues", file=sys.stderr)
            return 128 + stopped_by
        _report(config, folder, engine, speed_rows(config, model_config, data, engine))
    return 0


def _model_config(config, vocab_size):
    model_config = load_model_config(config.bert_config_file, vocab_size)
    rates = {
        name: getattr(config, name)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")
        if getattr(config, name) >= 0
    }
    return ablate(dataclasses.replace(model_config, **rates), config.ablation)


def _announce(config, model_config, data):
    if ablations(model_config):
        print(f"ABLATION   {', '.join(ablations(model_config))}: PACKING IS BROKEN ON PURPOSE IN THIS RUN")
    spec, factor = data.spec, data.packing_factor
    sequences = "unknown, no manifest.json beside the records"
    if factor:
        sequences = f"{factor * config.train_batch_size:.1f} (packing factor {factor:.3f})"
    print(
        f"model      {config.bert_config_file}: {model_config.num_hidden_layers} layers of width "
        f"{model_config.hidden_size}, vocabulary {model_config.vocab_size:,}\n"
        f"data       {data.num_packs:,} packs of {spec.max_seq_length} tokens, up to "
        f"{spec.max_sequences_per_pack} sequences and {spec.max_predictions_per_pack} predictions each\n"
        f"step       {config.train_batch_size} packs, {config.packs_at_once} at once; expected sequences per "
        f"step: {sequences}"
    )


def _announce_cost(config, model_config, data):
    """Say at once what a step will cost, and how to make it smaller where it is long."""
    from bert_packed.reports.step_cost import describe, estimate_step_seconds

    seconds = estimate_step_seconds(model_config, data.spec, config.train_batch_size)
    print(
        f"cost       about {describe(seconds)} a step on this machine, about "
        f"{describe(seconds * config.num_train_steps)} for {config.num_train_steps:,} steps"
    )
    if seconds > 30:
        print(
            "           to shrink a step: --bert_config_file=bert-tiny|bert-mini|bert-small, "
            "--train_batch_size, --hidden_dropout_prob=0; against memory: --micro_batch_size; "
            "to shrink the run: --num_train_steps"
        )
    sys.stdout.flush()


def _report(config, folder, engine, speed):
    """Print the last figures of the run and, where both were measured, packed against unpacked."""
    from bert_packed.metrics_log import read_rows

    logs = {"train": read_rows(folder / "metrics.csv"), "eval": read_rows(folder / "eval_metrics.csv")}
    columns = ("step", "loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "mlm_token_accuracy", "nsp_accuracy")
    metrics = [
        {"data": name, **{column: float(rows[-1][column]) for column in columns}}
        for name, rows in logs.items()
        if rows
    ]
    print(f"compiled   {engine.num_train_traces} training program")
    print_table(metrics)
    if speed:
        print()
        print_table(speed)
    if config.json:
        write_json(config.json, {"metrics": metrics, "speed": speed})


if __name__ == "__main__":
    sys.exit(run(main, TrainConfig, DESCRIPTION))
