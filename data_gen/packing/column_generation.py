"""The fewest packs that are known how to reach, with a proof of how far from optimal they can be: `cghp`.

Column-generation histogram-packing solves the linear relaxation of bounded-depth cutting stock over all
strategies without listing them (Gilmore and Gomory, Operations Research 9(6), 1961): the relaxation over
few packs gives every length a value, an exact knapsack finds packs worth more than one, and these come in.
Then `diving` rounds. The values prove a bound that goes with the plan. In none of the papers.
"""

import math
import time

import numpy as np

from data_gen.packing.bounds import lower_bound, scale_values
from data_gen.packing.diving import dive
from data_gen.packing.exact import fewest_packs
from data_gen.packing.histogram import check_arguments
from data_gen.packing.knapsack import best_packs
from data_gen.packing.lpfhp import pack_lpfhp
from data_gen.packing.master import Master
from data_gen.packing.plan import make_plan
from data_gen.packing.slots import fill_slots

DEFAULT_GAP = 1e-6
DEFAULT_TIME_LIMIT = 60.0
SMOOTHING = 0.3  # measured on Wikipedia: halves the rounds of 0, and 0.5 to 0.9 are no better
RELAXATION_SHARE = 0.8  # of the time limit; the rest is for rounding
TOLERANCE = 1e-9


def pack_cghp(
    histogram, max_seq_length, max_sequences_per_pack, *, gap=DEFAULT_GAP, time_limit=DEFAULT_TIME_LIMIT
):
    """Pack by column generation.

    Never more packs than LPFHP. Ends when the plan is proven to be within `gap`, or no better is found.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        max_sequences_per_pack: Depth, a whole number from 1, or "max".
        gap: (packs - lower bound) / lower bound that is good enough, from 0.
        time_limit: Seconds after which the best plan so far is returned, with a note; math.inf for never.
            Only a plan with that note depends on the speed of the machine.

    Returns:
        A `PackingPlan` with dual values.

    Raises:
        ValueError: an argument breaks its rule.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    if not gap >= 0:
        raise ValueError(f"`gap` must be at least 0. Received: {gap!r}.")
    if not time_limit > 0:
        raise ValueError(f"`time_limit` must be above 0 seconds. Received: {time_limit!r}.")
    lengths = np.flatnonzero(histogram) + 1
    if not len(lengths):
        return make_plan("cghp", max_seq_length, max_sequences_per_pack, [])
    start = time.monotonic()
    depth = min(depth, max_seq_length // int(lengths[0]))
    demand = histogram[lengths - 1].tolist()
    row_of_slot = np.searchsorted(lengths, np.arange(max_seq_length + 1), side="right") - 1

    def pack_rest(rest):
        counts = np.zeros(max_seq_length, np.int64)
        counts[lengths - 1] = rest
        plan = pack_lpfhp(counts, max_seq_length, depth)
        return [(tuple(row_of_slot[list(p)].tolist()), count) for p, count in plan.strategies.items()]

    master = Master(demand, start + RELAXATION_SHARE * time_limit)
    master.add(pack for pack, _ in pack_rest(demand))
    known_bound = lower_bound(histogram, max_seq_length, depth)
    search = Relaxation(master, demand, lengths, row_of_slot, depth, known_bound)
    in_time = search.run(gap / 2)
    target = search.lower_bound + math.floor(gap * search.lower_bound)
    master.deadline = start + time_limit
    packs = dive(master, search.pack_counts, demand, pack_rest, target, master.deadline)
    if sum(count for _, count in packs) > search.lower_bound:
        exact = fewest_packs(demand, row_of_slot, depth)
        packs = min([packs, exact or packs], key=lambda plan: sum(count for _, count in plan))

    notes = (
        [] if in_time else [f"Stopped by the time limit of {time_limit:g} seconds before the gap was met."]
    )
    dual_values = np.zeros(max_seq_length, np.int64)
    dual_values[lengths - 1] = search.dual_values
    filled = [([int(lengths[row]) for row in rows], count) for rows, count in fill_slots(packs, demand)]
    return make_plan(
        "cghp",
        max_seq_length,
        max_sequences_per_pack,
        filled,
        notes,
        dual_values.tolist(),
    )


class Relaxation:
    """The search for the packs of the fractional optimum.

    Attributes:
        lower_bound: The best bound proven so far, a whole number.
        dual_values: int64 `[rows]`, the values that prove it.
        pack_counts: float64 `[packs]`, the last solution of the master.
    """

    def __init__(self, master, demand, lengths, row_of_slot, depth, known_bound):
        self._master = master
        self._demand = demand
        self._lengths = lengths
        self._row_of_slot = row_of_slot
        self._depth = depth
        self._size = len(row_of_slot) - 1
        self._max_new = 10 + len(lengths) // 5
        self.lower_bound, self.dual_values, self._best_ratio = known_bound, None, 0.0
        # The length itself is a good first value: it proves the material bound.
        self._center = lengths / self._size
        self._price(self._center)
        self.pack_counts = np.zeros(len(master.packs))

    def run(self, gap):
        """Search until the fractional optimum is known to be within `gap`; False where time ran out."""
        while self._master.solve():
            self.pack_counts = self._master.pack_counts()
            objective = self._master.objective
            if self._is_close(objective, gap) or not self._add_packs(objective, gap):
                return True
        return False

    def _is_close(self, objective, gap):
        return objective <= self.lower_bound * (1 + gap) + TOLERANCE

    def _add_packs(self, objective, gap):
        """Add packs that are worth more than one; False where there are none or none are needed.

        Packs are looked for at values between those of the master and the best ones known, because the
        master's alone jump about for many rounds (Wentges, Int. Trans. in Operational Research 4(2), 1997).
        Where that finds nothing new, at values nearer to the master's.
        """
        values = self._master.row_values()
        weight = SMOOTHING
        while True:
            worth, tables = self._price(weight * self._center + (1 - weight) * values)
            if self._is_close(objective, gap):
                return False
            if self._master.add(self._select(worth, tables, values)):
                return True
            if weight == 0:
                return False
            weight = weight / 2 if weight > 0.1 else 0

    def _price(self, values):
        """Find the most valuable pack around each length, exactly, and keep the bound if it is the best.

        Args:
            values: float64 `[rows]` in 0..1, growing.

        Returns:
            int64 `[rows]`, the value of the best pack that holds the row's length, and the tables that tell
            its other slots.
        """
        scaled = scale_values(values, self._depth)
        slot_values = np.where(self._row_of_slot >= 0, scaled[self._row_of_slot], 0)
        tables = best_packs(slot_values, self._depth - 1)
        worth = scaled + tables.best[self._size - self._lengths]
        most = int(worth.max())
        if most:
            total = sum(count * value for count, value in zip(self._demand, scaled.tolist(), strict=True))
            if total / most > self._best_ratio:
                self._best_ratio = total / most
                self.lower_bound = max(self.lower_bound, -(-total // most))
                self.dual_values = scaled
                self._center = scaled / most
        return worth, tables

    def _select(self, worth, tables, values):
        """The packs worth most that the master would use, at most a few: more only make it slow."""
        order = np.argsort(-worth, kind="stable")
        slots = np.column_stack(
            [self._lengths[order], tables.slots(self._size - self._lengths[order])],
        )
        rows = np.sort(self._row_of_slot[slots], axis=1)
        useful = np.where(rows >= 0, values[rows], 0).sum(axis=1) > 1 + TOLERANCE
        packs = dict.fromkeys(tuple(row for row in pack if row >= 0) for pack in rows[useful].tolist())
        return list(packs)[: self._max_new]
