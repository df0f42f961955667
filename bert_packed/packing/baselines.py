"""What packing is compared with: first- and best-fit decreasing, arrival order, and batches sorted by length.

Decreasing: as for single sequences, but equal packs move together. The classical algorithms take one sequence
at a time; the papers measure 87 to 120 s for Wikipedia. Here a group of equal packs is filled in one step,
with the same result, in milliseconds. With S = 8:

    lengths 5, 4, 3, 3, 1   ->   first fit 5 3 | 4 3 1,   best fit 5 3 | 4 3 1

In arrival order, with one open pack: `pack_greedy` (T5; Efficient Sequence Packing, Section H) closes it
when the next sequence does not fit. `pack_local_greedy` (PackMamba, Section 5, "local greedy") looks ahead in
a small buffer for the longest sequence that fits. A histogram has no order: a seed shuffles.

    arrivals 5 4 3 4 2   ->   greedy 5 | 4 3 | 4 2,   with a buffer of 2   5 3 | 4 4 | 2

Sorted batching (SORT) is no packing: sequences of like length share a batch, padded to its longest, and
shapes change from batch to batch. The papers give it as the limit that packing must match (Efficient Sequence
Packing, Table 1 and Section C: 99.9 %, factor 2.0 on Wikipedia).
"""

import dataclasses
import itertools
from collections import Counter

import numpy as np

from bert_packed.packing.histogram import check_arguments
from bert_packed.packing.plan import make_plan
from bert_packed.packing.spfhp import descending

MAX_SEQUENCES = 10**8  # some 10 GiB: 8 million sequences took 819 MiB, mostly Python's numbers
CHUNK = 2**20


def pack_ffd(histogram, max_seq_length, max_sequences_per_pack):
    """Pack longest first, each sequence into the pack opened first that has room.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        max_sequences_per_pack: Depth, a whole number from 1, or "max".

    Returns:
        A `PackingPlan`.

    Raises:
        ValueError: an argument breaks its rule.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    packs = first_fit_decreasing(histogram, max_seq_length, depth)
    return make_plan("ffd", max_seq_length, max_sequences_per_pack, packs)


def first_fit_decreasing(histogram, max_seq_length, depth):
    """The packs, of checked arguments: list of `(lengths, count)`; equal packs may come more than once."""
    return _fit(histogram, max_seq_length, depth, lambda group: 0)


def pack_bfd(histogram, max_seq_length, max_sequences_per_pack):
    """Pack longest first, each sequence into the fullest pack that has room, of equals the one opened first.

    LPFHP is the same but for equally full packs, of which it takes the one touched last, and for the rest of
    a length that opens packs of several copies. Arguments and result as in `pack_ffd`.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    packs = _fit(histogram, max_seq_length, depth, lambda group: group[0])
    return make_plan("bfd", max_seq_length, max_sequences_per_pack, packs)


def _fit(histogram, max_seq_length, depth, preference):
    """Pack by groups `(space, count, pack)`, which stand in the order in which they were opened.

    Args:
        preference: Function from a group to a number; lower is filled first, of equals the earlier.

    Returns:
        List of `(lengths, count)`.
    """
    closed, groups = [], []
    for length, num_left in descending(histogram):
        fitting = [index for index, group in enumerate(groups) if group[0] >= length]
        fitting.sort(key=lambda index: preference(groups[index]))
        replaced = {}
        for index in fitting:
            if not num_left:
                break
            replaced[index] = filled = _fill(groups[index], length, num_left, depth)
            num_left -= sum((len(pack) - len(groups[index][2])) * count for _, count, pack in filled)
        # A pack once filled holds no more of this length, so what was sorted out before stays right.
        new = _fill((max_seq_length, num_left, ()), length, num_left, depth) if num_left else []
        merged = []
        for index, group in enumerate(groups):
            merged.extend(replaced.get(index, (group,)))
        merged.extend(group for group in new if group[2])
        groups = []
        for space, count, pack in merged:
            if space == 0 or len(pack) == depth:
                closed.append((pack, count))
            else:
                groups.append((space, count, pack))
    return closed + [(pack, count) for _, count, pack in groups]


def _fill(group, length, num_left, depth):
    """Fill packs of a group one after the other: some to the brim, at most one partly, the rest untouched."""
    space, count, pack = group
    repeat = min(space // length, depth - len(pack))
    num_full = min(count, num_left // repeat)
    rest = num_left - num_full * repeat if num_full < count else 0
    parts = [(repeat, num_full), (rest, 1 if rest else 0), (0, count - num_full - (1 if rest else 0))]
    return [
        (space - copies * length, packs, pack + (length,) * copies) for copies, packs in parts if packs > 0
    ]


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


@dataclasses.dataclass(frozen=True)
class SortedBatching:
    """Attributes:
    num_tokens: Tokens computed, padding included.
    efficiency: Share of them that is real, 0..1; 1 without sequences.
    packing_factor: Tokens of padding all to S, per token computed; 1 without sequences.
    num_shapes: Different batch lengths: compiled programs on hardware with static shapes.
    """

    num_tokens: int
    efficiency: float
    packing_factor: float
    num_shapes: int


def cost_of_sorted_batching(histogram, max_seq_length, batch_size):
    """Sort by length, cut into batches, pad each to its longest; the last batch may be smaller.

    Example, batch size 2: lengths 2 3 | 3 7 | 8  ->  6 + 14 + 8 tokens for 23.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        batch_size: Sequences per batch, from 1.

    Returns:
        A `SortedBatching`.

    Raises:
        ValueError: an argument breaks its rule.
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
