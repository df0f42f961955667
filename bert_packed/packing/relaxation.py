"""Column generation: packs of the fractional optimum, and the bound that the values of lengths prove.

The relaxation over few packs gives every length a value, an exact knapsack finds packs worth more than one,
and these come in, until there are none (Gilmore and Gomory, Operations Research 9(6), 1961).
"""

import math

import numpy as np

from bert_packed.packing.bounds import lower_bound, most_sequences, scale_values
from bert_packed.packing.descending import longest_pack_first
from bert_packed.packing.knapsack import best_packs
from bert_packed.packing.master import Master
from bert_packed.packing.plan import merge_packs

SMOOTHING = 0.3  # measured on Wikipedia: halves the rounds of 0, and 0.5 to 0.9 are no better
TOLERANCE = 1e-9
COARSE_CLASSES = 1024
COARSE_GAP = 1e-3
MAX_COARSE_COUNT = 2**50
STEPS_OF_REST = 30_000  # for each length, in Python
STEPS_OF_PRICING = 5_000


class Effort:
    """Counts steps of a search, about a nanosecond each on two cores of 2024, up to a limit that may move."""

    # A clock in their place would end a search elsewhere on a slower machine, and plans would differ
    def __init__(self, limit=math.inf):
        self.steps = 0
        self.limit = limit

    def take(self, steps):
        self.steps += int(steps)

    @property
    def left(self):
        """Steps before the limit, at least 0; math.inf without one."""
        return max(0, self.limit - self.steps)


class Relaxation:
    """The search for the packs of the fractional optimum; rows are the lengths that occur, ascending."""

    def __init__(self, histogram, depth, effort):
        """Start at the packs of LPFHP and the bounds that cost nothing; `effort` limits the search."""
        self.effort = effort
        self._size = len(histogram)
        self.lengths = np.flatnonzero(histogram) + 1  # int64 [rows]
        self.demand = histogram[self.lengths - 1].tolist()  # sequences of each length
        self._depth = most_sequences(self.demand, int(self.lengths[0]), self._size, depth)
        # int64 [S + 1], the row of the longest length that a slot of this size holds, or -1
        self.row_of_slot = np.searchsorted(self.lengths, np.arange(self._size + 1), side="right") - 1
        self._max_new = 10 + len(self.lengths) // 5
        self.master = Master(self.demand, effort)
        self.first_plan = self.pack_rest(self.demand)
        self.master.add(pack for pack, _ in self.first_plan)
        self.pack_counts = np.zeros(len(self.master.packs))  # the last solution of the master
        self.lower_bound = lower_bound(histogram, self._size, depth)  # the best that is proven so far
        # int64 [rows], the values that prove it; empty where a bound that costs nothing does
        self.dual_values = np.zeros(0, np.int64)
        tokens = sum(count * length for count, length in zip(self.demand, self.lengths.tolist(), strict=True))
        self._best_ratio = tokens / self._size
        # The length is a good first value: no pack is worth more than S, which proves the material bound
        self._center = self.lengths / self._size

    def pack_rest(self, rest):
        """Pack a demand by LPFHP: list of `(ascending tuple of rows, count)`."""
        self.effort.take(STEPS_OF_REST * len(self.lengths))
        counts = np.zeros(self._size, np.int64)
        counts[self.lengths - 1] = rest
        packs = merge_packs(longest_pack_first(counts, self._depth))
        return [(tuple(self.row_of_slot[list(pack)].tolist()), n) for pack, n in packs.items()]

    def add_coarse_packs(self):
        """Add the packs that the same search finds for lengths rounded up to about a thousand classes.

        With many lengths each round is slow and many are needed; the classes get close in a few seconds.
        """
        grain = -(-self._size // COARSE_CLASSES)
        classes = -(-self.lengths // grain)
        inside = classes <= self._size // grain  # longer ones go alone, as they do from the start
        coarse = np.zeros(self._size // grain, np.int64)
        np.add.at(coarse, classes[inside] - 1, np.array(self.demand)[inside])
        coarse = -(-coarse // max(1, int(coarse.max()) // MAX_COARSE_COUNT))
        if not coarse.any():
            return
        search = Relaxation(coarse, self._depth, self.effort)
        search.run(COARSE_GAP)
        for index in np.flatnonzero(search.pack_counts):
            slots = search.lengths[list(search.master.packs[index])] * grain
            rows = self.row_of_slot[slots]
            self.master.add([tuple(rows[rows >= 0].tolist())])

    def run(self, gap):
        """Search until the fractional optimum is known to be within `gap`; False where the steps ran out."""
        while self.master.solve():
            self.pack_counts = self.master.pack_counts()
            objective = self.master.objective
            if self._is_close(objective, gap) or not self._add_packs(objective, gap):
                return True
        return False

    def _is_close(self, objective, gap):
        return objective <= self.lower_bound * (1 + gap) + TOLERANCE

    def _add_packs(self, objective, gap):
        """Add packs that are worth more than one; False where there are none or none are needed.

        True also where the steps ran out, at which the master's next solve ends.
        """
        # Prices between the master's values and the best ones known: the master's alone jump about for many
        # rounds (Wentges, Int. Trans. in Operational Research 4(2), 1997). Nearer to them if nothing is new.
        values = self.master.row_values()
        weight = SMOOTHING
        while True:
            worth, tables = self._price(weight * self._center + (1 - weight) * values)
            if self._is_close(objective, gap):
                return False
            if self.master.add(self._select(worth, tables, values)):
                return True
            if weight == 0:
                return False
            if not self.effort.left:
                return True
            weight = weight / 2 if weight > 0.1 else 0

    def _price(self, values):
        """Find the most valuable pack around each length, exactly, and keep the bound if it is the best.

        The value of the best pack with each row's length, int64 `[rows]`, and the table of other slots.
        """
        scaled = scale_values(values, self._depth)
        slot_values = np.where(self.row_of_slot >= 0, scaled[self.row_of_slot], 0)
        tables = best_packs(slot_values, self._depth - 1)
        self.effort.take(tables.num_sums + STEPS_OF_PRICING * self._size)
        worth = scaled + tables.best[self._size - self.lengths]
        most = int(worth.max())
        if most:
            total = sum(count * value for count, value in zip(self.demand, scaled.tolist(), strict=True))
            if total / most > self._best_ratio:
                self._best_ratio = total / most
                if -(-total // most) > self.lower_bound:
                    self.lower_bound = -(-total // most)
                    self.dual_values = scaled
                self._center = scaled / most
        return worth, tables

    def _select(self, worth, tables, values):
        """The packs worth most that the master would use, at most a few: more only make it slow."""
        order = np.argsort(-worth, kind="stable")
        slots = np.column_stack(
            [self.lengths[order], tables.slots(self._size - self.lengths[order])],
        )
        rows = np.sort(self.row_of_slot[slots], axis=1)
        useful = np.where(rows >= 0, values[rows], 0).sum(axis=1) > 1 + TOLERANCE
        packs = dict.fromkeys(tuple(row for row in pack if row >= 0) for pack in rows[useful].tolist())
        return list(packs)[: self._max_new]
