"""Column generation: packs of the fractional optimum, and the bound that the values of lengths prove.

The relaxation over few packs gives every length a value, an exact knapsack finds packs worth more than one,
and these come in, until there are none (Gilmore and Gomory, Operations Research 9(6), 1961).
"""

import math

import highspy
import numpy as np
from highspy import HighsModelStatus as Status

from bert_packed.packing.bounds import best_packs, lower_bound, most_sequences, scale_values
from bert_packed.packing.descending import longest_pack_first
from bert_packed.packing.integer_programs import make_model, solve
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

    # A clock would end a search elsewhere on a slower machine, and plans would differ
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
        """Add what the same search finds, in seconds, for lengths rounded up to about a thousand classes."""
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
        """Add packs worth more than one; False if none are found or needed, True if the steps ran out."""
        # Prices lie between the master's values and the best known: the master's alone jump about for many
        # rounds (Wentges, Int. Trans. in Operational Research 4(2), 1997). If none is new, they get closer.
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
        """The value of the best pack with each row's length, int64 `[rows]`, and the table of other slots."""
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
        slots = np.column_stack([self.lengths[order], tables.slots(self._size - self.lengths[order])])
        rows = np.sort(self.row_of_slot[slots], axis=1)
        useful = np.where(rows >= 0, values[rows], 0).sum(axis=1) > 1 + TOLERANCE
        packs = dict.fromkeys(tuple(row for row in pack if row >= 0) for pack in rows[useful].tolist())
        return list(packs)[: self._max_new]


MAX_ITERATIONS = 2**31 - 1
SCALED_TOTAL = 1e6  # demands are scaled to this sum: the solver's tolerances are absolute
DUAL_SIMPLEX, PRIMAL_SIMPLEX = 1, 4
STEPS_PER_ITERATION = 60  # and row, measured at S = 512 and 2048


class Master:
    """One warm HiGHS model; packs are added, demands changed, and each solve starts at the last basis."""

    def __init__(self, demand, effort):
        """Build the model without packs; `demand` is sequences by row, `effort` limits the solves."""
        self.packs = []  # added, each an ascending tuple of rows, one row per slot
        self._known = set()
        self._effort = effort
        self._num_rows = len(demand)
        # Presolve would throw the basis away
        self._model = make_model(presolve="off", simplex_strategy=PRIMAL_SIMPLEX)
        self._scale = SCALED_TOTAL / sum(demand)
        self._no_limits = np.full(self._num_rows, highspy.kHighsInf)
        empty = np.zeros(self._num_rows, np.int32), np.zeros(0, np.int32), np.zeros(0)
        self._model.addRows(self._num_rows, self._scaled(demand), self._no_limits, 0, *empty)
        self._num_exchanges = self._num_rows - 1
        lower_rows = np.arange(self._num_exchanges)
        self._add_columns(
            0.0,
            np.arange(self._num_exchanges) * 2,
            np.column_stack([lower_rows, lower_rows + 1]).ravel(),
            np.tile([1.0, -1.0], self._num_exchanges),
        )

    def add(self, packs):
        """Add those packs, ascending tuples of rows, that are not known yet; returns their number."""
        new = [pack for pack in dict.fromkeys(packs) if pack not in self._known]
        starts, rows, entries = [], [], []
        for pack in new:
            starts.append(len(rows))
            for row in dict.fromkeys(pack):
                rows.append(row)
                entries.append(float(pack.count(row)))
        self._add_columns(1.0, starts, rows, entries)
        self._known.update(new)
        self.packs.extend(new)
        return len(new)

    def set_demand(self, demand):
        """Change the demand to the rest that a part of the plan leaves; the basis stays dual feasible."""
        self._scale = SCALED_TOTAL / sum(demand)
        rows = np.arange(self._num_rows, dtype=np.int32)
        self._model.changeRowsBounds(self._num_rows, rows, self._scaled(demand), self._no_limits)
        self._model.setOptionValue("simplex_strategy", DUAL_SIMPLEX)

    def solve(self):
        """Solve the relaxation over the packs known; False where the steps ran out."""
        cost = STEPS_PER_ITERATION * self._num_rows
        iterations = min(self._effort.left, MAX_ITERATIONS * cost) // cost
        if not iterations:
            return False
        self._model.setOptionValue("simplex_iteration_limit", int(iterations))
        end = solve(self._model, Status.kOptimal, Status.kIterationLimit)
        self._effort.take(cost * (1 + self._model.getInfo().simplex_iteration_count))
        return end == Status.kOptimal

    @property
    def objective(self):
        """Packs in the fractional optimum."""
        return self._model.getInfo().objective_function_value / self._scale

    def row_values(self):
        """Dual values in 0..1, float64 `[rows]`, growing with the length."""
        duals = np.array(self._model.getSolution().row_dual)
        return np.maximum.accumulate(np.clip(duals, 0, 1))

    def pack_counts(self):
        """Number of times that the fractional optimum uses each pack: float64 `[packs]`."""
        counts = np.array(self._model.getSolution().col_value)[self._num_exchanges :] / self._scale
        return np.maximum(counts, 0)  # the solver's tolerance below zero may be whole packs after scaling

    def _add_columns(self, cost, starts, rows, entries):
        num = len(starts)
        self._model.addCols(
            num,
            np.full(num, cost),
            np.zeros(num),
            np.full(num, highspy.kHighsInf),
            len(rows),
            np.array(starts, np.int32),
            np.array(rows, np.int32),
            np.array(entries, np.float64),
        )

    def _scaled(self, demand):
        return np.array([count * self._scale for count in demand])
