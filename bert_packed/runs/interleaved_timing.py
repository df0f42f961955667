"""Times of several ways to do one thing, taken in turns: a slow minute hits all of them."""

import statistics
import time

from scipy.stats import binom

FEWEST_FOR_INTERVAL = 6  # values of `median_interval`


def time_interleaved(ways, num_repeats, rest=0.0):
    """Time functions one after the other, again and again.

    The order turns round every time (`a b`, `b a`, `a b`, ...): a machine that slows down steadily favours
    none.

    Args:
        ways: Dict from name to a function of the number of the repeat that returns when its work is done.
            Each is called once before, untimed: to compile.
        num_repeats: Timed calls of each.
        rest: Seconds between two calls. Threads of torch look out for more work for some milliseconds after
            a call, and take a core from the next one for as long: much where that takes a tenth of a second.

    Returns:
        Dict from name to a list of seconds, one a repeat.
    """
    for way in ways.values():
        way(0)
    seconds = {name: [] for name in ways}
    for repeat in range(num_repeats):
        for name in list(ways)[:: -1 if repeat % 2 else 1]:
            if rest:
                time.sleep(rest)
            start = time.perf_counter()
            ways[name](repeat)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds, baseline):
    """`seconds / baseline` of every repeat: two times taken one after the other. List of float."""
    return [ours / theirs for ours, theirs in zip(seconds, baseline, strict=True)]


def median_ratio(seconds, baseline):
    """Median of `ratios`."""
    return statistics.median(ratios(seconds, baseline))


def quartiles(values):
    """Lower quartile, median and upper quartile; of a single value three times that value."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def median_interval(values, confidence=0.95):
    """Where the median of endlessly many repeats lies, by the ranks of the values alone: a pair.

    However the values are spread, each is below their median with probability 1/2, so the number below it is
    binomial. Of fewer than six values no pair is that sure; it is then the least and the largest.

    Args:
        values: List of float, independent.
        confidence: Share of such pairs that hold the median.
    """
    ranked = sorted(values)
    num_outside = int(binom.ppf((1 - confidence) / 2, len(ranked), 0.5))
    low = max(num_outside - 1, 0)
    return ranked[low], ranked[-1 - low]
