"""Interleaved times, by a clock that is told the time."""

import pytest
from clock import Clock

from bert_packed.runs import interleaved_timing
from bert_packed.runs.interleaved_timing import Contender, compare, time_interleaved


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


def test_comparison_reports_the_ratio_of_sequences_per_second(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleaved_timing, "time", clock)
    calls = []

    def contender(name, factor, seconds):
        run = clock.taking(seconds, result={"num_sequences": 1.0})

        def take(batch):
            calls.append((name, batch))
            return run()

        return Contender(name, take, [0, 1], 4 * factor, factor)

    unpacked = contender("unpacked", 1.0, [100, 2, 9, 2])
    rows = compare([unpacked, contender("packed", 2.0, [100, 5, 2.5, 2])], num_repeats=3)
    # each takes one step to compile, then they are interleaved
    names, order = ["unpacked", "packed"], [(0, 1), (0, 1), (1, -1), (0, 1)]
    assert calls == [(name, batch) for batch, step in order for name in names[::step]]
    # medians are 2 s and 2.5 s for 4 and 8 sequences
    columns = ("data", "packing_factor", "seconds_per_step", "sequences_per_second", "speed_up")
    assert [tuple(row) for row in rows] == [columns, columns]
    assert [tuple(row.values()) for row in rows] == [
        ("unpacked", 1.0, 2.0, 2.0, 1.0),
        ("packed", 2.0, 2.5, pytest.approx(3.2), pytest.approx(1.6)),
    ]
