"""Column generation reaches the known figures, proves them, and stops at its limits."""

import itertools
import random
import time

import highspy
import numpy as np
import pytest

from bert_packed.packing import bounds, column_generation, integer_programs, relaxation, slots
from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import fold, load_known_histogram
from bert_packed.packing.integer_programs import fewest_packs
from bert_packed.packing.plan import from_json, validate_plan
from bert_packed.packing.relaxation import Effort


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
    search = relaxation.Relaxation(histogram, 5, Effort())
    before = len(search.master.packs)
    search.add_coarse_packs()
    added = search.master.packs[before:]
    assert len(added) > 5
    assert all(search.lengths[list(pack)].sum() <= 64 and len(pack) <= 5 for pack in added)
    plan = pack_cghp(histogram, 64, 5)
    validate_plan(plan, histogram)
    assert plan.certificate.gap < 1e-3
    assert plan.certificate.lower_bound == plain.certificate.lower_bound


def test_coarse_classes_round_lengths_up(monkeypatch):
    """5 and 11 are 3 and 6 in twos, slots of 6 and 12 that hold them; slots of 4 and 10 would not."""
    monkeypatch.setattr(relaxation, "COARSE_CLASSES", 8)
    search = relaxation.Relaxation(np.bincount([5] * 3 + [11] * 2, minlength=17)[1:], 4, Effort())
    offered = []
    monkeypatch.setattr(search.master, "add", offered.extend)
    search.add_coarse_packs()
    assert {row for pack in offered for row in pack} == {0, 1}


def test_rounding_ends_at_the_bound_without_integer_programs():
    """Rounded to the nearest instead of down, each of these ends a pack above."""
    cases = [
        (3, [10, 11, 0, 0, 2, 4, 0, 0, 0, 7, 0, 0, 7, 0, 0, 1, 0, 0, 0]),
        (3, [9, 7, 9, 10, 0, 0, 2, 1, 10]),
        (3, [0, 9, 0, 9, 11, 0, 0, 3, 1, 0, 9, 0, 8, 0, 3, 0, 0, 11, 0, 0, 0, 0, 0]),
        (3, [7, 0, 8, 4, 5, 10, 5, 11, 8, 9, 0, 5, 0, 0, 0, 0, 0]),
        (3, [0, 4, 0, 0, 9, 0, 9, 10, 9, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0]),
    ]
    plans = [pack_cghp(counts, len(counts), depth, integer_programs=False) for depth, counts in cases]
    # Another solver may stop at another of equal optima: most of them, not all
    assert sum(plan.num_packs == plan.certificate.lower_bound for plan in plans) >= 3


@pytest.mark.parametrize("factor", [0, 1e9])
def test_no_clock_decides(monkeypatch, factor):
    """A machine whose clock does not move, or runs a year in a moment, makes the same plans."""
    tiny = [0, 16, 5, 7, 15, 0, 0, 0, 0, 0]
    histogram = np.random.default_rng(3).integers(0, 9, 64)
    plans = [pack_cghp(tiny, 10, 5), pack_cghp(histogram, 64, 6), pack_cghp(histogram, 64, 6, effort=1e-3)]
    start = time.monotonic()
    for clock in ("monotonic", "perf_counter", "time", "process_time"):
        real = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda real=real: start + factor * (real() - start))
    assert plans == [
        pack_cghp(tiny, 10, 5),
        pack_cghp(histogram, 64, 6),
        pack_cghp(histogram, 64, 6, effort=1e-3),
    ]


def test_solvers_get_no_time_limit_one_thread_and_one_seed(monkeypatch):
    made = []
    real = highspy.Highs

    def recorded():
        made.append(real())
        return made[-1]

    monkeypatch.setattr(highspy, "Highs", recorded)
    pack_cghp([0, 16, 5, 7, 15, 0, 0, 0, 0, 0], 10, 5)
    monkeypatch.setattr(integer_programs, "MAX_ROUNDS", 0)
    pack_cghp([0, 16, 5, 7, 15, 0, 0, 0, 0, 0], 10, 5)
    fewest = [model.getOptionValue("mip_max_nodes")[1] for model in made]
    assert len(made) > 2 and {integer_programs.MAX_NODES, integer_programs.MAX_ROUND_NODES} <= set(fewest)
    for model in made:
        options = {name: model.getOptionValue(name)[1] for name in ("time_limit", "threads", "random_seed")}
        assert options == {"time_limit": highspy.kHighsInf, "threads": 1, "random_seed": 0}


def test_a_spent_effort_leaves_a_whole_plan_and_says_so():
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    plan = pack_cghp(histogram, 64, 3, effort=1e-9, integer_programs=False)
    validate_plan(plan, histogram)
    assert plan.num_packs <= pack_lpfhp(histogram, 64, 3).num_packs
    assert plan.certificate.lower_bound > 0
    assert plan.notes == ("Stopped by the limit of effort, 1e-09, before the gap was met.",)


def test_no_note_where_the_gap_is_met_in_spite_of_the_limit():
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    plan = pack_cghp(histogram, 64, 3, gap=1.0, effort=1e-9)
    assert plan.certificate.gap <= 1.0
    assert plan.notes == ()


def test_every_effort_ends_in_a_whole_plan_and_more_is_no_worse():
    """The limit falls into each part of the search in turn: pricing, solving, rounding."""
    histogram = fold(load_known_histogram("wikipedia_512"), 256)
    num_packs = []
    for effort in (1e-4, 1e-2, 2e-2, 3e-2, 4e-2, 60):
        plan = pack_cghp(histogram, 256, 3, effort=effort)
        validate_plan(plan, histogram)
        num_packs.append(plan.num_packs)
        assert plan.notes == () if plan.certificate.gap < 1e-6 else f"effort, {effort:g}" in plan.notes[0]
    assert num_packs == sorted(num_packs, reverse=True)
    assert len(set(num_packs)) > 2 and plan.notes == ()


def test_a_solve_ends_within_the_effort():
    """A limit that falls into the first solve: the solver itself is stopped by a limit of iterations."""
    histogram = load_known_histogram("wikipedia_512", 512)
    counter = Effort()
    search = relaxation.Relaxation(histogram, 3, counter)
    counter.limit = counter.steps + 100 * relaxation.STEPS_PER_ITERATION * len(search.lengths)
    assert search.run(0.0) is False
    past = counter.steps - counter.limit
    assert 0 <= past <= 2 * relaxation.STEPS_PER_ITERATION * len(search.lengths)


def test_a_dive_whose_steps_do_not_suffice_for_a_solve_has_not_ended():
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    search = relaxation.Relaxation(histogram, 3, Effort())
    assert search.run(0.0) is True
    rows = len(search.lengths)
    # The two plans of a turn, and half of a solve's first iteration
    search.effort.limit = search.effort.steps + 2 * relaxation.STEPS_OF_REST * rows
    search.effort.limit += relaxation.STEPS_PER_ITERATION * rows // 2
    _, ended = column_generation.dive(search, 0)
    assert (ended, search.effort.left) == (False, relaxation.STEPS_PER_ITERATION * rows // 2)


def test_the_integer_program_saves_a_pack_and_says_when_it_gives_up(monkeypatch):
    histogram = [0, 16, 5, 7, 15, 0, 0, 0, 0, 0]
    monkeypatch.setattr(integer_programs, "MAX_ROUNDS", 0)
    plan = pack_cghp(histogram, 10, 5)
    assert (plan.num_packs, plan.certificate.lower_bound, plan.notes) == (15, 15, ())
    assert pack_cghp(histogram, 10, 5, integer_programs=False).num_packs == 16
    monkeypatch.setattr(column_generation, "fewest_packs", lambda *arguments: (None, False))
    plan = pack_cghp(histogram, 10, 5)
    assert plan.num_packs == 16
    assert plan.notes == ("The integer program was stopped before it had proven its optimum.",)


def test_the_program_over_all_strategies_says_whether_its_nodes_ran_out():
    for size, expected in ((14, (False, True)), (100, (True, True))):  # of 100 the strategies are too many
        histogram = np.random.default_rng(0).integers(0, 30, size)
        search = relaxation.Relaxation(histogram, 5, Effort())
        solved = [fewest_packs(search.demand, search.row_of_slot, 5, nodes) for nodes in (0, 1000)]
        assert tuple(ended for _, ended in solved) == expected
        assert [packs is None for packs, _ in solved] == [True, size == 100]


def cut_packs(rng, size, depth, num_packs):
    """A histogram that full packs were cut into: their number is the optimum."""
    histogram = np.zeros(size, int)
    for _ in range(num_packs):
        cuts = np.sort(rng.choice(np.arange(1, size), rng.integers(0, depth), replace=False))
        np.add.at(histogram, np.diff([0, *cuts, size]) - 1, 1)
    return histogram


def test_sets_cut_from_full_packs_end_at_the_optimum():
    cases = [(32, 4, 60), (48, 4, 100), (64, 4, 40), (64, 3, 200), (128, 4, 100), (160, 4, 50)]
    histograms = [(cut_packs(np.random.default_rng(size), size, *rest), *rest) for size, *rest in cases]
    for histogram, depth, num_packs in histograms:
        plan = pack_cghp(histogram, len(histogram), depth)
        validate_plan(plan, histogram)
        assert (plan.num_packs, plan.efficiency) == (num_packs, 1.0)
    missed = [
        pack_cghp(histogram, len(histogram), depth, integer_programs=False).num_packs > num_packs
        for histogram, depth, num_packs in histograms
    ]
    assert sum(missed) >= 3  # without the programs they end above


def test_packs_to_choose_from_are_all_that_fit():
    lengths, demand = [1, 2, 3, 5], {0: 2, 1: 1, 2: 2, 3: 1}
    listed = integer_programs.list_packs(demand, lengths, 8, 3, 1, 1000, random.Random(0))
    wanted = [
        pack
        for num in (1, 2, 3)
        for pack in itertools.combinations_with_replacement(range(4), num)
        if 7 <= sum(lengths[row] for row in pack) <= 8 and all(pack.count(row) <= demand[row] for row in pack)
    ]
    assert listed == sorted(wanted) and len(listed) > 3


def test_packs_that_rounding_of_huge_counts_leaves_over_are_dropped():
    histogram = np.zeros(12, int)
    histogram[[1, 3, 6]] = 10**14 + 4, 2 * 10**14 + 4, 10**14 + 6
    plan = pack_cghp(histogram, 12, 4)
    validate_plan(plan, histogram)
    assert plan.num_packs == 150_000_000_000_007  # one more where all are kept


def test_pricing_stops_at_the_limit(monkeypatch):
    histogram = np.random.default_rng(3).integers(0, 900, 64)
    search = relaxation.Relaxation(histogram, 3, Effort())
    priced = []
    price = search._price

    def price_until_late(values):
        priced.append(values)
        search.effort.limit = 0
        return price(values)

    monkeypatch.setattr(search, "_price", price_until_late)
    monkeypatch.setattr(search, "_select", lambda *arguments: [])  # nothing new: smooth less, price again
    assert search.run(0.0) is False
    assert len(priced) == 1


def test_no_more_is_computed_than_a_cheap_bound_leaves_open(monkeypatch):
    """Three sequences in packs of 16,384: two bounds that cost nothing say one pack, and no table is made."""
    for module in (bounds, relaxation):
        monkeypatch.setattr(module, "best_packs", lambda *arguments: pytest.fail("priced"))
    histogram = np.zeros(16_384, int)
    histogram[[0, 1, 2]] = 1
    plan = pack_cghp(histogram, 16_384, "max")
    assert (plan.num_packs, plan.certificate.tight, plan.dual_values) == (1, "material", ())


def test_the_bound_of_the_search_is_the_one_that_a_reader_proves():
    rng = np.random.default_rng(8)
    proven = 0
    for _ in range(12):
        histogram = np.where(rng.random(40) < 0.4, rng.integers(0, 60, 40), 0)
        plan = pack_cghp(histogram, 40, 3, integer_programs=False)
        assert from_json(plan.to_json()).certificate == plan.certificate
        proven += plan.certificate.tight == "LP"
    assert proven > 2


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"gap": -0.1}, "`gap` must be at least 0. Received: -0.1"),
        ({"gap": float("nan")}, "`gap` must be at least 0. Received: nan"),
        ({"effort": 0}, "`effort` must be above 0. Received: 0"),
    ],
)
def test_wrong_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        pack_cghp([1, 2, 3], 3, 2, **setting)


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


def test_packs_anew_may_leave_what_is_free_beyond_a_pack():
    """5 | 4 2 | 3 leave 10 tokens of 8 free: two packs hold all, and not both are full."""
    packs = [((3,), 1), ((0, 2), 1), ((1,), 1)]
    better = integer_programs.repack(packs, [2, 3, 4, 5], 8, 3, 2)
    assert len(better) == 2 and all(count == 1 for _, count in better)
    assert sorted(row for pack, _ in better for row in pack) == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", ["MAX_ROUNDS", "MAX_WORK", "MOST_SEQUENCES"])
def test_repacking_gives_up_at_its_limits(monkeypatch, limit):
    packs = [((0, 2), 1), ((1,), 1), ((3,), 1)]
    monkeypatch.setattr(integer_programs, limit, 0)
    assert integer_programs.repack(packs, [2, 3, 4, 5], 8, 3, 2) == packs


def test_of_many_packs_each_row_gets_its_share():
    lengths, demand = list(range(1, 30)), {row: 9 for row in range(29)}
    listed = integer_programs.list_packs(demand, lengths, 40, 4, 10, 58, random.Random(0))
    assert 29 <= len(listed) <= 58 and {row for pack in listed for row in pack} == {*demand}


def test_lengths_beyond_the_coarse_classes_add_nothing(monkeypatch):
    monkeypatch.setattr(relaxation, "COARSE_CLASSES", 8)
    search = relaxation.Relaxation(np.bincount([17] * 3, minlength=18)[1:], 4, Effort())
    search.add_coarse_packs()
    assert search.master.packs == [(0,)]
