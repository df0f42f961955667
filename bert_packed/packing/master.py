"""The restricted master problem: the fractional mix of known packs that covers all sequences, in HiGHS.

Variables are packs of slots and, for each two neighbouring lengths, how many slots of the longer one serve
the shorter. Rows are the lengths that occur, ascending:

    minimise  sum of x     subject to     A x + served_i - served_i-1 >= demand_i,     x, served >= 0

The exchange variables force the dual values to grow with the length, without which they oscillate for many
rounds (dual-optimal inequalities, Valerio de Carvalho, INFORMS J. Computing 17(2), 2005). The inequality
that two short slots replace a long one, also usual, is wrong here: it breaks the depth.
"""

import highspy
import numpy as np
from highspy import HighsModelStatus as Status

from bert_packed.packing.highs import make_model, solve

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
        self._model = make_model(
            presolve="off",  # it would throw the basis away
            simplex_strategy=PRIMAL_SIMPLEX,
        )
        self._scale = SCALED_TOTAL / sum(demand)
        none = np.zeros(0)
        starts = np.zeros(self._num_rows, np.int32)
        self._model.addRows(
            self._num_rows, self._scaled(demand), self._infinities(), 0, starts, none.astype(np.int32), none
        )
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
        """Change the demand, for the rest that a part of the plan leaves; the basis stays dual feasible."""
        self._scale = SCALED_TOTAL / sum(demand)
        rows = np.arange(self._num_rows, dtype=np.int32)
        self._model.changeRowsBounds(self._num_rows, rows, self._scaled(demand), self._infinities())
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

    def _infinities(self):
        return np.full(self._num_rows, highspy.kHighsInf)
