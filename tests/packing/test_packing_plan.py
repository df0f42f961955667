"""Figures of plans, and the rules that a plan may break."""

import json

import numpy as np
import pytest

from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.plan import PackingPlan, from_json, make_plan, validate_plan

HISTOGRAM = np.array([0, 2, 2, 1, 2, 0, 0, 0])


def test_figures_of_a_plan_by_hand():
    plan = PackingPlan("any", 8, 3, {(3, 5): 2, (2, 2, 4): 1})
    assert (plan.num_packs, plan.num_sequences, plan.depth) == (3, 7, 3)
    assert (plan.num_tokens, plan.num_real_tokens, plan.num_padding) == (24, 24, 0)
    assert (plan.efficiency, plan.packing_factor) == (1.0, 7 / 3)
    assert plan.histogram().tolist() == HISTOGRAM.tolist()
    validate_plan(plan, HISTOGRAM)


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
    del content["dual_values"], content["certificate"]  # as older manifests have it
    assert from_json(content).certificate.lower_bound == 8


def test_values_that_prove_nothing_more_are_not_kept():
    plan = pack_cghp(HISTOGRAM, 8, 3)
    assert (plan.certificate.lower_bound, plan.certificate.tight, plan.dual_values) == (3, "material", ())
    priced = pack_cghp([3, 4, 3, 5, 2, 2, 2, 0, 5, 0, 4], 11, 3, integer_programs=False)
    assert (priced.certificate.lower_bound, priced.certificate.gap, priced.dual_values) == (15, 1 / 15, ())


@pytest.mark.parametrize(
    "strategies, message",
    [
        ({(3, 5): 2, (2, 2): 1}, "length 4 placed -1 times too often"),
        ({(3, 5): 2, (2, 2, 4): 2}, r"length 2 placed \+2 times too often"),
        ({(4, 5): 1}, r"at most 8 tokens\. Received: \(4, 5\)"),
        ({(1, 1, 1, 1): 1}, r"at most 3 sequences\. Received: \(1, 1, 1, 1\)"),
        ({(3, 5): 0}, r"count from 1\. Received: \(3, 5\): 0"),
        ({(3, 5): 1.5}, r"count from 1\. Received: \(3, 5\): 1.5"),
        ({(3, 5): True}, r"count from 1\. Received: \(3, 5\): True"),
        # An index of -1 or less is that of a long length, and a fraction would be cut off.
        ({(0,): 1}, r"in 1..max_seq_length=8\. Received: 0 in \(0,\)"),
        ({(-1,): 1}, r"in 1..max_seq_length=8\. Received: -1 in \(-1,\)"),
        ({(4, -3, 3): 1}, r"in 1..max_seq_length=8\. Received: -3 in \(4, -3, 3\)"),
        ({(2.5, 5): 1}, r"in 1..max_seq_length=8\. Received: 2.5 in \(2.5, 5\)"),
    ],
)
def test_a_broken_plan_is_told(strategies, message):
    with pytest.raises(ValueError, match=message):
        validate_plan(PackingPlan("any", 8, 3, strategies), HISTOGRAM)


@pytest.mark.parametrize(
    "strategies, message",
    [
        ([[[5, 3], 1]], r"the lengths of a strategy must ascend\. Received: \(5, 3\)"),
        ([[[3, 5], 1], [[3, 5], 1]], r"must list each strategy once\. Received twice: \(3, 5\)"),
    ],
)
def test_json_that_would_lose_packs_is_refused(strategies, message):
    content = PackingPlan("any", 8, 3, {}).to_json() | {"strategies": strategies}
    with pytest.raises(ValueError, match=message):
        from_json(content)
