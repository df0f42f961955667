"""Least-squares packing is that of the published code, and whole even when the solver stops early."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from bert_packed.packing import nnlshp
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.packing.nnlshp import mix_nnlshp, pack_ennlshp, pack_nnlshp, solve_nnls
from bert_packed.packing.plan import count_strategies, validate_plan


def test_wikipedia_has_the_published_packs_and_strategies(monkeypatch):
    histogram = load_known_histogram("wikipedia_512", 512)
    mix, notes = mix_nnlshp(histogram, 512, 3)
    monkeypatch.setattr(nnlshp, "mix_nnlshp", lambda *_: (mix, notes))  # seconds, and not twice
    plan = pack_nnlshp(histogram, 512, 3)
    validate_plan(plan, histogram)
    assert (plan.num_packs, len(mix), plan.notes) == (8_155_059, 635, ())
    assert round(100 * plan.efficiency, 6) == 99.746274  # as printed in Section F.5


def test_extended_least_squares_wastes_less():
    # "only a little bit better" (Section G.1): SQuAD 97.37 % by NNLSHP.
    histogram = load_known_histogram("squad_1.1_384", 384)
    plan = pack_ennlshp(histogram, 384, 3)
    validate_plan(plan, histogram)
    assert plan.num_packs < pack_nnlshp(histogram, 384, 3).num_packs
    assert 100 * plan.efficiency == pytest.approx(98.61, abs=0.02)


# All packs of 6 tokens and at most two slots, and how often each holds a slot of 1 to 6
SMALL = [(1, 5), (2, 4), (3, 3), (6,)]
SMALL_MATRIX = np.array([[strategy.count(length) for strategy in SMALL] for length in range(1, 7)])
SMALL_COUNTS = np.array([2, 3, 0, 3, 2, 0])


@pytest.fixture
def solved(monkeypatch):
    """The problem given to the solver, and an answer that covers all once it is rounded to 2, 3, 0 and 0."""
    asked = []

    def solve(matrix, target, max_iterations):
        asked.append((matrix.toarray(), target, max_iterations))
        return np.array([2.4, 2.6, 0.3, 0.4, *np.zeros(matrix.shape[1] - 4)]), True

    monkeypatch.setattr(nnlshp, "solve_nnls", solve)
    return asked


def test_the_equations_of_least_squares(solved):
    """Extended, weights are lengths, and below them 3e4 of what no length may lack."""
    mix, notes = mix_nnlshp(SMALL_COUNTS, 6, 2, offset=3, weight=0.25)
    assert (mix, notes) == ([((1, 5), 2), ((2, 4), 3)], [])
    assert pack_ennlshp(SMALL_COUNTS, 6, 2).strategies == dict(mix)
    (matrix, target, limit), extended = solved
    weights = np.array([0.25, 0.25, 0.25, 1, 1, 1])
    np.testing.assert_array_equal(matrix, weights[:, None] * SMALL_MATRIX)
    np.testing.assert_array_equal(target, weights * SMALL_COUNTS)
    assert limit == 3 * len(SMALL)
    matrix, target, _ = extended
    lengths = np.arange(1, 7)
    expected = np.block(
        [[lengths[:, None] * SMALL_MATRIX, np.zeros((6, 6))], [3e4 * SMALL_MATRIX, -3e4 * np.eye(6)]]
    )
    np.testing.assert_array_equal(matrix, expected)
    np.testing.assert_array_equal(target, np.concatenate([lengths * SMALL_COUNTS, 3e4 * SMALL_COUNTS]))


def test_what_is_left_over_gets_packs_with_room_for_a_complement():
    listed = np.array([[1, 5], [2, 4]])
    packs = nnlshp.round_and_repair(listed, np.array([1.0, 2.0]), np.array([1, 4, 2, 2, 3, 1]))
    assert packs == [((1, 5), 1 + 2), ((2, 4), 2 + 2), ((3, 3), 2), ((6,), 1)]
    alone = nnlshp.round_and_repair(np.array([[6]]), np.array([1.0]), np.array([0, 2, 0, 0, 0, 1]))
    assert alone == [((2,), 2), ((6,), 1)]


@given(seed=st.integers(0, 10**6), shape=st.tuples(st.integers(1, 8), st.integers(1, 20)))
@settings(max_examples=100, deadline=None)
def test_least_squares_is_as_near_as_the_dense_method(seed, shape):
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 3, shape) * (rng.random(shape) < 0.5)
    target = rng.integers(0, 50, shape[0]).astype(float)
    found, has_converged = solve_nnls(sparse.csc_array(matrix.astype(float)), target, 1000)
    _, distance = optimize.nnls(matrix.astype(float), target)
    assert has_converged and (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(distance, abs=1e-7)


@pytest.mark.parametrize("pack", [pack_nnlshp, pack_ennlshp])
@pytest.mark.parametrize("num_iterations", [0, 1, 5])
def test_a_solver_that_stops_early_is_repaired_and_noted(monkeypatch, pack, num_iterations):
    histogram = np.random.default_rng(2).integers(0, 90, 32)
    monkeypatch.setattr(
        nnlshp, "solve_nnls", lambda matrix, target, _: solve_nnls(matrix, target, num_iterations)
    )
    plan = pack(histogram, 32, 3)
    validate_plan(plan, histogram)
    limit = 3 * count_strategies(32, 3)
    assert plan.notes == (
        f"Least squares stopped after {limit} iterations; its best mix so far was repaired.",
    )
