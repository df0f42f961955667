"""Training speed on packs, against unpacked rows and the programs of others.

python -m benchmarks.training_speed --bert_config_file=bert-mini --reference

Legend: B packs or rows per batch, S their length.
"""

import contextlib
import dataclasses
import functools
import statistics
import sys

import numpy as np

from benchmarks.runner import Settings, added_row, median_row, ratios, save_bars, show
from benchmarks.synthetic_data import (
    WIKIPEDIA,
    check_positions,
    describe_corpus,
    plan_corpus,
    row_batch,
    sums_of_a_row,
)
from benchmarks.training_steps import build_engine, stepping
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, check_depth_fits, check_divides, parse_depth, setting
from bert_packed.packing.histogram import fold
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend
from data_gen.dry_run import read_histogram

NUM_BATCHES = 2  # of each way
# Table 1 of the paper has these for NNLSHP at depth 3 on Wikipedia's lengths at 512, on an IPU
PRINTED = {"overhead": 4.287, "speed-up": 1.913, "share": 1.913 / 1.996}
LEAST_SHARE = 0.98  # of the packing factor, wanted over a plain BERT
PLAIN_ON_PACKS, PLAIN, PACKED, UNPACKED = "plain, on packs", "plain", "packed", "unpacked"
PADDED, SORTED = "padded", "sorted by length"  # behind the name of transformers
PADDING_FREE = "padding-free"


@dataclasses.dataclass(frozen=True)
class SpeedConfig(Settings):
    """Tables 1 and 2 of "Efficient Sequence Packing without Cross-contamination": interleaved training steps
    of one shape, on packs and on one sequence a row, by this package and by a plain BERT that knows
    nothing of packs. With --reference also by two peers on torch. transformers has rows padded to one
    length, and batches sorted by length. A padding-free BERT has the sequences of the packs one after
    another, and attention inside each. Both run in two processes: one as their users have it, and one
    whose C library keeps freed memory, as our commands let theirs ("memory kept"; left out where the
    environment has MALLOC_... or GLIBC_TUNABLES, which then hold for all). --picture draws real tokens a
    second of all of them.

    The packing factor is that of a plan for all sequences of the data. Tokens are random, dropout is on.
    A speed-up is the median of the ratios of neighboring steps, in sequences a second; `from` and `to`
    are its interval of 95 %. Under KERAS_BACKEND=jax a table has what packing adds to XLA's count of a
    step, which no noise changes.
    """

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    histogram: str = setting("", f"lengths: a name, or a JSON file; empty = {WIKIPEDIA}")
    input_file: str = setting("", "unpacked TFRecords to take the lengths from instead; paths or globs")
    max_seq_length: int = setting(512, "tokens of a pack and of a row; longer sequences are cut", minimum=16)
    max_sequences_per_pack: int | str = setting(3, 'most sequences in a pack, or "max"', parse=parse_depth)
    batch_size: int = setting(8, "packs, or rows, a step", minimum=1)
    micro_batch_size: int = setting(0, "packs that ours computes at once; 0 = all of the step's", minimum=0)
    repeats: int = setting(21, "timed steps of each way", minimum=1)
    reference: bool = setting(False, "also measure peers on torch (extra `reference`)")
    picture: str = setting("", "also draw real tokens a second into this PNG")

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "micro_batch_size", "batch_size")
        if self.histogram and self.input_file:
            raise InputError(
                f"`histogram` must be left out with input_file={self.input_file}. Received: {self.histogram}."
            )
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)

    @property
    def lengths(self):
        """Name of the histogram, or "" for records."""
        return self.histogram or ("" if self.input_file else WIKIPEDIA)

    @property
    def is_printed(self):
        """True if the paper prints figures of such data at this depth."""
        return (self.lengths, self.max_seq_length, self.max_sequences_per_pack) == (WIKIPEDIA, 512, 3)


def main(config):
    """Measure, print, write and draw."""
    backend = choose_backend()
    model_config = load_model_config(config.bert_config_file)
    check_positions(config.max_seq_length, model_config)
    histogram = fold(read_histogram(config.lengths, config.input_file), config.max_seq_length)
    corpus = plan_corpus(histogram, config.max_sequences_per_pack)
    batches = make_batches(corpus, config, model_config.vocab_size)
    engines = make_engines(model_config, config.micro_batch_size)
    with contextlib.ExitStack() as stack:
        ways = {
            PLAIN_ON_PACKS: stepping(engines[PLAIN], batches[PACKED]),
            PACKED: stepping(engines[PACKED], batches[PACKED]),
            PLAIN: stepping(engines[PLAIN], batches[UNPACKED]),
            UNPACKED: stepping(engines[UNPACKED], batches[UNPACKED]),
        }
        if config.reference:
            ways |= peer_ways(model_config, batches, stack)
        seconds = time_interleaved(ways, config.repeats)
    tables = {
        "data": [describe_corpus(corpus)],
        "steps": step_rows(seconds, corpus, config.batch_size),
        "speed-ups": speed_up_rows(seconds, corpus.plan.packing_factor, config.is_printed),
    }
    if backend == "jax":  # TensorFlow has no call for it
        programs = (engines[name].step_program(batches[PACKED][0]) for name in (PLAIN, PACKED))
        tables["XLA's count"] = [count_row(*programs)]
    show("training_speed", config, tables)
    if config.picture:
        rows = [row for row in tables["steps"] if row["way"] not in (PLAIN_ON_PACKS, PLAIN)]
        title = f"real tokens a second, {config.batch_size} rows of {config.max_seq_length}"
        save_bars(config.picture, rows, "way", "real tokens/s", title)


def make_batches(corpus, config, vocab_size):
    """Batch dicts of a corpus: dict from `PACKED`, `UNPACKED` and, for a reference, `SORTED` to a list."""
    rng, size = np.random.default_rng(0), config.batch_size
    batches = {
        PACKED: [corpus.packed_batch(size, vocab_size, rng) for _ in range(NUM_BATCHES)],
        UNPACKED: [corpus.unpacked_batch(size, vocab_size, rng) for _ in range(NUM_BATCHES)],
    }
    if config.reference:
        lengths = sorted_lengths(corpus.histogram, config.repeats, rng)
        batches[SORTED] = [row_batch([one] * size, int(one), vocab_size, rng) for one in lengths]
    return batches


def sorted_lengths(histogram, num_batches, rng):
    """Lengths of the batches of sorted data, in random order: int64 `[num_batches]`.

    Each of `num_batches` equal parts of the data has a batch, with the length in the middle of that part.

        histogram of 1 1 1 1 3 3 5 5, four batches   ->   1 1 3 5
    """
    upto = np.cumsum(histogram)
    # Neighbors in sorted data have one length: so has a batch
    places = (np.arange(num_batches) + 0.5) / num_batches * upto[-1]
    return rng.permutation(1 + np.searchsorted(upto, places, side="right"))


def make_engines(model_config, micro_batch_size):
    """Engines by name: `PLAIN`, a BERT that knows nothing of packs, and ours for packs and for rows."""
    from benchmarks.peers.plain_bert import plain_objective

    plain = build_engine(model_config, micro_batch_size, objective=plain_objective())
    ours = {name: build_engine(model_config, micro_batch_size) for name in (PACKED, UNPACKED)}
    return {PLAIN: plain, **ours}


def peer_ways(model_config, batches, stack):
    """Functions of the repeat that take a step of the peers, by name, until the stack ends."""
    from benchmarks.peers import process
    from benchmarks.peers.training import padding_free_training, transformers_training

    rows, ways = {PADDED: batches[UNPACKED], SORTED: batches[SORTED]}, {}
    for name, keeps_memory in process.torch_processes().items():
        peer = stack.enter_context(transformers_training(model_config, rows, keeps_memory=keeps_memory))
        ways |= {f"{name}, {one}": functools.partial(peer.call, "step", one) for one in rows}
        free = padding_free_training(model_config, batches[PACKED], "one by one", keeps_memory=keeps_memory)
        name = name.replace(process.AS_IT_IS, PADDING_FREE)
        ways[name] = functools.partial(stack.enter_context(free).call, "step")
    return ways


def has_all_of_a_pack(name):
    """True for ways whose step has the sequences of packs, not one a row."""
    return name == PACKED or name.startswith(PADDING_FREE)


def step_rows(seconds, corpus, batch_size):
    """Speeds of all ways: rows of a table."""
    rows = []
    for name, times in seconds.items():
        sums = sums_of_a_row(corpus, has_all_of_a_pack(name))
        # Sorted batches have all lengths
        per_step = (statistics.mean if name.endswith(SORTED) else statistics.median)(times)
        # The plain model takes packs for single sequences: these steps are only there to be timed
        rate = None if name == PLAIN_ON_PACKS else batch_size / per_step
        rows.append(
            {
                "way": name,
                "s/step": per_step,
                "sequences/s": rate and rate * sums["num_sequences"],
                "real tokens/s": rate and rate * sums["num_tokens"],
            }
        )
    return rows


def speed_up_rows(seconds, factor, is_printed):
    """Overhead and speed-ups with their intervals, beside print if the paper has such: rows of a table."""

    def row(figure, values, printed=None, at_least=None):
        columns = dict(zip(("median", "from", "to"), values, strict=True))
        return {"figure": figure, **columns, "print": printed if is_printed else None, "at least": at_least}

    overhead = added_row(seconds[PACKED], seconds[PLAIN_ON_PACKS]).values()
    rows = [row("overhead of packing, % of the step", overhead, PRINTED["overhead"])]
    for name in [name for name in seconds if name not in (PLAIN_ON_PACKS, PACKED)]:
        gains = ratios(seconds[name], seconds[PACKED])
        shares = list(median_row("", gains).values())
        if name.endswith(SORTED):  # steps of all lengths: their mean counts, and has no such interval
            shares = [statistics.mean(gains), None, None]
        if has_all_of_a_pack(name):  # nothing is padded there either
            rows.append(row(f"speed-up over {name}", shares))
            continue
        is_baseline = name == PLAIN  # of the paper
        speed_ups = [value and factor * value for value in shares]
        rows.append(row(f"speed-up over {name}", speed_ups, PRINTED["speed-up"] if is_baseline else None))
        printed, at_least = (PRINTED["share"], LEAST_SHARE) if is_baseline else (None, None)
        rows.append(row(f"share of the packing factor, over {name}", shares, printed, at_least))
    return rows


def count_row(plain, packed):
    """Operations and bytes that packing adds, by XLA's counts of two `StepProgram`s, in percent: a row."""
    return {
        f"packing adds, % of the {title}": 100 * (getattr(packed, name) / getattr(plain, name) - 1)
        for title, name in (("operations", "flops"), ("bytes moved", "bytes_accessed"))
    }


if __name__ == "__main__":
    sys.exit(run(main, SpeedConfig))
