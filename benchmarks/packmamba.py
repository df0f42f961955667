"""Command line: what packing gives a Mamba: padding rates, speed of training and of its operators, memory.

python -m benchmarks.packmamba --reference
"""

import dataclasses
import sys
import time

from benchmarks.padding_rates import LONGEST
from bert_packed.core.command_line import print_table, run
from bert_packed.core.output_files import write_json
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.training.engines import choose_backend

PARTS = ("padding", "training", "operators", "resets", "variants", "memory")
DESCRIPTION = """
The figures of "PackMamba: Efficient Processing of Variable-Length Sequences in Mamba Training", here.

padding    how much of a batch is padding, beside print
training   steps on the same sequences one at a time, padded and packed, in turns; with --reference also
           MambaForCausalLM of transformers on torch
operators  the same for convolution and scan, forward, and forward and backward
resets     what starting anew with every sequence adds to a step and to the operators
variants   other ways to compute the scan, beside the one that was chosen
memory     of a step, by the length of its pack

One at a time each row is filled up to one of --num_shapes lengths, each a compiled program of its own;
nothing is compiled in a timed turn. `gain` is the time one at a time over that of the way. `from` and `to`
hold a median with a confidence of 95 %, from six turns on.

What is timed is --shrink times shorter than what padding is told of, sequences, rows and packs alike, so that
all is done in minutes; --shrink=1 is the real size.
"""


def _parse_parts(text):
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS):
        raise ValueError(f"of {', '.join(PARTS)}, separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class PackMambaConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("mamba-tiny", "size, or config.json, of the Mamba")
    vocab_size: int = setting(1024, "tokens in the vocabulary of a model named by its size", minimum=2)
    parts: str = setting(
        "padding,training,operators,resets", f"what to measure: {', '.join(PARTS)}", parse=_parse_parts
    )
    input_file: str = setting(
        "", "unpacked records whose lengths to take; empty = lengths drawn like the paper's"
    )
    max_seq_length: int = setting(
        LONGEST, "tokens of a padded row; lengths that are drawn shrink to it", minimum=64
    )
    pack_length: int = setting(4096, "tokens of a pack", minimum=64)
    shrink: int = setting(8, "by how much lengths are divided for all but padding and memory", minimum=1)
    batch_size: int = setting(4, "packs in a step; a step of padded rows has as many tokens", minimum=1)
    num_steps: int = setting(1, "steps of packs in a turn", minimum=1)
    num_shapes: int = setting(3, "row lengths for sequences one at a time", minimum=1)
    window: int = setting(64, "sequences that wait while packs are filled in order", minimum=1)
    memory_lengths: str = setting("512,1024,2048,4096", "tokens of the packs whose steps' memory is counted")
    repeats: int = setting(6, "timed turns of each way, and of each variant of the scan", minimum=1)
    reset_repeats: int = setting(15, "timed turns with resets, and without", minimum=1)
    random_seed: int = setting(0, "seed of lengths and tokens", minimum=0)
    reference: bool = setting(False, "also train with transformers on torch (extra `reference`)")
    reference_rows: int = setting(2, "padded rows of a step of transformers", minimum=1)
    reference_repeats: int = setting(2, "timed steps of transformers", minimum=1)
    picture: str = setting("", "also draw padding and speed into this PNG")
    json: str = setting("", "also write all tables to this file")

    def __post_init__(self):
        check_settings(self)
        if self.pack_length < self.max_seq_length:
            raise InputError(
                f"`pack_length` must be at least max_seq_length={self.max_seq_length}. "
                f"Received: {self.pack_length}."
            )
        if self.shrink > self.max_seq_length // 8:
            raise InputError(
                f"`shrink` must leave 8 of max_seq_length={self.max_seq_length} tokens. "
                f"Received: {self.shrink}."
            )
        if self.reference and "training" not in self.parts.split(","):
            raise InputError(f"`reference` needs training among `parts`. Received: {self.parts!r}.")
        if not all(length.isdecimal() and int(length) for length in self.memory_lengths.split(",")):
            raise InputError(
                "`memory_lengths` must be whole numbers from 1, separated by commas. "
                f"Received: {self.memory_lengths!r}."
            )


def main(config):
    """Measure, print, write."""
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from benchmarks.packmamba_parts import Measurements, read_lengths
    from benchmarks.this_machine import cpu_name
    from bert_packed.config import MambaConfig, load_model_config

    model_config = load_model_config(config.bert_config_file, config.vocab_size)
    if not isinstance(model_config, MambaConfig):
        raise InputError(f"`bert_config_file` must be a Mamba. Received: {config.bert_config_file!r}.")
    lengths = read_lengths(config)
    cpu = cpu_name()
    print(f"CPU: {cpu}; backend {backend}; {len(lengths):,} sequences of {lengths.mean():.1f} tokens")
    measurements, tables, seconds = Measurements(config, model_config, lengths), {}, {}
    print(measurements.describe())
    for part in [part for part in PARTS if part in config.parts.split(",")]:
        print(f"\n{part} ...", flush=True)
        start = time.perf_counter()
        for name, rows in measurements.tables_of(part).items():
            print(f"\n{name}")
            print_table(rows)
            tables[name] = rows
        seconds[part] = time.perf_counter() - start
        print(f"\n{part} took {seconds[part]:.1f} s", flush=True)
    if config.json:
        write_json(config.json, {"cpu": cpu, "backend": backend, "seconds": seconds, **tables})
    if config.picture:
        from benchmarks.packmamba_picture import draw

        draw(tables, config.picture)


if __name__ == "__main__":
    sys.exit(run(main, PackMambaConfig, DESCRIPTION))
