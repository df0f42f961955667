"""Column generation reaches and proves known figures, on any clock; HiGHS is silent and fails aloud."""

import subprocess
import sys
import time
from collections import Counter

import highspy
import numpy as np
import pytest
from highspy import HighsModelStatus as Status

from bert_packed.packing import column_generation, integer_programs, relaxation, slots
from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.packing.plan import from_json, validate_plan
from bert_packed.packing.relaxation import Effort

TINY = [0, 16, 5, 7, 15, 0, 0, 0, 0, 0]  # of which rounding misses the optimum by a pack


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


def test_plans_do_not_depend_on_a_clock(monkeypatch):
    """A machine whose clock runs a year in a moment makes the same plans."""
    histogram = np.random.default_rng(3).integers(0, 9, 64)

    def plans():
        limited = pack_cghp(histogram, 64, 6, effort=1e-3)
        return pack_cghp(TINY, 10, 5), pack_cghp(histogram, 64, 6), limited

    before = plans()
    start = time.monotonic()
    for clock in ("monotonic", "perf_counter", "time", "process_time"):
        real = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda real=real: start + 1e9 * (real() - start))
    assert plans() == before


def test_solvers_get_no_time_limit_one_thread_and_one_seed(monkeypatch):
    made = []
    real = highspy.Highs

    def recorded():
        made.append(real())
        return made[-1]

    monkeypatch.setattr(highspy, "Highs", recorded)
    pack_cghp(TINY, 10, 5)
    monkeypatch.setattr(integer_programs, "MAX_ROUNDS", 0)
    pack_cghp(TINY, 10, 5)
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
    assert pack_cghp(histogram, 64, 3, effort=1e-9, gap=1).notes == ()


def test_the_integer_program_saves_a_pack_or_says_it_gave_up(monkeypatch):
    monkeypatch.setattr(integer_programs, "MAX_ROUNDS", 0)
    plan = pack_cghp(TINY, 10, 5)
    assert (plan.num_packs, plan.certificate.lower_bound, plan.notes) == (15, 15, ())
    assert pack_cghp(TINY, 10, 5, integer_programs=False).num_packs == 16
    monkeypatch.setattr(column_generation, "fewest_packs", lambda *arguments: (None, False))
    plan = pack_cghp(TINY, 10, 5)
    assert plan.num_packs == 16
    assert plan.notes == ("The integer program was stopped before it had proven its optimum.",)


def test_a_mix_that_is_whole_by_tolerance_alone_is_dropped(monkeypatch):
    monkeypatch.setattr(integer_programs, "_solve", lambda *_: ([1], Status.kOptimal))
    assert integer_programs._mix([(0,)], Counter([0]), 1) == (Counter({(0,): 1}), True)
    assert integer_programs._mix([(0, 0)], Counter([0]), 1) == (None, False)


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


def test_rounding_of_huge_counts_leaves_no_pack_over():
    histogram = np.zeros(12, int)
    histogram[[1, 3, 6]] = 10**14 + 4, 2 * 10**14 + 4, 10**14 + 6
    plan = pack_cghp(histogram, 12, 4)
    validate_plan(plan, histogram)
    assert plan.num_packs == 150_000_000_000_007  # one more where all are kept


def test_the_bound_of_the_search_is_the_one_that_a_reader_proves():
    rng = np.random.default_rng(8)
    proven = 0
    for _ in range(12):
        histogram = np.where(rng.random(40) < 0.4, rng.integers(0, 60, 40), 0)
        plan = pack_cghp(histogram, 40, 3, integer_programs=False)
        assert from_json(plan.to_json()).certificate == plan.certificate
        proven += plan.certificate.tight == "LP"
    assert proven > 2


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


PLAN = "from bert_packed.packing.column_generation import pack_cghp; pack_cghp([0, 16, 5, 7, 15, 0], 6, 3)"
BESIDE_ANOTHER = """
import highspy
import numpy as np
from bert_packed.packing.column_generation import pack_cghp

def run_another(threads):
    model = highspy.Highs()
    model.setOptionValue("threads", threads)
    model.addVar(0.0, 1.0)
    return model.run()

histogram = np.random.default_rng(3).integers(0, 900, 64)
cases = [(histogram, 64, 3), (histogram % 7, 64, 5), ([0, 16, 5, 7, 15, 0, 0, 0, 0, 0], 10, 5)]
plans = [pack_cghp(*case) for case in cases]
for threads in (0, 2):  # 0 = as many as HiGHS likes
    assert run_another(threads) == highspy.HighsStatus.kOk
    again = [pack_cghp(*case) for case in cases]
    assert again == plans and not any(plan.notes for plan in again), again
"""


@pytest.mark.parametrize(("before", "printed"), [("", "a\nb\n"), ("import os; os.close(1); ", "")])
def test_planning_prints_nothing(before, printed):
    code = f"print('a', flush=True); {before}{PLAN}; print('b', flush=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == printed or (before and done.stdout == "a\n")
    assert "HiGHS" not in done.stderr


def test_plans_do_not_depend_on_other_models_of_the_process():
    """HiGHS refuses a number of threads other than that of the first model that was run."""
    done = subprocess.run([sys.executable, "-c", BESIDE_ANOTHER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unexpected_status_of_the_solver_is_an_error(monkeypatch):
    for least, expected in ((2.0, Status.kInfeasible), (1.0, Status.kOptimal)):
        model = integer_programs.make_model()
        model.addVar(0.0, 1.0)
        model.addRow(least, highspy.kHighsInf, 1, [0], [1.0])
        assert integer_programs.solve(model, Status.kOptimal, Status.kInfeasible) == expected
        with pytest.raises(RuntimeError, match=f"must solve a packing program.*{expected.name}"):
            integer_programs.solve(model, Status.kIterationLimit)
    monkeypatch.setattr(model, "run", lambda: highspy.HighsStatus.kError)
    with pytest.raises(RuntimeError, match=r"must solve a packing program.*kError"):
        integer_programs.solve(model, Status.kNotset)
    with pytest.raises(ValueError, match=r"HiGHS must know its options\. Received: mip_nodes=7"):
        integer_programs.make_model(mip_nodes=7)
