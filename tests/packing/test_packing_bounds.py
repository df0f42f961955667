"""Lower bounds are proofs: exact, tight where they should be, and never above the truth."""

import itertools
import math
import tracemalloc
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_packed.packing import bounds
from bert_packed.packing.bounds import best_packs
from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import count_lengths


def test_bounds_of_a_case_by_hand():
    histogram = count_lengths([5, 5, 5, 4, 4, 4], 8)
    assert bounds.certify(6, histogram, 8, 1).bounds == {"material": 4, "depth": 6, "L2": 5}
    assert bounds.lower_bound(histogram, 8, 3) == 5
    # A value of 1 for each length over S / 2 proves that no two of them share a pack.
    assert bounds.dual_bound(histogram, 8, "max", [0, 0, 0, 0, 1, 1, 1, 1]) == 3


def test_certificate_names_the_simplest_tight_bound():
    plan = pack_lpfhp(count_lengths([5, 4, 4, 3], 8), 8, "max")
    assert plan.certificate == bounds.Certificate(2, 0.0, "material", {"material": 2, "depth": 1, "L2": 2})
    assert pack_lpfhp(count_lengths([1, 1, 1, 1], 8), 8, 2).certificate.tight == "depth"


def test_float_error_cannot_lift_a_bound():
    # At one sequence a pack there are as many packs as sequences. In floats the product rounds up by more
    # than half a pack, the quotient does as well, and the "bound" is one above the truth.
    num_sequences, value = 2**53 - 3, 13
    assert math.ceil(float(num_sequences) * value / value) == num_sequences + 1
    assert bounds.dual_bound([num_sequences], 1, 1, [value]) == num_sequences
    # Here float values do it: 65 tokens at a fifth of a pack each sum up to 13.000000000000002 packs.
    histogram, values = [14, 5, 4, 1, 5], [0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    total = 0.0
    for count, each in zip(histogram, values, strict=True):
        total += count * each  # not `sum`, which makes good for rounding from Python 3.12 on
    assert math.ceil(total) == 14
    assert bounds.dual_bound(histogram, 5, 4, bounds.scale_values(np.array(values), 4)) == 13
    assert pack_cghp(histogram, 5, 4).num_packs == 13


def test_values_are_summed_to_the_depth_that_lengths_allow():
    histogram = np.zeros(4096, int)
    histogram[2047] = 4
    values = np.where(histogram, 2**50, 0)
    assert bounds.dual_bound(histogram, 4096, "max", values) == 2
    # the other limit is all that there are: sixteen of this value would overflow
    assert bounds.dual_bound([3, *[0] * 15], 16, "max", [2**57, *[0] * 15]) == 1


@given(
    values=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    max_slots=st.integers(0, 6),
    block_entries=st.sampled_from([1, 7, 2**16]),
)
@settings(max_examples=60, deadline=None)
def test_knapsack_equals_trying_every_pack(values, max_slots, block_entries):
    values = np.array([0, *itertools.accumulate(values, max)], np.int64)
    capacities = np.arange(len(values))
    with mock.patch.object(bounds, "BLOCK_ENTRIES", block_entries):
        table = best_packs(values, max_slots)
        slots = table.slots(capacities)
    for capacity in capacities:
        packs = itertools.combinations_with_replacement(range(capacity + 1), max_slots)
        worth = max(values[list(pack)].sum() for pack in packs if sum(pack) <= capacity)
        assert table.best[capacity] == worth
    assert slots.shape[1] <= max_slots
    assert np.array_equal(values[slots].sum(axis=1), table.best)
    assert (slots.sum(axis=1) <= capacities).all()


def test_knapsack_of_long_packs_needs_no_square_of_their_length():
    values = np.sort(np.random.default_rng(0).integers(0, 2**40, 4097))  # a square of int64 takes 128 MiB
    values[0] = 0
    tracemalloc.start()
    try:
        table = best_packs(values, 5)
        table.slots(np.arange(0, 4097, 16))
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    # joined in three steps, a value somewhere is what two slots and three slots give together
    two, three = best_packs(values, 2).best, best_packs(values, 3).best
    assert table.best[1000] == max(two[given] + three[1000 - given] for given in range(1001))
