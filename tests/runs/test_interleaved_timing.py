"""Interleaved times, by a clock that is told the time."""

from clock import Clock

from bert_packed.runs import interleaved_timing
from bert_packed.runs.interleaved_timing import time_interleaved


def test_each_warms_up_once_and_the_order_is_reversed_every_time():
    calls = []
    seconds = time_interleaved({name: lambda n, name=name: calls.append((name, n)) for name in "ab"}, 3)
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_each_call_is_timed_and_warming_up_is_not(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleaved_timing, "time", clock)
    ways = {"slow": clock.taking([100, 3, 5, 4]), "fast": clock.taking([200, 1, 2, 1.5])}
    assert time_interleaved(ways, 3) == {"slow": [3, 5, 4], "fast": [1, 2, 1.5]}
