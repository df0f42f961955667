"""Lower bounds on the number of packs, and the certificate of a plan.

Every bound is a proof: only Python's whole numbers and exact 64-bit sums, never a float that rounding could
lift above the truth. None is above the packs of any plan; each is 0 for an empty histogram.

A bound by values of lengths needs the pack of most value, an exact bounded-depth knapsack (`best_packs`).
Its tables are over capacities: `best[c]` is the most that a pack with at most k slots of together at most c
tokens is worth. Two tables join into one for the sum of their slots; k slots take about 2 log2(k) joins:

    best_k+m[c] = max over i of best_k[i] + best_m[c - i]

With values 0 3 4 6 for lengths 1 to 4, S = 4: one slot gives 0 3 4 6, two slots 0 3 4 6 -> c=4: 2+2, also 6.
"""

import dataclasses
import itertools
import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bert_packed.packing.arguments import is_whole
from bert_packed.packing.histogram import check_arguments

VALUE_BITS = 60  # sums of values stay below 2**60, and IMPOSSIBLE plus one of them far below zero
IMPOSSIBLE = -(2**62)
BLOCK_ENTRIES = 2**16  # 512 KiB at a time, so that a block stays in the processor's cache


@dataclasses.dataclass(frozen=True, eq=False)
class BestPacks:
    """The most valuable packs for each capacity, and how to find their slots."""

    num_slots: int  # most that a pack has
    best: np.ndarray  # int64 [S + 1], the value by capacity
    left: "BestPacks | None" = None  # the tables joined, None for a table of a single slot or none
    right: "BestPacks | None" = None
    num_sums: int = 0  # that it took to compute, those of `left` and `right` included
    # int64 [S + 1], the capacity given to `left`, the rest goes to `right`; -1 until needed: a bound needs
    # none, and finding them takes longer than the values
    split: np.ndarray | None = None

    def slots(self, capacities):
        """Slots of the best pack for each capacity: int64 `[n, num_slots]`, 0 is an empty slot."""
        capacities = np.asarray(capacities)
        if self.left is None:
            return capacities[:, None][:, : self.num_slots]
        self._find_splits(np.unique(capacities[self.split[capacities] < 0]))
        given = self.split[capacities]
        return np.hstack([self.left.slots(given), self.right.slots(capacities - given)])

    def _find_splits(self, capacities):
        """Fill in `split`; of several the smallest, which is always where `left` rises."""
        steps = _steps(self.left.best)
        rows = max(1, BLOCK_ENTRIES // len(steps))
        for start in range(0, len(capacities), rows):
            block = capacities[start : start + rows]
            most = block[-1] // 2 if self.left is self.right else block[-1]
            given = steps[: np.searchsorted(steps, most, side="right")]
            left_over = block[:, None] - given
            sums = self.right.best[left_over]  # below zero this reads from the far end, and is masked
            sums += self.left.best[given]
            sums[left_over < 0] = IMPOSSIBLE
            self.split[block] = steps[sums.argmax(axis=1)]


def best_packs(values, max_slots):
    """Compute the table for packs of at most `max_slots` slots, fewer where more of them add nothing.

    `values` are int64 `[S + 1]`, of a slot by its size, 0 first, and must not fall: a slot may always be
    filled with something shorter.
    """
    if int(values.max()) * max_slots >= 2**VALUE_BITS:
        raise ValueError(
            f"`values` must stay below 2**60 in sum. Received: {max_slots} times {values.max()}."
        )
    if max_slots == 0:
        return BestPacks(0, np.zeros_like(values))
    one = table = BestPacks(1, values)
    for bit in bin(max_slots)[3:]:  # the binary digits after the first: double, and add one where it is set
        double = _join(table, table)
        if np.array_equal(double.best, table.best):
            return table  # twice the slots add nothing, so no number of them does
        table = _join(double, one) if bit == "1" else double
    return table


def _steps(best):
    """The capacities at which a table rises, 0 included: any other is as good as the one below it."""
    return np.flatnonzero(np.diff(best, prepend=-1))


def _join(left, right):
    """The table whose packs have the slots of a left and of a right pack."""
    steps, size = _steps(left.best), len(left.best)
    if len(steps) > len(_steps(right.best)):
        return _join(right, left)
    best = right.best + left.best[0]
    # Row size - i of these windows is right.best moved up by i.
    windows = sliding_window_view(np.concatenate([np.full(size, IMPOSSIBLE), right.best]), size)
    if left is right:
        steps = steps[: np.searchsorted(steps, size // 2, side="right")]
    start = num_sums = 0
    while start < len(steps):
        # A table joined with itself is symmetric: the smaller of two capacities is at most half their sum.
        lowest = int(steps[start]) * (2 if left is right else 1)
        if lowest >= size:
            break
        block = steps[start : start + max(1, BLOCK_ENTRIES // (size - lowest))]
        sums = windows[size - block, lowest:]
        sums += left.best[block][:, None]
        np.maximum(best[lowest:], sums.max(axis=0), out=best[lowest:])
        start += len(block)
        num_sums += sums.size
    num_sums += left.num_sums + (0 if left is right else right.num_sums)
    return BestPacks(left.num_slots + right.num_slots, best, left, right, num_sums, np.full(size, -1))


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Proof of a plan's largest distance from the fewest packs possible."""

    lower_bound: int  # no plan has fewer packs
    gap: float  # (packs - lower_bound) / lower_bound, 0 for an empty plan; 0 proves that the plan is optimal
    tight: str  # name of the bound that gives `lower_bound`, the simplest where several do
    bounds: dict[str, int]  # "material", "depth", "L2" and, if these leave a gap, "LP" of dual values


def certify(num_packs, histogram, max_seq_length, max_sequences_per_pack, dual_values=(), lp_bound=None):
    """The `Certificate` of a number of packs; `lp_bound` is what `dual_values` prove, None to compute it."""
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    counts = counts.tolist()  # Python's whole numbers: counts near 2**53 times their lengths exceed 64 bits
    bounds = {
        "material": -(-sum(length * count for length, count in enumerate(counts, 1)) // max_seq_length),
        "depth": -(-sum(counts) // depth),
        "L2": _l2_bound(counts),
    }
    # nothing proves more than a bound that the plan reaches, and long packs take seconds to price
    if len(dual_values) and num_packs > max(bounds.values()):
        if lp_bound is None:
            lp_bound = dual_bound(histogram, max_seq_length, max_sequences_per_pack, dual_values)
        bounds["LP"] = lp_bound
    tight = max(bounds, key=bounds.get)  # the first of equals: from simple to subtle
    lower = bounds[tight]
    return Certificate(lower, (num_packs - lower) / lower if lower else 0.0, tight, bounds)


def lower_bound(histogram, max_seq_length, max_sequences_per_pack):
    """The best of the bounds that cost nothing: material, depth and L2."""
    return certify(0, histogram, max_seq_length, max_sequences_per_pack).lower_bound


def _l2_bound(counts):
    """The bound L2 of Martello and Toth (Knapsack Problems, Section 8.3).

    For each k up to S / 2: sequences over S - k share a pack with none of k or more; those over S / 2 never
    share one with each other; what lies between k and S / 2 must go into the room that the latter leave,
    or into new packs. S = 8, lengths 5 5 5 4 4 4, k = 4: 3 + ceil((12 - 0) / 8) = 5, for 4 does not fit to 5.
    """
    max_seq_length, counts = len(counts), [0, *counts]  # by length
    up_to = list(itertools.accumulate(counts))  # sequences of at most this length
    tokens_up_to = list(itertools.accumulate(length * count for length, count in enumerate(counts)))
    half, best = max_seq_length // 2, 0
    for k in range(half + 1):
        large = up_to[max_seq_length] - up_to[half]
        medium = up_to[max_seq_length - k] - up_to[half]
        room = medium * max_seq_length - (tokens_up_to[max_seq_length - k] - tokens_up_to[half])
        small = tokens_up_to[half] - tokens_up_to[max(k - 1, 0)]
        best = max(best, large + max(0, -((room - small) // max_seq_length)))
    return best


def dual_bound(histogram, max_seq_length, max_sequences_per_pack, dual_values):
    """The bound that values for lengths prove: total value / value of the most valuable pack, rounded up.

    Any values prove some bound, by weak duality of the packing program; those that solve its linear
    relaxation prove the best (Farley, Operations Research 38(5), 1990). The most valuable pack is found
    exactly, so nothing about the values has to be trusted. `dual_values` are whole numbers from 0, `[S]`, the
    value of length i + 1; others, and sums that would overflow 64 bits, are a `ValueError`.
    """
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    rule = f"`dual_values` must be {max_seq_length} whole numbers from 0 and below 2**{VALUE_BITS}."
    for value in dual_values:
        if not is_whole(value) or not 0 <= value < 2**VALUE_BITS:
            raise ValueError(f"{rule} Received: {value!r}.")
    values = np.asarray(dual_values, np.int64)
    if values.shape != (max_seq_length,):
        raise ValueError(f"{rule} Received: {len(dual_values)}.")
    if not counts.any():
        return 0
    depth = most_sequences(counts.tolist(), int(np.flatnonzero(counts)[0]) + 1, max_seq_length, depth)
    # A slot takes a shorter sequence as well, and only lengths that occur: the most valuable pack then
    # holds real sequences, and values of absent lengths do not matter.
    slot_values = np.maximum.accumulate(np.concatenate([[0], np.where(counts > 0, values, 0)]))
    most_valuable = int(best_packs(slot_values, depth).best[-1])
    total = sum(count * value for count, value in zip(counts.tolist(), values.tolist(), strict=True))
    return -(-total // most_valuable) if most_valuable else 0


def most_sequences(counts, shortest, max_seq_length, depth):
    """Most sequences that a pack can hold: the depth, as many of the shortest as fit, or all there are."""
    return min(depth, max_seq_length // shortest, sum(counts))


def scale_values(values, depth):
    """Round float values in 0..1 down to whole numbers that `dual_bound` can sum without overflow."""
    bits = min(44, 59 - math.ceil(math.log2(depth + 1)))
    return np.floor(np.clip(values, 0, 1) * 2.0**bits).astype(np.int64)
