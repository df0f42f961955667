"""Command line: what packing gives a Mamba: padding rates, speed of training and of its operators, memory.

python -m bert_packed.reports.packmamba --bert_config_file=mamba-tiny --reference
"""

import dataclasses
import sys

from bert_packed.reports.padding_rates import LONGEST, draw_lengths, padding_rates
from bert_packed.training.engines import choose_backend
from data_gen.cli.command_line import print_table, run, write_json
from data_gen.cli.settings import InputError, check_settings, setting

ALL_LENGTHS = 20_000  # sequences of which padding rates are told
PARTS = ("padding", "training", "operators", "memory")
DESCRIPTION = """
The figures of "PackMamba: Efficient Processing of Variable-Length Sequences in Mamba Training", here.

padding: how much of a batch is padding, beside print. training: steps on the same sequences one at a time,
padded and packed, in turns; what restarting states at every sequence costs; with --reference also
MambaForCausalLM of transformers on torch. operators: the same for convolution and scan, forward and backward.
memory: of a step, by the length of its pack.

One at a time each row is filled up to one of --num_shapes lengths, each a compiled program of its own;
nothing is compiled in a timed turn. `gain` is the time one at a time over that of the way.
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
        "padding,training,operators", f"what to measure: {', '.join(PARTS)}", parse=_parse_parts
    )
    input_file: str = setting(
        "", "unpacked records whose lengths to take; empty = lengths drawn like the paper's"
    )
    max_seq_length: int = setting(
        LONGEST, "tokens of a padded row; lengths that are drawn shrink to it", minimum=64
    )
    pack_length: int = setting(4096, "tokens of a pack", minimum=64)
    batch_size: int = setting(4, "packs in a step; a step of padded rows has as many tokens", minimum=1)
    num_steps: int = setting(1, "steps of packs in a turn", minimum=1)
    num_shapes: int = setting(6, "row lengths for sequences one at a time", minimum=1)
    window: int = setting(64, "sequences that wait while packs are filled in order", minimum=1)
    memory_lengths: str = setting("512,1024,2048,4096", "tokens of the packs whose steps' memory is counted")
    repeats: int = setting(5, "timed turns of each way", minimum=1)
    random_seed: int = setting(0, "seed of lengths and tokens", minimum=0)
    reference: bool = setting(False, "also train with transformers on torch (extra `reference`)")
    picture: str = setting("", "also draw padding and speed into this PNG")
    json: str = setting("", "also write all tables to this file")

    def __post_init__(self):
        check_settings(self)
        if self.pack_length < self.max_seq_length:
            raise InputError(
                f"`pack_length` must be at least max_seq_length={self.max_seq_length}. "
                f"Received: {self.pack_length}."
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
    parts = config.parts.split(",")
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from bert_packed.config import MambaConfig, load_model_config
    from bert_packed.reports.data_benchmark import cpu_name

    model_config = load_model_config(config.bert_config_file, config.vocab_size)
    if not isinstance(model_config, MambaConfig):
        raise InputError(f"`bert_config_file` must be a Mamba. Received: {config.bert_config_file!r}.")
    lengths = _read_lengths(config)
    print(f"CPU: {cpu_name()}; backend {backend}; {len(lengths):,} sequences of {lengths.mean():.1f} tokens")
    tables = {}
    if "padding" in parts:
        tables["padding"] = padding_rates(
            lengths, config.max_seq_length, config.pack_length, config.window, config.random_seed
        )
    if {"training", "operators"} & set(parts):
        tables |= _measure_speed(config, parts, model_config, lengths)
    if "memory" in parts:
        from bert_packed.reports.mamba_speed import step_memory

        tables["memory"] = step_memory(model_config, [int(text) for text in config.memory_lengths.split(",")])
    for name, rows in tables.items():
        print(f"\n{name}")
        print_table(rows)
    if config.json:
        write_json(config.json, tables)
    if config.picture:
        from bert_packed.reports.packmamba_picture import draw

        draw(tables, config.picture)


def _read_lengths(config):
    """Lengths of all sequences, int64 `[n]`: of the records, or drawn and shrunk to the rows."""
    import numpy as np

    from data_gen.records.read_lengths import read_histogram

    if not config.input_file:
        drawn = draw_lengths(ALL_LENGTHS, config.random_seed)
        return np.maximum(1, drawn * config.max_seq_length // LONGEST)
    counts = read_histogram("", config.input_file)
    if len(counts) > config.max_seq_length:
        raise InputError(
            f"`max_seq_length` must be at least {len(counts)}, the longest sequence of {config.input_file}. "
            f"Received: {config.max_seq_length}."
        )
    return np.repeat(np.arange(1, len(counts) + 1), counts)


def _measure_speed(config, parts, model_config, lengths):
    from bert_packed.reports import mamba_speed
    from bert_packed.reports.sequence_batches import choose_packs, make_batches

    packs = choose_packs(lengths, config.pack_length, config.batch_size * config.num_steps)
    row_length, vocab_size = config.max_seq_length, model_config.vocab_size
    sizes = config.batch_size, config.num_shapes, vocab_size, config.random_seed
    batches = make_batches(packs, config.pack_length, row_length, *sizes)
    tables = {}
    if "training" in parts:
        tables["training"], tables["packed against others"] = mamba_speed.measure_training(
            model_config, batches, config.repeats, config.reference
        )
    if "operators" in parts:
        tables["operators"] = mamba_speed.measure_operators(model_config, batches, config.repeats)
    return tables


if __name__ == "__main__":
    sys.exit(run(main, PackMambaConfig, DESCRIPTION))
