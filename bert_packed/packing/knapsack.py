"""Bounded-depth knapsack: the pack of most value when every length has one, exact in whole numbers.

Tables over capacities: `best[c]` is the most that a pack with at most k slots of together at most c tokens
is worth. Two tables join into one for the sum of their slots, so that k slots take about 2 log2(k) joins:

    best_k+m[c] = max over i of best_k[i] + best_m[c - i]

With values 0 3 4 6 for lengths 1 to 4, S = 4: one slot gives 0 3 4 6, two slots 0 3 4 6 -> c=4: 2+2, also 6.
"""

import dataclasses

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

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
        # Joined with itself a table is symmetric: the smaller of two capacities is at most half their sum.
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
