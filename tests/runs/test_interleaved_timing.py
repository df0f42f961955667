"""Times taken in turns, by a clock that is told the time, and what is made of them."""

import numpy as np
from clock import Clock

from bert_packed.runs import interleaved_timing
from bert_packed.runs.interleaved_timing import (
    median_interval,
    median_ratio,
    quartiles,
    ratios,
    time_interleaved,
)


def test_turns_warm_up_once_and_turn_the_order_round():
    calls = []
    seconds = time_interleaved({name: lambda n, name=name: calls.append((name, n)) for name in "ab"}, 3)
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_turns_are_timed_each_and_warming_up_is_not(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleaved_timing, "time", clock)
    ways = {"slow": clock.taking([100, 3, 5, 4]), "fast": clock.taking([200, 1, 2, 1.5])}
    assert interleaved_timing.time_interleaved(ways, 3) == {"slow": [3, 5, 4], "fast": [1, 2, 1.5]}


def test_a_rest_is_not_timed(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleaved_timing, "time", clock)
    began = clock.now
    ways = {"slow": clock.taking([100, 3, 5]), "fast": clock.taking([200, 1, 2])}
    assert interleaved_timing.time_interleaved(ways, 2, rest=10) == {"slow": [3, 5], "fast": [1, 2]}
    assert clock.now - began == 311 + 4 * 10


def test_ratio_is_of_neighbouring_times():
    # the machine slows down threefold in the middle: the ratio stays
    assert median_ratio([2, 6, 2], [1, 3, 1]) == 2
    assert ratios([3, 6, 2], [1, 3, 4]) == [3, 2, 0.5]


def test_quartiles():
    assert quartiles([4, 1, 3, 2, 5]) == [2, 3, 4]
    assert quartiles([7]) == [7, 7, 7]


def test_median_interval():
    # of 25 values the 8th and the 18th: the table of every textbook for the sign test
    assert median_interval(list(range(24, -1, -1))) == (7, 17)
    assert median_interval(list(range(6))) == (0, 5)
    assert median_interval([3]) == (3, 3)


def test_median_interval_holds_the_median_as_often_as_it_says():
    samples = np.random.default_rng(0).exponential(size=(2000, 30))
    intervals = [median_interval(list(sample)) for sample in samples]
    share = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert 0.94 < share < 0.97
