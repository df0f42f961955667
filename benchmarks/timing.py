"""Statistics of interleaved measurements: ratios of neighbouring times, and intervals of their medians.

The times come from `bert_packed.runs.interleaved_timing`: the n-th of each was taken next to the n-th of the
others. A ratio of two neighbours cancels what slows the machine for a minute; a ratio of medians does not.
"""

import statistics

from scipy.stats import binom

FEWEST_FOR_INTERVAL = 6  # values; fewer cannot hold a median with a confidence of 95 %


def ratios(seconds, baseline):
    """`seconds / baseline` of each repeat: list of float."""
    return [ours / theirs for ours, theirs in zip(seconds, baseline, strict=True)]


def median_interval(values, confidence=0.95):
    """Interval that holds the median of infinitely many repeats in a share of all cases: a pair.

    (None, None) of fewer than `FEWEST_FOR_INTERVAL` values.
    """
    if len(values) < FEWEST_FOR_INTERVAL:
        return None, None
    ranked = sorted(values)
    # Each is below the median with probability 1/2, whatever the distribution: their number is binomial
    num_outside = int(binom.ppf((1 - confidence) / 2, len(ranked), 0.5))
    low = max(num_outside - 1, 0)
    return ranked[low], ranked[-1 - low]


def median_row(name, values):
    """A median with its interval of 95 %, as columns of a table: `name`, `from`, `to`."""
    low, high = median_interval(values)
    return {name: statistics.median(values), "from": low, "to": high}


def added_row(seconds, baseline):
    """Time added by a part to the time without it, in percent: columns `added, %`, `from`, `to`."""
    return median_row("added, %", [100 * (ratio - 1) for ratio in ratios(seconds, baseline)])
