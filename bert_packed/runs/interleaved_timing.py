"""Interleaved timing, so that machine noise affects all variants."""

import time


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
