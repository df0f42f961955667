"""How much of a step is done while it is still at work: told where the work is, shown where the terminal is.

with following(bar.update), step(1000):
    advance(300)     the bar moves by 300, at once or at the next call but a fifth of a second later
    advance(100)     by 100
                     by 600: what is left of the step when it ends
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable

SECONDS_BETWEEN = 0.2  # telling costs a lock, and a bar redrawn


@dataclasses.dataclass
class _Now:
    """What this process is doing.

    Attributes:
        tell: Function of how much more is done; None where nobody asks.
        left: What the step has not told yet of its size.
        held: What was done since it last told.
        next_time: When it may tell again, on `time.monotonic`.
    """

    tell: Callable[[int], object] | None = None
    left: int = 0
    held: int = 0
    next_time: float = 0.0


_now = _Now()


def follow(tell):
    """From now on call `tell` with how much more is done, in the unit of the steps' sizes; None: nobody."""
    _now.tell, _now.next_time = tell, 0.0


@contextlib.contextmanager
def following(tell):
    """`follow` for the length of a block."""
    follow(tell)
    try:
        yield
    finally:
        follow(None)


@contextlib.contextmanager
def step(size):
    """A step: `advance` counts in its block up to `size`, and the end of the block is worth what is left."""
    _now.left, _now.held = size, 0
    try:
        yield
        _tell(_now.left)
    finally:
        _now.left = _now.held = 0


def advance(amount):
    """Say that so much more of the step is done; cheap enough for every batch, too dear for every token."""
    if _now.tell is None:
        return
    _now.held += amount
    if time.monotonic() >= _now.next_time:
        _tell(_now.held)


def _tell(amount):
    more = min(amount, _now.left)
    _now.left -= more
    _now.held = 0
    if more and _now.tell is not None:
        _now.tell(more)
        _now.next_time = time.monotonic() + SECONDS_BETWEEN
