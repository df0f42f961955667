"""Diving: from a fractional mix of packs to a whole plan.

Round down, round a few up, solve again for the rest. On Wikipedia the plan ends at most one pack above the
fractional optimum, where rounding once leaves about thirty (depth 3: 8,143,829 packs, which is the bound).
"""

import math
from collections import Counter

import numpy as np

from bert_packed.packing.slots import count_slots, place, uncovered

ROUND_UP_SHARE = 0.25  # of the fractional packs, in each round: fewer cost more rounds, more cost packs
TOLERANCE = 1e-6


def dive(search, target):
    """Round the fractional plan of a `Relaxation`, whose master's demand is changed, to a whole one.

    Returns a list of `(ascending tuple of rows, count)` that can hold the demand, in `target` packs if it can
    be; and whether it ended before the limit of the search's effort.
    """
    demand, master, pack_counts = search.demand, search.master, search.pack_counts
    best = search.first_plan
    if not search.effort.left:
        return best, False
    chosen, rest = Counter(), list(demand)
    while True:
        whole = np.floor(pack_counts + TOLERANCE).astype(np.int64)
        rounded_down = [(master.packs[i], int(whole[i])) for i in np.flatnonzero(whole)]
        chosen.update(dict(rounded_down))
        rest = uncovered(count_slots(rounded_down, len(rest)), rest)
        best = min(best, [*chosen.items(), *search.pack_rest(rest)], key=num_packs)
        if not any(rest) or num_packs(best) <= target:
            return _drop_unused(best, demand), True
        if not search.effort.left:
            return _drop_unused(best, demand), False
        rest = _round_up(master.packs, pack_counts - whole, chosen, rest)
        best = min(best, [*chosen.items(), *search.pack_rest(rest)], key=num_packs)
        if not any(rest):
            return _drop_unused(best, demand), True
        master.set_demand(rest)
        if not master.solve():
            return _drop_unused(best, demand), False
        pack_counts = master.pack_counts()


def _round_up(packs, fractions, chosen, rest):
    """Add one each of the packs nearest to one more whose slots are all needed; returns the new rest."""
    quota = max(1, math.ceil(ROUND_UP_SHARE * math.fsum(fractions)))
    rest = list(rest)
    order = np.argsort(-fractions, kind="stable")
    placed = 0
    for index in order:
        if placed == quota or fractions[index] < TOLERANCE:
            break
        if place(packs[index], rest):
            chosen[packs[index]] += 1
            placed += 1
    if not placed:  # no pack is needed in full: take the likeliest, so that every round ends nearer
        pack = packs[order[0]]
        chosen[pack] += 1
        rest = uncovered(count_slots([(pack, 1)], len(rest)), rest)
    return rest


def _drop_unused(plan, demand):
    """Drop packs that the demand does not need, which rounding of huge counts leaves."""
    # Slots of at least each size beyond those needed; huge counts in Python's whole numbers.
    kind = np.int64 if sum(len(pack) * count for pack, count in plan) < 2**62 else object
    spare = np.array(count_slots(plan, len(demand)), kind) - np.array(demand, kind)
    free = np.cumsum(spare[::-1])[::-1].copy()
    kept = []
    for pack, count in plan:
        if free[0] >= len(pack):
            used = np.bincount(pack, minlength=len(demand))[::-1].cumsum()[::-1]
            times = min(count, int((free[used > 0] // used[used > 0]).min()))
            free -= times * used
            count -= times
        if count:
            kept.append((pack, count))
    return kept


def num_packs(plan):
    return sum(count for _, count in plan)
