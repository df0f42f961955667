"""Progress within a step, reported by the code that works, shown by whoever follows; durations for people.

with following(bar.update), step(1000):
    advance(300)     the bar moves by 300, at once or at the next call but a fifth of a second later
    advance(100)     by 100
                     by 600: what is left of the step when it ends
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable

SECONDS_BETWEEN = 0.2  # a report costs a lock, and a bar redrawn


@dataclasses.dataclass
class _Now:
    """The step of this process."""

    report: Callable[[int], object] | None = None  # of the progress since the last report
    left: int = 0  # of the step's size, not yet reported
    held: int = 0  # progress since the last report
    next_time: float = 0.0  # of the next report at the earliest, on `time.monotonic`


_now = _Now()


def follow(report):
    """Call `report` with the progress from now on, in the unit of the steps' sizes; None for nobody."""
    _now.report, _now.next_time = report, 0.0


@contextlib.contextmanager
def following(report):
    follow(report)
    try:
        yield
    finally:
        follow(None)


@contextlib.contextmanager
def step(size):
    """A step: `advance` counts in its block up to `size`, and the end of the block is worth the rest."""
    _now.left, _now.held = size, 0
    try:
        yield
        _report(_now.left)
    finally:
        _now.left = _now.held = 0


def advance(amount):
    """Add to the progress of the step; cheap enough for every batch, too dear for every token."""
    if _now.report is None:
        return
    _now.held += amount
    if time.monotonic() >= _now.next_time:
        _report(_now.held)


def _report(amount):
    more = min(amount, _now.left)
    _now.left -= more
    _now.held = 0
    if more and _now.report is not None:
        _now.report(more)
        _now.next_time = time.monotonic() + SECONDS_BETWEEN


def count_of(number, noun):
    """A count with its regular noun: `1 pack`, `2,000 packs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_duration(seconds):
    """A duration for people: `0.8 s`, `12 min`, `3.5 h`, `40 days`."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            number = seconds / size
            return f"{number:.{3 if number >= 100 else 2}g} {unit}"
    return f"{seconds / 86_400:,.0f} days"
