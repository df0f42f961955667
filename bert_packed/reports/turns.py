"""Times of several ways to do one thing, taken in turns: a slow minute hits all of them."""

import statistics
import time


def time_in_turns(ways, num_repeats):
    """Time functions one after the other, again and again.

    The order turns round every time (`a b`, `b a`, `a b`, ...): a machine that slows down steadily favours
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


def median_ratio(seconds, baseline):
    """Median over repeats of `seconds / baseline`: each ratio is of two times taken one after the other."""
    return statistics.median(ours / theirs for ours, theirs in zip(seconds, baseline, strict=True))
