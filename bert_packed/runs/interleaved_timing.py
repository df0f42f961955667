"""Interleaved timing, so that machine noise affects all variants; comparison of packed and unpacked steps."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable


def time_interleaved(ways, num_repeats):
    """Time functions one after the other, again and again.

    The order is reversed every time (`a b`, `b a`, `a b`, ...): a machine that slows down steadily favours
    none.

    Args:
        ways: Dict from name to a function of the number of the repeat that returns when its work is done.
            Each is called once before, untimed: to compile.
        num_repeats: Timed calls of each.

    Returns:
        Dict from name to a list of seconds, one a repeat.
    """
    for way in ways.values():
        way(0)
    seconds = {name: [] for name in ways}
    for repeat in range(num_repeats):
        for name in list(ways)[:: -1 if repeat % 2 else 1]:
            start = time.perf_counter()
            ways[name](repeat)
            seconds[name].append(time.perf_counter() - start)
    return seconds


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training step on one form of the data.

    Attributes:
        name: For the table.
        step: Takes one training step on a batch and returns its sums.
        batches: Batches to time, all of the same shape.
        sequences_per_step: Mean of the whole data set. The few batches timed would say too much or too
            little, since packs hold very different numbers of sequences.
        packing_factor: Mean sequences per pack of the whole data set.
    """

    name: str
    step: Callable[[dict], dict]
    batches: list[dict]
    sequences_per_step: float
    packing_factor: float


def compare(contenders, num_repeats=5):
    """Measure training steps of contenders, interleaved.

    Args:
        contenders: List of `Contender`; the first is the baseline.
        num_repeats: Timed steps each, after one that compiles.

    Returns:
        List of dicts for a table: `data`, `packing_factor`, `seconds_per_step` (median),
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
