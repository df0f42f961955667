"""Packing in the order of arrival, with one open pack: the baselines of the papers.

`pack_greedy` (T5; Efficient Sequence Packing, Section H) closes the pack when the next sequence does not
fit. `pack_local_greedy` (PackMamba, Section 5, "local greedy") looks ahead in a small buffer for the longest
sequence that fits. A histogram has no order, so the order is a shuffle by a seed. With S = 8:

    arrivals 5 4 3 4 2   ->   greedy 5 | 4 3 | 4 2,   with a buffer of 2   5 3 | 4 4 | 2
"""

import itertools
from collections import Counter

import numpy as np

from data_gen.packing.histogram import check_arguments
from data_gen.packing.plan import make_plan

MAX_SEQUENCES = 10**8  # some 10 GiB: 8 million sequences took 819 MiB, mostly Python's numbers
CHUNK = 2**20


def pack_greedy(histogram, max_seq_length, max_sequences_per_pack, *, seed=0):
    """Pack in arrival order.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        max_sequences_per_pack: Depth, a whole number from 1, or "max".
        seed: Of the order of arrival.

    Returns:
        A `PackingPlan`.

    Raises:
        ValueError: an argument breaks its rule, or there are over 10**8 sequences.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    lengths = shuffled_lengths(histogram, seed)
    starts = greedy_starts(lengths, max_seq_length, depth)
    sequences = lengths.tolist()
    packs = Counter()
    for start, stop in itertools.pairwise([*starts, len(sequences)]):
        packs[tuple(sorted(sequences[start:stop]))] += 1
    return make_plan("greedy", max_seq_length, max_sequences_per_pack, packs.items())


def greedy_starts(lengths, max_seq_length, depth):
    """Where the greedy packs of a stream start.

    Args:
        lengths: int `[n]`, each in 1..S.
        max_seq_length: S.
        depth: Whole number from 1.

    Returns:
        List of positions, ascending; empty for an empty stream.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, position = [], 0
    for offset in range(0, len(lengths), CHUNK):
        # for every sequence of the chunk, were it first in a pack: the first that the pack does not hold
        inside = slice(offset, min(offset + CHUNK, len(lengths)))
        before = ends[inside] - lengths[inside]
        following = np.searchsorted(ends, before + max_seq_length, side="right")
        following = np.minimum(following, np.arange(inside.start, inside.stop) + depth).tolist()
        while position < inside.stop:
            starts.append(position)
            position = following[position - offset]
    return starts


def pack_local_greedy(histogram, max_seq_length, max_sequences_per_pack, *, buffer_size=64, seed=0):
    """Pack with one open pack that takes the longest sequence of a small buffer that fits.

    PackMamba says only that "some of the sequences" are sorted before packing; the buffer is our reading.

    Args:
        histogram, max_seq_length, max_sequences_per_pack, seed: As in `pack_greedy`.
        buffer_size: Sequences that wait; 1 is greedy.

    Returns:
        A `PackingPlan`.

    Raises:
        ValueError: an argument breaks its rule, or there are over 10**8 sequences.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    if buffer_size < 1:
        raise ValueError(f"`buffer_size` must be at least 1. Received: {buffer_size!r}.")
    waiting = [0] * (max_seq_length + 1)
    present = 0  # bit l is set where a sequence of length l waits
    num_waiting = 0
    packs = Counter()
    pack, space = [], max_seq_length
    arrivals = iter(shuffled_lengths(histogram, seed).tolist())
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
    """The lengths of a histogram in an order drawn from a seed: int64 `[n]`.

    Raises:
        ValueError: there are over 10**8, for which single sequences are no longer practical.
    """
    if (number := sum(histogram.tolist())) > MAX_SEQUENCES:
        raise ValueError(
            f"packing in arrival order takes one sequence at a time, at most {MAX_SEQUENCES:,}; use an "
            f"algorithm on the histogram. Received: {number:,} sequences."
        )
    lengths = np.repeat(np.arange(1, len(histogram) + 1), histogram)
    np.random.default_rng(seed).shuffle(lengths)
    return lengths
