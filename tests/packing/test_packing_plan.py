"""Figures of plans and histograms, both written and read again; strategies are all that there are."""

import itertools
import json

import numpy as np
import pytest

from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.histogram import (
    check_limits,
    count_lengths,
    known_histogram_names,
    load_histogram,
    load_known_histogram,
    to_json,
)
from bert_packed.packing.plan import (
    PackingPlan,
    count_strategies,
    from_json,
    list_strategies,
    make_plan,
    validate_plan,
)

HISTOGRAM = np.array([0, 2, 2, 1, 2, 0, 0, 0])


def test_figures_of_a_plan_by_hand():
    plan = PackingPlan("any", 8, 3, {(3, 5): 2, (2, 2, 4): 1})
    assert (plan.num_packs, plan.num_sequences, plan.depth) == (3, 7, 3)
    assert (plan.num_tokens, plan.num_real_tokens, plan.num_padding) == (24, 24, 0)
    assert (plan.efficiency, plan.packing_factor) == (1.0, 7 / 3)
    assert plan.histogram().tolist() == HISTOGRAM.tolist()
    validate_plan(plan, HISTOGRAM)
    # A plan of Wikipedia has thousands of strategies, which none wants on the screen
    assert repr(plan) == "PackingPlan(any: 7 sequences in 3 packs of 8 tokens, 100.00% full)"


def test_an_empty_plan_wastes_nothing():
    plan = make_plan("any", 8, "max", [((), 3), ((5,), 0)])
    assert plan.strategies == {}
    assert (plan.efficiency, plan.packing_factor, plan.depth) == (1.0, 1.0, 0)
    assert (plan.certificate.lower_bound, plan.certificate.gap) == (0, 0.0)


def test_equal_packs_are_added_up_in_any_order():
    plan = make_plan("any", 8, 3, [((5, 3), 1), ((4, 2, 2), 1), ((3, 5), 1)])
    assert plan.strategies == {(2, 2, 4): 1, (3, 5): 2}
    assert list(plan.strategies) == [(2, 2, 4), (3, 5)]


def test_json_round_trip_keeps_the_proof():
    plan = pack_cghp([3, 0, 4, 3, 0, 3, 2, 0], 8, 3)
    content = json.loads(json.dumps(plan.to_json()))
    assert from_json(content) == plan
    assert from_json(content).certificate == plan.certificate
    assert (plan.certificate.lower_bound, plan.certificate.tight) == (9, "LP")
    assert (content["certificate"]["lower_bound"], content["certificate"]["bounds"]["L2"]) == (9, 8)
    assert len(plan.dual_values) == 8
    content["certificate"]["lower_bound"] = 99  # which is proven again when it is read
    assert from_json(content).certificate == plan.certificate
    del content["dual_values"], content["certificate"]  # as older manifests have it
    assert from_json(content).certificate.lower_bound == 8


def test_values_that_prove_nothing_more_are_not_kept():
    plan = pack_cghp(HISTOGRAM, 8, 3)
    assert (plan.certificate.lower_bound, plan.certificate.tight, plan.dual_values) == (3, "material", ())
    priced = pack_cghp([3, 4, 3, 5, 2, 2, 2, 0, 5, 0, 4], 11, 3, integer_programs=False)
    assert (priced.certificate.lower_bound, priced.certificate.gap, priced.dual_values) == (15, 1 / 15, ())


@pytest.mark.parametrize(("size", "depth"), [(1, 1), (1, 3), (7, 1), (8, 3), (9, 4), (10, 10), (6, 50)])
def test_strategies_are_those_of_trying(size, depth):
    """Every ascending tuple of at most `depth` slots that adds up to `size`, in order, 0 to the right."""
    slots = min(depth, size)
    packs = itertools.combinations_with_replacement(range(size + 1), slots)
    found = sorted([slot for slot in pack if slot] for pack in packs if sum(pack) == size)
    wanted = [[*pack, *[0] * (slots - len(pack))] for pack in found]
    assert list_strategies(size, depth).tolist() == wanted
    assert count_strategies(size, depth) == len(wanted)


def test_strategies_are_counted_without_being_listed():
    assert [count_strategies(512, depth) for depth in (1, 2, 3)] == [1, 257, 22_102]  # as the paper says
    exact = count_strategies(60, 60)
    assert exact == 966_467  # partitions of 60
    assert 1000 < count_strategies(60, 60, limit=1000) < exact == count_strategies(60, 60, limit=exact)
    assert count_strategies(8, 3, limit=5) == 10  # at depth 2 there are 5, no more than the limit
    assert 10**6 < count_strategies(8192, 8192, limit=10**6) < 10**8


def test_lengths_are_counted():
    histogram = count_lengths([3, 1, 3, 4], 5)
    assert histogram.tolist() == [1, 0, 2, 1, 0] and histogram.dtype == np.int64
    assert count_lengths([], 2).tolist() == [0, 0]
    # No pack is deeper than it is long
    assert [check_limits(5, depth) for depth in (1, 4, 5, 9, "max")] == [1, 4, 5, 5, 5]


def test_json_round_trip_and_truncation(tmp_path):
    path = tmp_path / "histogram.json"
    path.write_text(json.dumps(to_json(np.array([1, 0, 2, 1, 7]))))
    assert json.loads(path.read_text()) == {"lengths": [1, 3, 4, 5], "counts": [1, 2, 1, 7]}
    assert load_histogram(path, 5).tolist() == [1, 0, 2, 1, 7]
    assert load_histogram(path, 3).tolist() == [1, 0, 10] and load_histogram(path, 1).tolist() == [11]
    assert load_histogram(path, 7).tolist() == [1, 0, 2, 1, 7, 0, 0]


def test_whole_floats_are_lengths_and_counts(tmp_path):
    path = tmp_path / "histogram.json"
    path.write_text('{"lengths": [3.0, 0, 1], "counts": [2.0, 0, 5]}')
    assert load_histogram(path).tolist() == [5, 0, 2]
    path.write_text('{"lengths": [1048576], "counts": [3]}')
    assert load_histogram(path, 2).tolist() == [0, 3]


@pytest.mark.parametrize(
    "name, max_seq_length, num_sequences, num_tokens",
    [
        ("wikipedia_512", 512, 16_279_552, 4_164_796_173),
        ("squad_1.1_384", 384, 88_641, 15_249_479),
        ("glue_cola", 128, 8_551, 96_859),
        ("articles_2048", 2048, 7_750, None),
    ],
)
def test_known_histograms_have_the_papers_totals(name, max_seq_length, num_sequences, num_tokens):
    histogram = load_known_histogram(name, max_seq_length)
    assert histogram.sum() == num_sequences
    assert num_tokens in (None, histogram @ np.arange(1, max_seq_length + 1))
    assert name in known_histogram_names()
