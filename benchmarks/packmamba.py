"""Packing for a Mamba: padding rates, speed of training and of its operators, other scans.

python -m benchmarks.packmamba --reference
"""

import dataclasses
import functools
import statistics
import sys
from pathlib import Path

import numpy as np

from benchmarks.padding_rates import LONGEST, draw_lengths, padding_rows
from benchmarks.pictures import draw_bars, new_figure, save_picture
from benchmarks.results import Settings, parse_names, show
from benchmarks.synthetic_data import best_shapes, spec_of, token_batch
from benchmarks.timing import median_row, ratios
from benchmarks.training_steps import build_engine, device_options, stepping_through
from bert_packed.architectures.mamba.config import MambaConfig, StateSpaceConfig
from bert_packed.architectures.registry import MIXED, load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import count_lengths
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend
from data_gen.dry_run import read_histogram

PARTS = PADDING, TRAINING, OPERATORS, VARIANTS = "padding", "training", "operators", "variants"
SINGLE, PADDED, PACKED = "one at a time", "padded", "packed"
REFERENCE = "transformers"
NUM_LENGTHS = 20_000  # sequences in the padding rates
# Wanted of packs, in real tokens/s: against one sequence at a time (the paper's gain for its model of 1.4B),
# against padded rows (of what the padding promises), and against transformers
SINGLE_GAIN, PADDED_SHARE, REFERENCE_GAIN = 3.06, 0.95, 3.0
VOCAB_SIZE = 1024  # of a model named by its size
NUM_SHAPES = 3  # row lengths of sequences one at a time, each a compiled program
REFERENCE_ROWS, REFERENCE_REPEATS = 2, 2
MICRO = 1e6


@dataclasses.dataclass(frozen=True)
class PackMambaConfig(Settings):
    """The figures of "PackMamba: Efficient Processing of Variable-Length Sequences in Mamba Training", here.

    padding    share of padding in a batch, beside the paper's
    training   interleaved steps on the same sequences one at a time, padded and packed, each step with an update
               of the weights; with --against also packed steps of another model, with --reference the model's
               class in transformers on torch: a step of padded rows, for a Mamba-1 of two of them
    operators  the same for convolution and scan, forward, and forward and backward; with --against also those
               of the other model on packs
    variants   other ways to compute the scan of a Mamba-1, beside the one that is used

    What restarts add to a step is in benchmarks.overhead, the memory of a step in benchmarks.step_memory.

    One at a time each row is filled up to one of three lengths, each a compiled program; nothing is
    compiled in a timed step. `gain` is the first model's time one at a time over that of the way, by
    token. `from` and `to` hold a median with a confidence of 95 %. What is timed is --shrink times
    shorter than the sequences of `padding`, rows and packs alike, so that all is done in minutes;
    --shrink=1 is the real size.
    """

    bert_config_file: str = setting("mamba-tiny", "size, or config.json, of the Mamba or Mamba-2")
    against: str = setting("", "size, or config.json, of another one, measured on packs in the same run")
    parts: str = setting(
        "padding,training,operators",
        f"what to measure: {', '.join(PARTS)}",
        parse=lambda text: parse_names(text, PARTS),
    )
    input_file: str = setting(
        "", "unpacked records whose lengths to take; empty = lengths drawn like the paper's"
    )
    max_seq_length: int = setting(
        LONGEST, "tokens of a padded row; lengths that are drawn shrink to it", minimum=64
    )
    pack_length: int = setting(4096, "tokens of a pack", minimum=64)
    shrink: int = setting(8, "by how much lengths are divided for all but padding", minimum=1)
    batch_size: int = setting(4, "packs in a step; a step of padded rows has as many tokens", minimum=1)
    repeats: int = setting(6, "timed steps of each way, and of each variant of the scan", minimum=1)
    reference: bool = setting(False, "also train with transformers on torch (extra `reference`)")
    picture: str = setting("", "also draw padding and speed into this PNG")

    def __post_init__(self):
        super().__post_init__()
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
        for name, users in (("reference", [TRAINING]), ("against", [TRAINING, OPERATORS])):
            if getattr(self, name) and not set(users) & set(self.parts.split(",")):
                raise InputError(
                    f"`{name}` needs {' or '.join(users)} among `parts`. Received: {self.parts!r}."
                )


def main(config):
    """Measure, print, write and draw."""
    choose_backend()
    model_config = read_config(config, "bert_config_file")
    parts = config.parts.split(",")
    if VARIANTS in parts and not isinstance(model_config, MambaConfig):
        raise InputError(
            f"`bert_config_file` must be a Mamba-1 for variants. Received: {config.bert_config_file}."
        )
    others = {Path(config.against).stem: read_config(config, "against")} if config.against else {}
    for other in others.values():
        if other.vocab_size != model_config.vocab_size:
            raise InputError(
                f"`against` must have the vocab_size of bert_config_file, {model_config.vocab_size}. "
                f"Received: {other.vocab_size}."
            )
    lengths, tables = read_lengths(config), {}
    if PADDING in parts:
        tables[PADDING] = padding_rows(lengths, config.max_seq_length, config.pack_length)
    if set(parts) != {PADDING}:
        batches = make_batches(config, lengths, model_config.vocab_size)
    if TRAINING in parts:
        tables |= training_tables(model_config, batches, config.repeats, others)
    if config.reference:
        row, compared = measure_reference(model_config, batches, config.repeats)
        tables |= {"reference": [row], "packed against others": [*tables["packed against others"], compared]}
    if OPERATORS in parts:
        tables[OPERATORS] = operator_rows(model_config, batches, config.repeats, others)
    if VARIANTS in parts:
        tables[VARIANTS] = variant_rows(model_config, batches[PACKED], config.repeats)
    note = f"{len(lengths):,} sequences of {lengths.mean():.1f} tokens; timed {config.shrink} times shorter"
    show("packmamba", config, tables, [note])
    if config.picture:
        draw(tables, config.picture)


def read_config(config, name):
    """The model's config that a flag names; raises `InputError`."""
    found = load_model_config(getattr(config, name), VOCAB_SIZE)
    if not isinstance(found, StateSpaceConfig):
        raise InputError(f"`{name}` must be a Mamba or Mamba-2. Received: {getattr(config, name)}.")
    return found


def read_lengths(config):
    """Lengths of all sequences, int64 `[n]`: of the records, or drawn and shrunk to the rows.

    Raises:
        InputError: a sequence of the records is longer than a row.
    """
    if not config.input_file:
        return np.maximum(1, draw_lengths(NUM_LENGTHS, 0) * config.max_seq_length // LONGEST)
    counts = read_histogram("", config.input_file)
    if len(counts) > config.max_seq_length:
        raise InputError(
            f"`max_seq_length` must be at least {len(counts)}, the longest sequence of {config.input_file}. "
            f"Received: {config.max_seq_length}."
        )
    return np.repeat(np.arange(1, len(counts) + 1), counts)


def make_batches(config, lengths, vocab_size):
    """The same sequences in three ways: dict from way to batch dicts, padded and packed of as many tokens."""
    rng = np.random.default_rng(0)
    pack_length, row_length = config.pack_length // config.shrink, config.max_seq_length // config.shrink
    packs = choose_packs(np.maximum(1, lengths // config.shrink), pack_length, config.batch_size)
    alone = [int(length) for pack in packs for length in pack]
    rng.shuffle(alone)  # in the order of packs, padded rows would be more alike than rows of real data
    shapes = best_shapes(alone, NUM_SHAPES)
    fitting = shapes[np.searchsorted(shapes, alone)]
    num_rows = max(1, config.batch_size * pack_length // row_length)

    def batch(packs, length):
        return token_batch(packs, spec_of(packs, length), vocab_size, rng)

    return {
        SINGLE: [batch([(one,)], int(shape)) for one, shape in zip(alone, fitting, strict=True)],
        PADDED: [
            batch([(one,) for one in alone[first : first + num_rows]], row_length)
            for first in range(0, len(alone), num_rows)
        ],
        PACKED: [batch(packs, pack_length)],
    }


def choose_packs(lengths, pack_length, num_packs):
    """Choose as many sequences as fill some packs, with the spread of all lengths.

        lengths 1 1 2 2 2 2 3 5, two packs of 5   ->   1 2 2 5, in packs 1 2 2 | 5

    Returns:
        List of tuples of lengths: the plan of the default algorithm for them.

    Raises:
        InputError: there are too few lengths to fill the packs.
    """
    ordered = np.sort(lengths)
    num_sequences = int(num_packs * pack_length / np.mean(ordered)) + 1
    if num_sequences > len(ordered):
        raise InputError(
            f"`input_file` must hold enough to fill {num_packs} packs of {pack_length}. "
            f"Received: {len(ordered)} sequences."
        )
    # A plan of these may need more packs: fewer sequences, until it fits
    while True:
        # In the middle of as many equal parts: a few sequences drawn would have another mean than all
        places = (np.arange(num_sequences) + 0.5) * len(ordered) / num_sequences
        histogram = count_lengths(ordered[places.astype(np.int64)], pack_length)
        plan = ALGORITHMS[DEFAULT_ALGORITHM](histogram, pack_length, "max")
        if plan.num_packs <= num_packs:
            return [strategy for strategy, count in plan.strategies.items() for _ in range(count)]
        num_sequences -= 1


def count_tokens(batches):
    """Real tokens, and the share of padding, of batch dicts."""
    num_tokens = sum(int((batch["sequence_ids"] > 0).sum()) for batch in batches)
    return num_tokens, 1 - num_tokens / sum(batch["sequence_ids"].size for batch in batches)


def training_tables(model_config, batches, num_repeats, others):
    """Interleave training on all sequences in each way, with an optimizer step a batch: two tables.

    `others` has the configs of other models by name, which train on the packs alone.
    """
    engine = device_engine(model_config, batches)
    ways = {way: stepping_through(engine, some) for way, some in batches.items()}
    for name, other in others.items():
        ways[name] = stepping_through(device_engine(other, batches), batches[PACKED])
    batches = batches | dict.fromkeys(others, batches[PACKED])
    counts = {way: count_tokens(some) for way, some in batches.items()}
    by_token = seconds_a_token(time_interleaved(ways, num_repeats), batches)
    rows = [{**row, "padding, %": 100 * counts[row["way"]][1]} for row in speed_rows(by_token)]
    # Where time goes with the number of tokens, packs gain what padding takes
    promised = (1 - counts[PACKED][1]) / (1 - counts[PADDED][1])
    wanted = {SINGLE: SINGLE_GAIN, PADDED: PADDED_SHARE * promised} | dict.fromkeys(others)
    compared = [comparison(by_token, way, least) for way, least in wanted.items()]
    return {TRAINING: rows, "packed against others": compared}


def device_engine(model_config, batches):
    """An engine for the packs, with the dtype and kernel of this process's devices."""
    return build_engine(
        model_config, **device_options(model_config, batches[PACKED][0]["token_ids"].shape[1])
    )


def measure_reference(model_config, batches, num_repeats):
    """Interleave training with transformers on padded rows with training on the packs: two rows."""
    from benchmarks.peers.training import transformers_training
    from bert_packed.parallel.targets import devices_here

    rows = batches[PADDED][0]
    if isinstance(model_config, MambaConfig):
        # It loops over tokens in Python, and its backward pass grows with the square of their number
        rows = {name: values[:REFERENCE_ROWS] for name, values in rows.items()}
    options = {"keeps_memory": True, "is_mixed": devices_here().dtype == MIXED}
    with transformers_training(model_config, {PADDED: [rows]}, **options) as peer:
        ways = {
            PACKED: stepping_through(device_engine(model_config, batches), batches[PACKED]),
            REFERENCE: functools.partial(peer.call, "step", PADDED),
        }
        seconds = time_interleaved(ways, min(num_repeats, REFERENCE_REPEATS))
    by_token = seconds_a_token(seconds, {PACKED: batches[PACKED], REFERENCE: [rows]})
    row = {
        "rows": len(rows["token_ids"]),
        "s": statistics.median(seconds[REFERENCE]),
        "real tokens/s": 1 / statistics.median(by_token[REFERENCE]),
    }
    return row, comparison(by_token, REFERENCE, REFERENCE_GAIN)


def operator_rows(model_config, batches, num_repeats, others):
    """Interleave each operator on the shapes of all ways, and those of other models on packs: rows."""
    from benchmarks import mamba_operators  # Keras: only now

    models = {way: model_config for way in batches} | others
    batches = batches | dict.fromkeys(others, batches[PACKED])
    rows = []
    for operator in mamba_operators.OPERATORS:
        for which in mamba_operators.PASSES:
            ways = {}
            for way, one in models.items():
                program = mamba_operators.operator_program(
                    mamba_operators.device_operators(one)[operator], which
                )
                given = mamba_operators.operator_inputs(operator, one, batches[way])
                ways[way] = mamba_operators.running(program, given)
            by_token = seconds_a_token(time_interleaved(ways, num_repeats), batches)
            rows += [{"operator": operator, "pass": which, **row} for row in speed_rows(by_token)]
    return rows


def variant_rows(model_config, batches, num_repeats):
    """Interleave the ways to compute the scan on packs: rows of a table."""
    from benchmarks import mamba_operators
    from benchmarks.mamba_operators import BOTH, PASSES, SCAN

    given = mamba_operators.operator_inputs(SCAN, model_config, batches)
    num_tokens = sum(batch["position_ids"].size for batch in batches)
    variants = mamba_operators.scan_variants(model_config)
    ways = {
        (name, which): mamba_operators.running(mamba_operators.operator_program(variant, which), given)
        for name, variant in variants.items()
        for which in PASSES
    }
    seconds = time_interleaved(ways, num_repeats)
    first = seconds[next(iter(variants)), BOTH]
    return [
        {
            "scan": name,
            **{
                f"{which}, us a token": MICRO * statistics.median(seconds[name, which]) / num_tokens
                for which in PASSES
            },
            **median_row("times as long", ratios(seconds[name, BOTH], first)),
        }
        for name in variants
    ]


def seconds_a_token(seconds, batches):
    """Times of some ways, each over the real tokens of its batches."""
    return {way: [time / count_tokens(batches[way])[0] for time in times] for way, times in seconds.items()}


def speed_rows(by_token):
    """Rows of a table: `way`, `real tokens/s`, and `gain`, the time of `SINGLE` over this way's by token."""
    return [
        {
            "way": way,
            "real tokens/s": 1 / statistics.median(times),
            "gain": statistics.median(ratios(by_token[SINGLE], times)),
        }
        for way, times in by_token.items()
    ]


def comparison(by_token, way, at_least):
    """Tokens/s of packs as a multiple of those of a way: a row with its interval and what is wanted."""
    gains = median_row("times the tokens/s", ratios(by_token[way], by_token[PACKED]))
    return {"packed against": way, **gains, "at least": at_least}


def draw(tables, path):
    """Draw padding rates beside the paper's, and real tokens/s of steps, as PNG."""
    # Without operators: the fastest is a hundred times as fast as the slowest
    drawn = [name for name in (PADDING, TRAINING) if name in tables] or [PADDING]
    figure, (row,) = new_figure(len(drawn))
    for name, axes in zip(drawn, row, strict=True):
        rows = tables.get(name, [])
        if name == PADDING:
            draw_bars(axes, rows, "way", {"padding, %": "here", "PackMamba, %": "PackMamba"})
            axes.set(title="Padding, %")
        else:
            draw_bars(axes, rows, "way", {"real tokens/s": "real tokens/s"})
            axes.set(title="training: real tokens/s")
    save_picture(figure, path)


if __name__ == "__main__":
    sys.exit(run(main, PackMambaConfig))
