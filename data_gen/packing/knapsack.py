"""Which pack is worth most when every length has a value, and at most so many fit: exact, in whole numbers.

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


@dataclasses.dataclass(frozen=True)
class BestPacks:
    """The most valuable packs for each capacity, and how to find their slots.

    Attributes:
        num_slots: Most slots that a pack has here.
        best: int64 `[S + 1]`, the value by capacity.
        left, right: The tables joined, or None for a table of a single slot or none.
        split: int64 `[S + 1]`, the capacity given to `left`; the rest goes to `right`.
    """

    num_slots: int
    best: np.ndarray
    left: "BestPacks | None" = None
    right: "BestPacks | None" = None
    split: np.ndarray | None = None

    def slots(self, capacities):
        """Slots of the best pack for each capacity: int64 `[n, num_slots]`, 0 is an empty slot."""
        if self.left is None:
            return np.asarray(capacities)[:, None][:, : self.num_slots]
        given = self.split[capacities]
        return np.hstack([self.left.slots(given), self.right.slots(capacities - given)])


def best_packs(values, max_slots):
    """Compute the table for packs of at most `max_slots` slots.

    Args:
        values: int64 `[S + 1]`, not negative, the value of a slot by its size; entry 0 is 0. It must not
            fall: a slot may always be filled with something shorter. `max_slots` times the largest value
            must stay below 2**60.
        max_slots: Whole number from 0.

    Returns:
        `BestPacks`, of fewer slots where more of them add nothing.

    Raises:
        ValueError: the values could overflow.
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


def _join(left, right):
    """The table whose packs have the slots of a left and of a right pack."""
    size = len(left.best)
    best, split = np.empty(size, np.int64), np.empty(size, np.int64)
    # Row c of these windows is right.best[c - i] for i = 0, 1, ...; padding answers for i > c.
    padded = np.concatenate([right.best[::-1], np.full(size - 1, IMPOSSIBLE)])
    windows = sliding_window_view(padded, size)[::-1]
    start = 0
    while start < size:
        stop = min(size, start + max(1, BLOCK_ENTRIES // (start + 1)))
        # Joined with itself a table is symmetric, and half of the splits show all of them.
        width = (stop + 1) // 2 if left is right else stop
        sums = windows[start:stop, :width] + left.best[:width]
        split[start:stop] = sums.argmax(axis=1)
        best[start:stop] = sums[np.arange(stop - start), split[start:stop]]
        start = stop
    return BestPacks(left.num_slots + right.num_slots, best, left, right, split)
