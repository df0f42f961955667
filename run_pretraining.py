"""Command line: pre-train a packed BERT, or a packed Mamba."""

import sys

from bert_packed.core.command_line import run
from bert_packed.records.inputs import find_files
from bert_packed.runs.pretrain import pretrain
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training.engines import choose_backend

INPUTS = "input_file", "eval_input_file", "unpacked_input_file"
# The run is complete and reported, but its speed could not be compared
STATUS_NOT_COMPARED = 3
DESCRIPTION = """
Pre-trains a packed BERT on packed TFRecords: masked language model and next-sentence prediction. With
--objective=mlm it trains the masked language model alone. With --objective=causal_lm it trains a packed Mamba
on every next token.

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
    prepare = None
    if config.sample_data:
        from data_gen.sample_data import build_missing as prepare
    if config.compile_only:
        backend = choose_backend()
        from bert_packed.runs.compile_only import compile_run  # TensorFlow: only now

        if prepare:
            prepare()
        return compile_run(config, backend)
    result = pretrain(config, prepare)
    if result.stopped_by:
        return 128 + result.stopped_by
    if result.not_compared:
        print(f"the run is complete; its speed could not be compared: {result.not_compared}", file=sys.stderr)
        return STATUS_NOT_COMPARED
    return 0


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, PretrainingConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
