"""What is made of the times of XLA's ways, and which ways a CPU is worth."""

import pytest

from bert_packed.runs import xla_ways
from bert_packed.runs.xla_ways import DEFAULT, NO_YNNPACK, WAYS, WIDE_VECTORS


def test_ratios_are_of_the_same_turn():
    rows = xla_ways.way_rows({"a": [1.0, 10.0, 2.0], "b": [0.5, 5.0, 1.0]})
    assert [rows[1][name] for name in ("step, s", "times as long", "from", "to")] == [1.0, 0.5, 0.5, 0.5]


def test_without_its_own_times_or_the_baselines_a_way_has_no_numbers():
    rows = xla_ways.way_rows({"a": [1.0], "b": []})
    assert rows[1] == {"XLA_FLAGS": "b", "step, s": None, "times as long": None, "from": None, "to": None}
    assert xla_ways.way_rows({"a": [], "b": [1.0]})[1]["times as long"] is None


@pytest.mark.parametrize(
    ("backend", "is_wide", "expected"),
    [
        ("tensorflow", False, [DEFAULT]),
        ("tensorflow", True, [DEFAULT, WIDE_VECTORS]),
        ("jax", False, [DEFAULT, NO_YNNPACK]),
        ("jax", True, [DEFAULT, WIDE_VECTORS, NO_YNNPACK]),
    ],
)
def test_a_cpu_is_worth_some_ways(monkeypatch, backend, is_wide, expected):
    monkeypatch.setattr(xla_ways, "has_wide_vectors", lambda: is_wide)
    assert xla_ways.ways_to_try(backend) == expected


def test_what_is_the_default_already_is_no_way():
    assert xla_ways.ways_of("jax") == list(WAYS)
    assert xla_ways.ways_of("tensorflow") == [name for name in WAYS if name != NO_YNNPACK]
