"""The fewest packs that are known how to reach, with a proof of how far from optimal they can be: `cghp`.

Column-generation histogram-packing solves the linear relaxation of bounded-depth cutting stock over all
strategies without listing them (`relaxation`), then rounds (`diving`). The values of the lengths, a
by-product, prove a bound that goes with the plan. In none of the papers.
"""

import math
import time

import numpy as np

from data_gen.packing.diving import dive, num_packs
from data_gen.packing.exact import SECONDS, fewest_packs
from data_gen.packing.histogram import check_arguments
from data_gen.packing.plan import make_plan
from data_gen.packing.relaxation import Relaxation
from data_gen.packing.slots import fill_slots

DEFAULT_GAP = 1e-6
DEFAULT_TIME_LIMIT = 60.0
RELAXATION_SHARE = 0.8  # of the time limit; the rest is for rounding
COARSE_SHARE = 0.3
MANY_LENGTHS = 2048


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
        time_limit: Seconds after which the best plan so far is returned, with a note where the gap is not
            met; math.inf for never. Only a plan that time cut short depends on the speed of the machine.
            Reading the clock waits for single steps, at S = 8192 a second.

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
    if not histogram.any():
        return make_plan("cghp", max_seq_length, max_sequences_per_pack, [])
    start = time.monotonic()
    search = Relaxation(histogram, depth, start + RELAXATION_SHARE * time_limit)
    if len(search.lengths) > MANY_LENGTHS:
        search.add_coarse_packs(start + COARSE_SHARE * time_limit)
    in_time = search.run(gap / 2)
    target = search.lower_bound + math.floor(gap * search.lower_bound)
    search.master.deadline = start + time_limit
    packs, dive_in_time = dive(search, target, start + time_limit)
    in_time = in_time and dive_in_time
    notes = []
    if num_packs(packs) > search.lower_bound:
        left = start + time_limit - time.monotonic()
        exact, exact_in_time = None, False
        if left > 0:
            exact, exact_in_time = fewest_packs(search.demand, search.row_of_slot, depth, min(left, SECONDS))
        packs = min([packs, exact or packs], key=num_packs)
        if not exact_in_time and left > SECONDS:
            notes.append(f"The integer program was stopped after {SECONDS:g} seconds.")
        else:
            in_time = in_time and exact_in_time
    if not in_time:
        notes.append(f"Stopped by the time limit of {time_limit:g} seconds before the gap was met.")
    if num_packs(packs) <= target:
        notes = []
    dual_values = np.zeros(max_seq_length, np.int64)
    dual_values[search.lengths - 1] = search.dual_values
    filled = [(search.lengths[list(rows)], count) for rows, count in fill_slots(packs, search.demand)]
    return make_plan(
        "cghp",
        max_seq_length,
        max_sequences_per_pack,
        filled,
        notes,
        dual_values.tolist(),
    )
