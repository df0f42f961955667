"""Interleaved timing, so that machine noise affects all variants; comparison of packed and unpacked steps."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable


def time_interleaved(ways, num_repeats):
    """Time functions one after the other, repeatedly: dict from name to a list of seconds.

    Args:
        ways: Dict from name to a function of the number of the repeat that returns when its work is done.
            Each is called once before, untimed: to compile.
        num_repeats: Timed calls of each.
    """
    for way in ways.values():
        way(0)
    seconds = {name: [] for name in ways}
    for repeat in range(num_repeats):
        # The order `a b`, `b a`, `a b`, ... favours none on a machine that slows down steadily
        for name in list(ways)[:: -1 if repeat % 2 else 1]:
            start = time.perf_counter()
            ways[name](repeat)
            seconds[name].append(time.perf_counter() - start)
    return seconds


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training step on one form of the data."""

    name: str  # for the table
    step: Callable[[dict], dict]  # takes one training step on a batch and returns its sums
    batches: list[dict]  # to time, all of the same shape
    # Both are means of all data: the few packs of these batches hold very different numbers of sequences
    sequences_per_step: float
    packing_factor: float


def compare(contenders, num_repeats=5):
    """Measure training steps of a list of `Contender`, interleaved; the first is the baseline.

    Returns a list of dicts for a table: `data`, `packing_factor`, `seconds_per_step` (median),
    `sequences_per_second`, `speed_up` over the baseline.
    """
    ways = {contender.name: functools.partial(_step, contender) for contender in contenders}
    seconds = time_interleaved(ways, num_repeats)
    rows = []
    for contender in contenders:
        median = statistics.median(seconds[contender.name])
        rows.append(
            {
                "data": contender.name,
                "packing_factor": contender.packing_factor,
                "seconds_per_step": median,
                "sequences_per_second": contender.sequences_per_step / median,
            }
        )
    baseline = rows[0]["sequences_per_second"]
    return [{**row, "speed_up": row["sequences_per_second"] / baseline} for row in rows]


def _step(contender, repeat):
    sums = contender.step(contender.batches[repeat % len(contender.batches)])
    float(sums["num_sequences"])  # wait for the device
