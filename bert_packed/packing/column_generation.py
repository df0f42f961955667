"""Column-generation histogram-packing, `cghp`: near-optimal plans with a proof of how near.

The linear relaxation of bounded-depth cutting stock is solved over all strategies without listing them
(`relaxation`), then rounded. The values of the lengths, a by-product, prove a bound that goes with
the plan. In none of the papers.
"""

import math
from collections import Counter

import numpy as np

from bert_packed.packing.histogram import check_arguments
from bert_packed.packing.integer_programs import fewest_packs, repack
from bert_packed.packing.plan import make_plan
from bert_packed.packing.relaxation import Effort, Relaxation
from bert_packed.packing.slots import count_slots, fill_slots, place, uncovered

DEFAULT_GAP = 1e-6
DEFAULT_EFFORT = 60  # about a minute
STEPS = 10**9  # of an effort of 1
RELAXATION_SHARE = 0.8  # of the effort; the rest is for rounding
COARSE_SHARE = 0.3
MANY_LENGTHS = 2048
MAX_REPACKED = 10**5  # packs; with more, one is a gap of 1e-5


def pack_cghp(
    histogram,
    max_seq_length,
    max_sequences_per_pack,
    *,
    gap=DEFAULT_GAP,
    effort=DEFAULT_EFFORT,
    integer_programs=True,
):
    """Pack by column generation.

    It takes no more packs than LPFHP. It ends when proven within `gap`, or when no better plan is found. No
    clock is read: equal arguments give equal plans, on slow machines as well.

    Args:
        histogram, max_seq_length, max_sequences_per_pack: Arguments of all `algorithms`.
        gap: (packs - lower bound) / lower bound that is good enough, from 0.
        effort: Steps of the search, in 10**9, about a second each; above 0, math.inf for no limit. When they
            are used up the best plan so far is returned, with a note where the gap is not met.
        integer_programs: True to save the last packs with integer programs, which seldom take three seconds
            beyond the effort.

    Returns:
        A `PackingPlan`, with dual values where they prove more than the bounds that cost nothing.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    if not gap >= 0:
        raise ValueError(f"`gap` must be at least 0. Received: {gap!r}.")
    if not effort > 0:
        raise ValueError(f"`effort` must be above 0. Received: {effort!r}.")
    if not histogram.any():
        return make_plan("cghp", max_seq_length, max_sequences_per_pack, [])
    counter = Effort(COARSE_SHARE * effort * STEPS)
    search = Relaxation(histogram, depth, counter)
    packs, note = search.first_plan, ""
    if num_packs(packs) > search.lower_bound:
        packs, ended = _search(search, gap, effort)
        packs, note = _improve(search, packs, depth, gap) if integer_programs else (packs, "")
        if not ended:
            note = f"Stopped by the limit of effort, {effort:g}, before the gap was met."
    notes = [note] if note and num_packs(packs) > _target(search, gap) else []
    dual_values = np.zeros(max_seq_length if len(search.dual_values) else 0, np.int64)
    if len(dual_values):
        dual_values[search.lengths - 1] = search.dual_values
    filled = [(search.lengths[list(rows)], count) for rows, count in fill_slots(packs, search.demand)]
    proof = dual_values.tolist(), search.lower_bound if len(dual_values) else None
    return make_plan("cghp", max_seq_length, max_sequences_per_pack, filled, notes, *proof)


def _search(search, gap, effort):
    """Solve the relaxation and round: packs as from `dive`, and whether it ended before the limit."""
    if len(search.lengths) > MANY_LENGTHS:
        search.add_coarse_packs()
    search.effort.limit = RELAXATION_SHARE * effort * STEPS
    ended = search.run(gap / 2)
    search.effort.limit = effort * STEPS
    packs, dive_ended = dive(search, _target(search, gap))
    return packs, ended and dive_ended


def _target(search, gap):
    return search.lower_bound + math.floor(gap * search.lower_bound)


def _improve(search, packs, depth, gap):
    """Save the last packs by integer programs; returns packs, and a note or ""."""
    if num_packs(packs) <= _target(search, gap) or num_packs(packs) > MAX_REPACKED:
        return packs, ""
    filled = fill_slots(packs, search.demand)
    size = len(search.row_of_slot) - 1
    packs = repack(filled, search.lengths.tolist(), size, depth, search.lower_bound)
    if num_packs(packs) <= search.lower_bound:
        return packs, ""
    exact, ended = fewest_packs(search.demand, search.row_of_slot, depth)
    packs = min([packs, exact or packs], key=num_packs)
    return packs, "" if ended else "The integer program was stopped before it had proven its optimum."


ROUND_UP_SHARE = 0.25  # of the fractional packs, in each round: fewer cost more rounds, more cost packs
TOLERANCE = 1e-6


def dive(search, target):
    """Round the fractional plan of a `Relaxation`, whose master's demand changes, to `target` packs or more.

    Returns `(ascending tuple of rows, count)` that can hold the demand; and whether the effort sufficed.
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
    # `spare` counts slots of each size beyond those needed; huge counts need Python's whole numbers.
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
