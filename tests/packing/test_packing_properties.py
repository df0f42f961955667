"""Every algorithm keeps every promise, on random and adversarial histograms."""

import functools
import operator
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert_packed.assembly import feature_packs
from bert_packed.packing.algorithms import ALGORITHM_NAMES, ALGORITHMS
from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.histogram import count_lengths
from bert_packed.packing.plan import from_json, validate_plan

PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23]
IN_ARRIVAL_ORDER = "greedy", "local_greedy"  # they need every single sequence
MOST_TRIED = 7  # sequences of which every packing is tried
DEPTHS = st.one_of(st.integers(1, 12), st.just("max"))


@st.composite
def histograms(draw):
    size = draw(st.integers(1, 24))
    counts = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 3000))
    return draw(st.lists(counts, min_size=size, max_size=size))


@st.composite
def tiny_histograms(draw):
    size = draw(st.integers(1, 10))
    lengths = draw(st.lists(st.integers(1, size), max_size=MOST_TRIED))
    return count_lengths(lengths, size).tolist()


def huge_histograms():
    """Counts at the edge of what floats hold exactly."""
    return st.lists(st.one_of(st.just(0), st.integers(2**53 - 9, 2**53)), min_size=1, max_size=24)


def fewest_by_trying(sequences, capacities, depth):
    """The fewest packs of sequences with several lengths each: every open pack and a new one are tried."""

    @functools.cache
    def fewest(index, packs):
        if index == len(sequences):
            return len(packs)
        options = [fewest(index + 1, tuple(sorted([*packs, (sequences[index], 1)])))]
        for used, count in set(packs):
            total = tuple(map(operator.add, used, sequences[index]))
            if count < depth and all(map(operator.le, total, capacities)):
                others = list(packs)
                others.remove((used, count))
                options.append(fewest(index + 1, tuple(sorted([*others, (total, count + 1)]))))
        return min(options)

    return fewest(0, ())


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
@given(histogram=st.one_of(histograms(), tiny_histograms(), huge_histograms()), depth=DEPTHS)
@example(histogram=[0] * 9, depth=3)  # empty
@example(histogram=[0, 0, 0, 17, 0, 0, 0, 0, 0], depth=3)  # one length
@example(histogram=[0, 0, 0, 0, 9], depth="max")  # all maximal
@example(histogram=[9, 0, 0, 0, 0], depth="max")  # all 1
@example(histogram=[17, 0, 0, 0, 0, 0, 0, 0, 0, 0], depth="max")  # all 1, with a large rest
@example(histogram=[4], depth=2)  # S = 1
@example(histogram=[3, 1, 4, 1, 5, 9, 2, 6], depth=1)
@example(histogram=[31 * (length in PRIMES) for length in range(1, 24)], depth="max")
@settings(max_examples=60, deadline=None)
def test_every_plan_keeps_every_promise(name, histogram, depth):
    """It is whole, survives JSON, and is neither below its bound nor below the fewest packs there can be."""
    counts = np.array(histogram, np.int64)
    if name in IN_ARRIVAL_ORDER and counts.max() > 3000:
        return
    plan = ALGORITHMS[name](counts, len(histogram), depth)
    validate_plan(plan, counts)
    assert plan.algorithm == name and from_json(plan.to_json()) == plan
    assert plan.num_packs >= plan.certificate.lower_bound and plan.certificate.gap >= 0
    if sum(histogram) <= MOST_TRIED and len(histogram) <= 10:
        sequences = [(length,) for length in range(len(histogram), 0, -1) for _ in range(counts[length - 1])]
        fewest = fewest_by_trying(sequences, (len(histogram),), 99 if depth == "max" else depth)
        assert plan.certificate.lower_bound <= fewest <= plan.num_packs
        if name == "cghp":
            assert pack_cghp(counts, len(histogram), depth, gap=0).num_packs == fewest


def test_bounds_of_packs_of_several_lengths():
    rng = np.random.default_rng(3)
    seen = Counter()
    for _ in range(150):
        capacities = rng.integers(2, 9, 2)
        sizes = np.unique(rng.integers([1, 0], capacities + 1, (3, 2)), axis=0)
        counts, depth = rng.integers(1, 3, len(sizes)), int(rng.integers(1, 4))
        sequences = [tuple(size) for size in np.repeat(sizes, counts, axis=0).tolist()]
        fewest = fewest_by_trying(sequences, capacities.tolist(), depth)
        bound = feature_packs.lower_bound(sizes, counts, capacities, depth)
        assert bound <= fewest <= sum(feature_packs.pack_vectors(sizes, counts, capacities, depth).values())
        seen[bound == fewest] += 1
        totals = np.sum(sequences, axis=0)
        assert bound == max(*-(-totals // capacities), -(-len(sequences) // depth))
    assert min(seen[True], seen[False]) > 5  # cases where the bound is tight, and where it is not


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_wrong_histograms_and_limits_are_named(name):
    for histogram, size, depth, message in [
        ([1, -2, 0], 3, 2, "must not be negative. Received: -2 sequences of length 2"),
        ([1, 2, 0, 5], 3, 2, "must have max_seq_length=3 entries, one per length. Received: 4"),
        ([1, float("nan"), 0], 3, 2, "must hold whole numbers. Received: nan"),
        ([1, 2, 2**53 + 1], 3, 2, "must not count more than 2.*53 sequences of a length"),
        ([1, 2, 0], 3, 0, "`max_sequences_per_pack` must be a whole number of at least 1.*Received: 0"),
        ([1, 2, 0], 0, 2, "`max_seq_length` must be a whole number from 1 to 1,048,576. Received: 0"),
        ([[1, 2, 0]], 3, 2, "must have one dimension"),
    ]:
        with pytest.raises(ValueError, match=message):
            ALGORITHMS[name](np.array(histogram), size, depth)
