"""Command line: which of XLA's ways to compile for a CPU is the fastest for a training step on this machine.

python -m bert_packed.reports.xla_flags --bert_config_file=bert-mini --batch_size=8
"""

import dataclasses
import os
import sys
import tempfile

from bert_packed.reports.benchmark_engine import RECIPE
from bert_packed.runs.step_turns import TimedStep, time_steps
from bert_packed.runs.this_machine import cpu_name
from bert_packed.runs.xla_ways import DEFAULT, WAYS, way_rows, ways_of
from bert_packed.training.engines import choose_backend
from data_gen.cli.command_line import print_table, run
from data_gen.cli.settings import InputError, check_settings, setting

DEPTH = 3  # sequences of a pack, at most
DESCRIPTION = f"""
Measures training steps under several settings of XLA_FLAGS, each in a process of its own, as XLA reads them
once. All of them compile, then take their steps in turns, so that a slow minute of the machine hits all.
Prints for each the median of its steps and how many times as long they take as without any, neighbouring
steps compared, with the interval (95 %).

What is in XLA_FLAGS already holds for all. The settings:
{"; ".join(name for name in WAYS if name != DEFAULT)}.

run_pretraining.py chooses among some of them by itself (--autotune); otherwise set the best one for your
runs, as `XLA_FLAGS=... python run_squad.py ...`. The processes stand in memory side by side.
"""


@dataclasses.dataclass(frozen=True)
class FlagsConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    batch_size: int = setting(8, "packs a step", minimum=1)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    micro_batch_sizes: str = setting(
        "0", "comma-separated: packs computed at once, each with every setting; 0 = all of the step's"
    )
    turns: int = setting(15, "timed steps of each setting", minimum=1)
    json: str = setting("", "also write the table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        if any(size < 0 or (size and self.batch_size % size) for size in self.sizes):
            raise InputError(
                "`micro_batch_sizes` must be 0 or divide `batch_size`. Received: micro_batch_sizes="
                f"{self.micro_batch_sizes}, batch_size={self.batch_size}."
            )

    @property
    def sizes(self):
        """`micro_batch_sizes` as numbers."""
        try:
            return [int(size) for size in self.micro_batch_sizes.split(",")]
        except ValueError:
            raise InputError(
                f"`micro_batch_sizes` must be whole numbers. Received: {self.micro_batch_sizes!r}."
            ) from None


def main(config):
    """Measure, and print the table."""
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from bert_packed.config import load_model_config
    from bert_packed.reports.benchmark_batches import make_batches

    with tempfile.TemporaryDirectory() as folder:
        model_config = load_model_config(config.bert_config_file)
        make_batches(folder, "", config.max_seq_length, DEPTH, config.batch_size, 1, model_config)
        rows = [row for size in config.sizes for row in _rows(config, folder, ways_of(backend), size)]
    print(f"CPU: {cpu_name()}")
    print_table(rows, config.json)


def _rows(config, folder, ways, micro_batch_size):
    """The rows of one micro-batch size, each beside the first size without any setting.

    Raises:
        InputError: the step cannot be taken without any setting.
    """
    steps = {}
    for size, names in ((config.sizes[0], [DEFAULT]), (micro_batch_size, ways)):
        recipe = dataclasses.replace(
            RECIPE,
            input_file=f"{folder}/packed/*.tfrecord",
            bert_config_file=config.bert_config_file,
            train_batch_size=config.batch_size,
            micro_batch_size=size,
        )
        for name in names:
            flags = f"{os.environ.get('XLA_FLAGS', '')} {WAYS[name]}".strip()
            steps[name, size] = TimedStep(recipe, {"XLA_FLAGS": flags})
    found = time_steps(steps, config.turns)
    baseline = next(iter(steps))
    for (name, size), why in found.failed.items():
        if (name, size) == baseline:  # then it is not the setting's fault
            mistake = why.partition("error: ")[2]
            raise InputError(mistake or f"a step must run without any of the settings. Received: {why}.")
        print(f"{WAYS[name]}, micro_batch_size={size}: {why}", file=sys.stderr)
    rows = way_rows({way: found.seconds.get(way, []) for way in steps})
    rows = [
        {"XLA_FLAGS": name, "micro_batch_size": size, **{k: v for k, v in row.items() if k != "XLA_FLAGS"}}
        for (name, size), row in zip(steps, rows, strict=True)
    ]
    return [row for row in rows if row["micro_batch_size"] == micro_batch_size]


if __name__ == "__main__":
    sys.exit(run(main, FlagsConfig, DESCRIPTION))
