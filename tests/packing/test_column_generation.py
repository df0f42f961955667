"""Does column generation reach the figures asked, prove them, and stop when told?"""

import math
import time
import types

import numpy as np
import pytest

from data_gen.packing import column_generation, diving, relaxation, slots
from data_gen.packing.column_generation import pack_cghp
from data_gen.packing.histogram import load_known_histogram
from data_gen.packing.lpfhp import pack_lpfhp
from data_gen.packing.plan import validate_plan
from data_gen.packing.strategies import count_strategies, list_strategies


@pytest.mark.parametrize(
    "depth, most_packs, proven",
    [(2, 10_099_081, 10_099_081), (3, 8_143_837, 8_143_829), (4, 8_135_735, 8_135_727)],
)
def test_wikipedia_is_packed_and_proven_within_a_millionth(depth, most_packs, proven):
    histogram = load_known_histogram("wikipedia_512", 512)
    plan = pack_cghp(histogram, 512, depth)
    validate_plan(plan, histogram)
    assert plan.num_packs <= most_packs
    assert plan.certificate.lower_bound == proven
    assert plan.certificate.gap < 1e-6
    assert plan.notes == ()


def test_coarse_classes_give_real_packs(monkeypatch):
    histogram = np.random.default_rng(4).integers(0, 900, 64)
    plain = pack_cghp(histogram, 64, 5)
    monkeypatch.setattr(column_generation, "MANY_LENGTHS", 8)
    monkeypatch.setattr(relaxation, "COARSE_CLASSES", 12)
    search = relaxation.Relaxation(histogram, 5, math.inf)
    before = len(search.master.packs)
    search.add_coarse_packs(math.inf)
    added = search.master.packs[before:]
    assert len(added) > 5
    assert all(search.lengths[list(pack)].sum() <= 64 and len(pack) <= 5 for pack in added)
    plan = pack_cghp(histogram, 64, 5)
    validate_plan(plan, histogram)
    assert plan.certificate.gap < 1e-3
    assert plan.certificate.lower_bound == plain.certificate.lower_bound


def test_same_input_same_plan():
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    assert pack_cghp(histogram, 64, 3) == pack_cghp(histogram, 64, 3)


def test_a_spent_time_limit_leaves_a_whole_plan_and_says_so():
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    plan = pack_cghp(histogram, 64, 3, time_limit=1e-9)
    validate_plan(plan, histogram)
    assert plan.num_packs <= pack_lpfhp(histogram, 64, 3).num_packs
    assert plan.certificate.lower_bound > 0
    assert plan.notes == ("Stopped by the time limit of 1e-09 seconds before the gap was met.",)


def test_no_note_where_the_gap_is_met_in_spite_of_the_limit():
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    plan = pack_cghp(histogram, 64, 3, gap=1.0, time_limit=1e-9)
    assert plan.certificate.gap <= 1.0
    assert plan.notes == ()


def test_rounding_that_runs_out_of_time_says_so(monkeypatch):
    histogram = load_known_histogram("wikipedia_512", 512)
    monkeypatch.setattr(diving, "time", types.SimpleNamespace(monotonic=lambda: math.inf))
    plan = pack_cghp(histogram, 512, 3)
    validate_plan(plan, histogram)
    assert plan.certificate.gap > 1e-6
    assert plan.notes == ("Stopped by the time limit of 60 seconds before the gap was met.",)


def test_the_integer_program_saves_a_pack_and_says_when_it_gives_up(monkeypatch):
    histogram = [0, 16, 5, 7, 15, 0, 0, 0, 0, 0]
    plan = pack_cghp(histogram, 10, 5)
    assert (plan.num_packs, plan.certificate.lower_bound, plan.notes) == (15, 15, ())
    monkeypatch.setattr(column_generation, "SECONDS", 0.0)
    plan = pack_cghp(histogram, 10, 5)
    assert plan.num_packs == 16
    assert plan.notes == ("The integer program was stopped after 0 seconds.",)
    monkeypatch.undo()
    plan = pack_cghp(histogram, 10, 5, time_limit=1e-9)
    assert plan.notes == ("Stopped by the time limit of 1e-09 seconds before the gap was met.",)


def test_packs_that_rounding_of_huge_counts_leaves_over_are_dropped():
    histogram = np.zeros(12, int)
    histogram[[1, 3, 6]] = 10**14 + 4, 2 * 10**14 + 4, 10**14 + 6
    plan = pack_cghp(histogram, 12, 4)
    validate_plan(plan, histogram)
    assert plan.num_packs == 150_000_000_000_007  # one more where all are kept


def test_pricing_stops_at_the_deadline(monkeypatch):
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    search = relaxation.Relaxation(histogram, 3, math.inf)
    priced = []
    price = search._price

    def price_until_late(values):
        priced.append(values)
        search.master.deadline = -math.inf
        return price(values)

    monkeypatch.setattr(search, "_price", price_until_late)
    monkeypatch.setattr(search, "_select", lambda *arguments: [])  # nothing new: smooth less, price again
    assert search.run(0.0) is False
    assert len(priced) == 1


def test_the_time_limit_holds_for_long_packs():
    # Few sequences of many lengths: the integer program is tried, and its strategies were all counted.
    histogram = np.zeros(8192, int)
    histogram[np.random.default_rng(0).choice(8192, 300, replace=False)] = 1
    start = time.monotonic()
    plan = pack_cghp(histogram, 8192, "max", time_limit=0.1)
    assert time.monotonic() - start < 2.5  # half a second alone; counting took three
    validate_plan(plan, histogram)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"gap": -0.1}, "`gap` must be at least 0. Received: -0.1"),
        ({"gap": float("nan")}, "`gap` must be at least 0. Received: nan"),
        ({"time_limit": 0}, "`time_limit` must be above 0 seconds. Received: 0"),
    ],
)
def test_wrong_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        pack_cghp([1, 2, 3], 3, 2, **setting)


def test_strategies_are_all_partitions():
    listed = [tuple(part for part in row if part) for row in list_strategies(8, 3).tolist()]
    assert listed == [
        (1, 1, 6),
        (1, 2, 5),
        (1, 3, 4),
        (1, 7),
        (2, 2, 4),
        (2, 3, 3),
        (2, 6),
        (3, 5),
        (4, 4),
        (8,),
    ]
    for depth in (1, 2, 5, 11, 40):
        assert len(list_strategies(11, depth)) == count_strategies(11, depth)
    assert count_strategies(512, 3) == 22_102
    assert 10**6 < count_strategies(8192, 8192, limit=10**6) < 10**8


def test_slots_hold_as_many_as_any_assignment():
    assert slots.uncovered([0, 1, 2], [2, 2, 0]) == [1, 0, 0]
    demand = [1, 0, 1]
    assert slots.place((0, 1), demand) is False and demand == [1, 0, 1]
    assert slots.place((0, 2), demand) is True and demand == [0, 0, 0]
    assert slots.fill_slots([((0, 2), 2)], [3, 1, 0]) == [((0, 0), 1), ((0, 1), 1)]
    with pytest.raises(
        ValueError, match=r"the slots must hold every sequence\. Received: 1 too many in row 0"
    ):
        slots.fill_slots([((0, 2), 1)], [3, 0, 0])
