"""Packing for a Mamba: padding rates, speed of training, and what restarts add to a step.

python -m benchmarks.packmamba --reference
"""

import dataclasses
import functools
import statistics
import sys
from pathlib import Path

import numpy as np
from scipy import optimize
from scipy.stats import norm

from benchmarks.runner import (
    Settings,
    added_row,
    draw_bars,
    median_row,
    new_figure,
    parse_names,
    ratios,
    save_picture,
    show,
)
from benchmarks.synthetic_data import best_shapes, spec_of, token_batch
from benchmarks.training_steps import build_engine, kernel_options, stepping_through
from bert_packed.architectures.mamba.config import MambaConfig, StateSpaceConfig
from bert_packed.architectures.registry import MIXED, load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import count_lengths
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend

PARTS = PADDING, TRAINING, RESTARTS = "padding", "training", "restarts"
SINGLE, PADDED, PACKED = "one at a time", "padded", "packed"
# PackMamba's Section 4 has these lengths; nothing else is known of them
SHORTEST, LONGEST, MEAN = 57, 2048, 646
SPREAD = 2.0  # our choice: the standard deviation of the logarithm of a document's length
NUM_LENGTHS = 20_000  # sequences whose padding is counted
NUM_EVEN = 4000  # quantiles of all documents, whose mean is solved for
WINDOW = 64  # sequences that wait while packs are filled in order
PRINTED = {PADDED: 66.3, "in order of arrival": 19.1, "sorted in a window": 0.41}  # percent
REFERENCE = "transformers"
SINGLE_GAIN = 3.06  # the paper's, of packs against one sequence at a time, for its 1.4B model
VOCAB_SIZE = 1024  # of a model named by its size
NUM_SHAPES = 3  # row lengths of sequences one at a time, each a compiled program
REFERENCE_ROWS, REFERENCE_REPEATS = 2, 2
MOST_ADDED = 2.0  # percent of a training step that restarts may add


@dataclasses.dataclass(frozen=True)
class PackMambaConfig(Settings):
    """The figures of "PackMamba: Efficient Processing of Variable-Length Sequences in Mamba Training", here.

    padding    share of padding in a batch, beside the paper's
    training   interleaved steps on the same sequences one at a time, padded and packed, each with an update
               of the weights; with --against also packed steps of another model, with --reference the model's
               class in transformers on torch: a step of padded rows, for a Mamba-1 of two of them
    restarts   interleaved steps on the packs, with states and convolutions that restart with each sequence,
               and with none that do: what restarts add, in percent, the median of neighboring times

    The memory of a step is in benchmarks.step_memory.

    One at a time each row is filled up to one of three lengths, each a compiled program; nothing is
    compiled in a timed step. "Times the first" is the first model's time one at a time over that of the
    way, by token. `from` and `to` hold a median with a confidence of 95 %. What is timed is --shrink
    times shorter than what `padding` counts, rows and packs alike, so that all is done in minutes;
    --shrink=1 is the real size.
    """

    bert_config_file: str = setting("mamba-tiny", "size, or config.json, of the Mamba or Mamba-2")
    against: str = setting("", "size, or config.json, of another one, measured on packs in the same run")
    parts: str = setting(
        ",".join(PARTS),
        f"what to measure: {', '.join(PARTS)}",
        parse=lambda text: parse_names(text, PARTS),
    )
    max_seq_length: int = setting(
        LONGEST, "tokens of a padded row; lengths that are drawn shrink to it", minimum=64
    )
    pack_length: int = setting(4096, "tokens of a pack", minimum=64)
    shrink: int = setting(8, "by how much lengths are divided for all but padding", minimum=1)
    batch_size: int = setting(4, "packs in a step; a step of padded rows has as many tokens", minimum=1)
    repeats: int = setting(6, "timed steps of each way", minimum=1)
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
        if (self.reference or self.against) and TRAINING not in self.parts.split(","):
            name = "reference" if self.reference else "against"
            raise InputError(
                f"`{name}` must be left out without {TRAINING} in `parts`. Received: {self.parts!r}."
            )


def main(config):
    """Measure, print, write and draw."""
    choose_backend()
    model_config = read_config(config, "bert_config_file")
    parts = config.parts.split(",")
    others = {Path(config.against).stem: read_config(config, "against")} if config.against else {}
    for other in others.values():
        if other.vocab_size != model_config.vocab_size:
            raise InputError(
                f"`against` must have the vocab_size of bert_config_file, {model_config.vocab_size}. "
                f"Received: {other.vocab_size}."
            )
    lengths, tables = np.maximum(1, packmamba_lengths() * config.max_seq_length // LONGEST), {}
    if PADDING in parts:
        tables[PADDING] = padding_rows(lengths, config.max_seq_length, config.pack_length)
    if set(parts) != {PADDING}:
        batches = make_batches(config, lengths, model_config.vocab_size)
    if TRAINING in parts:
        tables |= training_tables(model_config, batches, config.repeats, others)
    if config.reference:
        row, compared = measure_reference(model_config, batches, config.repeats)
        tables |= {"reference": [row], "packed against others": [*tables["packed against others"], compared]}
    if RESTARTS in parts:
        tables[RESTARTS] = [restart_row(model_config, batches, config.repeats)]
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


def packmamba_lengths(num_sequences=NUM_LENGTHS, seed=0, shortest=SHORTEST, longest=LONGEST, mean=MEAN):
    """Draw random lengths between two, with a given mean: int64 `[num_sequences]`.

    Documents are log-normal; those shorter than `shortest` are left out, longer ones are cut at `longest`.
    """
    even = (np.arange(NUM_EVEN) + 0.5) / NUM_EVEN

    def lengths(shares, middle):
        """Quantiles of the documents that are at least as long as `shortest`."""
        kept = norm.sf((np.log(shortest) - middle) / SPREAD)
        documents = np.exp(middle + SPREAD * norm.isf((1 - shares) * kept))
        return np.minimum(documents, longest).astype(np.int64)

    # The middle is solved for the mean. At the ends nearly all documents are left out, and nearly all are cut
    low, high = np.log(shortest) - 6 * SPREAD, np.log(longest) + 6 * SPREAD
    middle = optimize.brentq(lambda at: lengths(even, at).mean() - mean, low, high)
    return lengths(np.random.default_rng(seed).random(num_sequences), middle)


def padding_rows(lengths, row_length, pack_length, window=WINDOW, seed=0):
    """Share of padding in each way to fill rows: rows of a table.

        lengths 5 4 3 4 2 in this order, packs of 8
        in order of arrival    5 . . . | 4 3 . | 4 2 . .
        sorted in a window     5 3 | 4 4 | 2 . . . . . .

    In a window of sequences that wait, the longest that fits goes into the open pack. `seed` determines the
    order of arrival.
    """
    histogram = count_lengths(lengths, pack_length)
    ours = ALGORITHMS[DEFAULT_ALGORITHM](histogram, pack_length, "max")
    in_order = ALGORITHMS["greedy"](histogram, pack_length, "max", seed=seed)
    in_window = ALGORITHMS["local_greedy"](histogram, pack_length, "max", buffer_size=window, seed=seed)
    rows = [
        (PADDED, row_length, len(lengths), None),
        ("in order of arrival", pack_length, in_order.num_packs, None),
        ("sorted in a window", pack_length, in_window.num_packs, None),
        (f"packed by {DEFAULT_ALGORITHM}", pack_length, ours.num_packs, ours.certificate.lower_bound),
    ]
    return [
        {
            "way": way,
            "tokens": size,
            "rows": num_rows,
            "padding, %": 100 * (1 - int(np.sum(lengths)) / (num_rows * size)),
            "PackMamba, %": PRINTED.get(way),
            "at least": at_least,
        }
        for way, size, num_rows, at_least in rows
    ]


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
    """
    ordered = np.sort(lengths)
    num_sequences = int(num_packs * pack_length / np.mean(ordered)) + 1
    # A plan of these may need more packs, so there are fewer sequences until it fits
    while True:
        # Each is from the middle of an equal part: a few that are drawn would have another mean than all
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
    compared = [comparison(by_token, way) for way in by_token if way != PACKED]
    return {TRAINING: rows, "packed against others": compared}


def device_engine(model_config, batches):
    """An engine for the packs, with the dtype and kernel that a run has on this process's devices."""
    from bert_packed.parallel.targets import devices_here

    here, length = devices_here(), batches[PACKED][0]["token_ids"].shape[1]
    options = kernel_options(model_config, length, here.platform)
    return build_engine(model_config, dtype=here.dtype, **options)


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
    return row, comparison(by_token, REFERENCE)


def restart_row(model_config, batches, num_repeats):
    """Interleave training on the packs with restarts and without them: a row of a table."""
    endless = dataclasses.replace(model_config, ablation_no_position_reset=True)
    configs = {"with": model_config, "without": endless}
    ways = {
        way: stepping_through(device_engine(one, batches), batches[PACKED]) for way, one in configs.items()
    }
    seconds = time_interleaved(ways, num_repeats)
    return {
        **{f"{way}, s": statistics.median(times) for way, times in seconds.items()},
        **added_row(seconds["with"], seconds["without"]),
        "at most, %": MOST_ADDED,
    }


def seconds_a_token(seconds, batches):
    """Times of some ways, each over the real tokens of its batches."""
    return {way: [time / count_tokens(batches[way])[0] for time in times] for way, times in seconds.items()}


def speed_rows(by_token):
    """Rows of a table: a way, its real tokens/s, and the time of `SINGLE` over this way's by token."""
    return [
        {
            "way": way,
            "real tokens/s": 1 / statistics.median(times),
            "times the first": statistics.median(ratios(by_token[SINGLE], times)),
        }
        for way, times in by_token.items()
    ]


def comparison(by_token, way):
    """Tokens/s of packs as a multiple of those of a way: a row with its interval, beside the paper's gain."""
    gains = median_row("times the tokens/s", ratios(by_token[way], by_token[PACKED]))
    return {"packed against": way, **gains, "PackMamba": SINGLE_GAIN if way == SINGLE else None}


def draw(tables, path):
    """Draw padding rates and real tokens/s of steps, as PNG."""
    columns = {PADDING: "padding, %", TRAINING: "real tokens/s"}
    drawn = [name for name in columns if name in tables]
    figure, (row,) = new_figure(max(1, len(drawn)))
    for name, axes in zip(drawn, row, strict=False):
        draw_bars(axes, tables[name], "way", columns[name], f"{name}: {columns[name]}")
    save_picture(figure, path)


if __name__ == "__main__":
    sys.exit(run(main, PackMambaConfig))
