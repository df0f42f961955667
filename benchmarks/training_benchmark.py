"""Command line: what packing costs a training step, and what it gains against padded rows, ours and torch's.

python -m benchmarks.training_benchmark --bert_config_file=bert-mini --batch_size=8
"""

import contextlib
import dataclasses
import statistics
import sys
import tempfile

from benchmarks.peer_process import torch_peers
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import check_divides, check_settings, setting
from bert_packed.training.engines import choose_backend

DESCRIPTION = """
Measures training steps in turns: a BERT that knows nothing of packs (plain), the packed BERT at the same
shape (packed), the packed BERT on one sequence a row (unpacked) and, with --reference, BertForPreTraining of
transformers on torch with the same weights and rows: in a process of its own, as its users have it, and in
another whose C library keeps freed memory, as our commands let theirs, which torch does not by itself
("memory kept"; left out where the environment has MALLOC_... or GLIBC_TUNABLES, which then hold for all).

Prints medians, real tokens per second, and the overhead of packing. Dropout is on, as in training. Under
KERAS_BACKEND=jax also what XLA counts in each program, which no noise of the machine changes.
"""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    batch_size: int = setting(8, "packs, or rows, a step", minimum=1)
    micro_batch_size: int = setting(
        0, "packs, or rows, that ours computes at once; 0 = all of the step's", minimum=0
    )
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    max_sequences_per_pack: int = setting(3, "most sequences in a pack", minimum=1)
    input_file: str = setting(
        "", "unpacked TFRecords to pack; empty = random tokens, as long as the papers' Wikipedia sequences"
    )
    repeats: int = setting(15, "timed steps of each way", minimum=1)
    reference: bool = setting(False, "also measure transformers on torch (extra `reference`)")
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "micro_batch_size", "batch_size")


def main(config):
    """Measure, and print the table."""
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from benchmarks import training_ways
    from benchmarks.benchmark_batches import make_batches
    from benchmarks.this_machine import cpu_name
    from bert_packed.config import load_model_config
    from bert_packed.runs.interleaved_timing import (
        FEWEST_FOR_INTERVAL,
        median_interval,
        median_ratio,
        quartiles,
        ratios,
        time_interleaved,
    )

    model_config = load_model_config(config.bert_config_file)
    with tempfile.TemporaryDirectory() as folder:
        packed, unpacked = make_batches(
            folder,
            config.input_file,
            config.max_seq_length,
            config.max_sequences_per_pack,
            config.batch_size,
            2,
            model_config,
        )
    engines = training_ways.our_engines(model_config, config.micro_batch_size or None)
    data = {"plain": packed, "packed": packed, "unpacked": unpacked}
    ways = {name: training_ways.way(engine, data[name].batches) for name, engine in engines.items()}
    with contextlib.ExitStack() as stack:
        for name, keeps_memory in torch_peers().items() if config.reference else ():
            rows = {name: unpacked.batches}
            ways |= stack.enter_context(training_ways.torch_ways(model_config, rows, keeps_memory))
        seconds = time_interleaved(ways, config.repeats)
    rows = []
    for name, times in seconds.items():
        tokens_per_row = data.get(name, unpacked).tokens_per_row
        median = statistics.median(times)
        rows.append(
            {
                "way": name,
                "s/step": median,
                # the plain model takes packs for single sequences: its steps are only there to be timed
                "real tokens/s": None if name == "plain" else config.batch_size * tokens_per_row / median,
                "step time, plain = 1": median_ratio(times, seconds["plain"]),
            }
        )
    print(f"CPU: {cpu_name()}")
    print_table(rows, config.json)
    factor = packed.sequences_per_row
    print(f"\npacking factor {factor:.3f}")
    found = [ratio - 1 for ratio in ratios(seconds["packed"], seconds["plain"])]
    low, overhead, high = quartiles(found)
    print(f"overhead of packing {overhead:+.2%} of the step, quartiles {low:+.2%} and {high:+.2%}")
    if len(found) >= FEWEST_FOR_INTERVAL:
        low, high = median_interval(found)
        print(f"  its median is between {low:+.2%} and {high:+.2%}, with a confidence of 95 %")
    if backend == "jax":  # TensorFlow does not tell
        _print_counts(engines, data)
    for name in list(seconds)[2:]:
        # of times next to each other, which a slow minute changes alike
        gain = (
            median_ratio(seconds[name], seconds["packed"]) * packed.tokens_per_row / unpacked.tokens_per_row
        )
        print(f"packed / {name}: {gain:.2f} times the tokens/s, {gain / factor:.2f} x the packing factor")


def _print_counts(engines, data):
    """What packing adds to the operations and to the bytes moved."""
    counts = {name: engines[name].count_train_step(data[name].batches[0]) for name in ("plain", "packed")}
    added = {key: counts["packed"][key] / counts["plain"][key] - 1 for key in counts["plain"]}
    print(
        f"  by XLA's count packing adds {added['flops']:+.3%} of the operations and "
        f"{added['bytes accessed']:+.3%} of the bytes"
    )


if __name__ == "__main__":
    sys.exit(run(main, BenchmarkConfig, DESCRIPTION))
