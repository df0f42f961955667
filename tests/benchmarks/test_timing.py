"""Ratios and intervals: which time is over which, and by which ranks."""

import random
import statistics

import numpy as np
import pytest

from benchmarks.timing import added_row, median_interval, median_row, ratios


def test_the_first_is_divided_by_the_second():
    assert ratios([3.0, 8.0], [6.0, 2.0]) == [0.5, 4.0]
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_what_is_added_is_of_the_baseline():
    row = added_row([3.0, 6.0, 2.0], [2.0, 5.0, 2.0])
    assert row == {"added, %": pytest.approx(20.0), "from": None, "to": None}


# Ranks of tables of the sign test: 2 (1/2)^n times the binomials below the first rank is at most 0.05
@pytest.mark.parametrize(("count", "low", "high"), [(5, None, None), (6, 1, 6), (9, 2, 8), (40, 14, 27)])
def test_an_interval_goes_by_ranks(count, low, high):
    values = list(range(1, count + 1))
    random.Random(0).shuffle(values)
    assert median_interval(values) == (low, high)
    assert median_row("x", values) == {"x": statistics.median(values), "from": low, "to": high}


def test_an_interval_holds_the_median_as_often_as_it_says():
    samples = np.random.default_rng(0).exponential(size=(2000, 30))
    intervals = [median_interval(list(sample)) for sample in samples]
    share = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert 0.94 < share < 0.97
