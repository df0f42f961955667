"""Baselines of packing: arrival order with one open pack, and batches sorted by length.

`pack_greedy` (T5; Efficient Sequence Packing, Section H) closes its pack when the next sequence does not fit.
`pack_local_greedy` (PackMamba, Section 5, "local greedy") looks ahead in a small buffer for the longest
sequence that fits. A histogram has no order: a seed shuffles. With S = 8:

    arrivals 5 4 3 4 2   ->   greedy 5 | 4 3 | 4 2,   with a buffer of 2   5 3 | 4 4 | 2

Sorted batching (SORT) is no packing: sequences of like length share a batch, padded to its longest, and
shapes change from batch to batch. The papers give it as the limit that packing must match (Efficient Sequence
Packing, Table 1 and Section C: 99.9 %, factor 2.0 on Wikipedia).
"""

import dataclasses
import itertools
from collections import Counter

import numpy as np

from bert_packed.packing.arguments import check_whole
from bert_packed.packing.histogram import check_arguments
from bert_packed.packing.plan import make_plan

MAX_SEQUENCES = 10**8  # some 10 GiB: 8 million sequences took 819 MiB, mostly Python's numbers
CHUNK = 2**20


def pack_greedy(histogram, max_seq_length, max_sequences_per_pack, *, seed=0):
    """Pack in the order of arrival that `seed` draws; see `algorithms` for arguments and result."""
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    lengths = shuffled_lengths(counts, seed)
    starts = greedy_starts(lengths, max_seq_length, depth)
    sequences = lengths.tolist()
    packs = Counter()
    for start, stop in itertools.pairwise([*starts, len(sequences)]):
        packs[tuple(sorted(sequences[start:stop]))] += 1
    return make_plan("greedy", max_seq_length, max_sequences_per_pack, packs.items())


def greedy_starts(lengths, max_seq_length, depth):
    """Positions in a stream, lengths `[n]`, at which its greedy packs start: an ascending list."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, position = [], 0
    for offset in range(0, len(lengths), CHUNK):
        # `following` has, for every sequence of the chunk as the first of a pack, the first one left out
        inside = slice(offset, min(offset + CHUNK, len(lengths)))
        before = ends[inside] - lengths[inside]
        following = np.searchsorted(ends, before + max_seq_length, side="right")
        following = np.minimum(following, np.arange(inside.start, inside.stop) + depth).tolist()
        while position < inside.stop:
            starts.append(position)
            position = following[position - offset]
    return starts


def pack_local_greedy(histogram, max_seq_length, max_sequences_per_pack, *, buffer_size=64, seed=0):
    """Pack with one open pack that takes the longest of `buffer_size` waiting sequences that fits.

    PackMamba says only that "some of the sequences" are sorted before packing; the buffer is our reading.
    With a buffer of 1 it is `pack_greedy`. See `algorithms` for the other arguments and the result.
    """
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    check_whole("buffer_size", buffer_size, 1)
    waiting = [0] * (max_seq_length + 1)
    present = 0  # bit l is set where a sequence of length l waits
    num_waiting = 0
    packs = Counter()
    pack, space = [], max_seq_length
    arrivals = iter(shuffled_lengths(counts, seed).tolist())
    while True:
        while num_waiting < buffer_size and (length := next(arrivals, None)) is not None:
            waiting[length] += 1
            present |= 1 << length
            num_waiting += 1
        longest = (present & ((2 << space) - 1)).bit_length() - 1
        if longest < 1 or len(pack) == depth:
            packs[tuple(sorted(pack))] += 1
            pack, space = [], max_seq_length
            if not num_waiting:
                return make_plan("local_greedy", max_seq_length, max_sequences_per_pack, packs.items())
            continue
        pack.append(longest)
        space -= longest
        waiting[longest] -= 1
        num_waiting -= 1
        if not waiting[longest]:
            present ^= 1 << longest


def shuffled_lengths(histogram, seed):
    """The lengths of a histogram in an order drawn from a seed: int64 `[n]`, n at most 10**8."""
    if (number := sum(histogram.tolist())) > MAX_SEQUENCES:
        raise ValueError(
            f"packing in arrival order takes one sequence at a time, at most {MAX_SEQUENCES:,}; use an "
            f"algorithm on the histogram. Received: {number:,} sequences."
        )
    lengths = np.repeat(np.arange(1, len(histogram) + 1), histogram)
    np.random.default_rng(seed).shuffle(lengths)
    return lengths


@dataclasses.dataclass(frozen=True)
class SortedBatching:
    """Cost of batches of sorted lengths."""

    num_tokens: int  # computed, padding included
    efficiency: float  # the share that is real, 0..1; 1 without sequences
    packing_factor: float  # tokens of padding all to S, per token computed; 1 without sequences
    num_shapes: int  # batch lengths: compiled programs on hardware with static shapes


def cost_of_sorted_batching(histogram, max_seq_length, batch_size):
    """Sort by length, cut into batches, pad each to its longest; the last may be smaller: `SortedBatching`.

    Example, batch size 2: lengths 2 3 | 3 7 | 8  ->  6 + 14 + 8 tokens for 23.
    """
    histogram, _ = check_arguments(histogram, max_seq_length, "max")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1. Received: {batch_size!r}.")
    counts = histogram.tolist()
    num_sequences = sum(counts)
    num_tokens, real_tokens, seen, shapes = 0, 0, 0, set()
    for length, count in enumerate(counts, start=1):
        if not count:
            continue
        # Batches whose last, and so longest, sequence has this length.
        first, last = seen // batch_size, (seen + count) // batch_size
        if last > first:
            num_tokens += (last - first) * batch_size * length
            shapes.add(length)
        seen += count
        real_tokens += count * length
        if seen == num_sequences and seen % batch_size:
            num_tokens += seen % batch_size * length
            shapes.add(length)
    return SortedBatching(
        num_tokens,
        real_tokens / num_tokens if num_tokens else 1.0,
        num_sequences * max_seq_length / num_tokens if num_tokens else 1.0,
        len(shapes),
    )
