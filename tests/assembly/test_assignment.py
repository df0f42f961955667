"""Each sequence has one slot of the sequence's length, whoever computes it; each shuffle is a permutation."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_packed.assembly.assignment import PackOrder, assign_sequences, choose_slots, fill_packs
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import count_lengths
from bert_packed.packing.plan import make_plan
from bert_packed.records.shuffle import find_items, shuffle_places

S = 12


@given(st.integers(1, 2000), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_shuffle_is_a_permutation(num_items, key):
    places = shuffle_places(np.arange(num_items), num_items, (key,))
    assert sorted(places) == list(range(num_items))
    assert find_items(places, num_items, (key,)).tolist() == list(range(num_items))


def test_a_shuffle_can_be_asked_in_any_pieces():
    whole = shuffle_places(np.arange(1000), 1000, (3, 4))
    some = np.array([999, 5, 5, 0])
    assert shuffle_places(some, 1000, (3, 4)).tolist() == whole[some].tolist()
    assert not np.array_equal(whole, shuffle_places(np.arange(1000), 1000, (4, 3)))
    # items of two shuffles in one call
    sizes, keys = np.array([10, 7, 10]), np.array([1, 2, 1])
    both = shuffle_places(np.array([3, 3, 4]), sizes, (keys,))
    assert both[0] == shuffle_places(np.array([3]), 10, (1,))[0]
    assert both[1] == shuffle_places(np.array([3]), 7, (2,))[0]


def test_every_order_of_three_is_about_equally_frequent():
    keys = np.arange(6000)
    places = [shuffle_places(np.full(6000, item), 3, (keys,)) for item in range(3)]
    counts = np.bincount(9 * places[0] + 3 * places[1] + places[2])
    counts = counts[counts > 0]
    assert len(counts) == 6
    # chi-squared with 5 degrees of freedom: above 20.5 once in a thousand
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5


@pytest.mark.parametrize("num_parts", [1, 3, 7])
@pytest.mark.parametrize("run_length", [1, 13, 1000])
def test_parts_and_runs_do_not_matter(num_parts, run_length):
    """The bounded-memory way, run by run and part by part, gives the packs of `assign_sequences`."""
    lengths = np.random.default_rng(0).integers(1, S + 1, 200)
    plan = pack_lpfhp(count_lengths(lengths, S), S, "max")
    expected = assign_sequences(plan, lengths, seed=5)

    order = PackOrder(plan.strategies, 5)
    ends = np.arange(num_parts + 1) * order.num_packs // num_parts
    totals = np.bincount(lengths, minlength=S + 1)
    slots, parts = np.empty(200, np.int64), np.empty(200, np.int64)
    before = np.zeros(S + 1, np.int64)
    for start in range(0, 200, run_length):
        run = slice(start, start + run_length)
        slots[run] = choose_slots(lengths[run], before, totals, 5)
        parts[run] = np.searchsorted(ends[1:], order.find_packs(lengths[run], slots[run]), side="right")
        before = before + np.bincount(lengths[run], minlength=S + 1)
    members = []
    for part in range(num_parts):
        mine = np.flatnonzero(parts == part)
        packs = fill_packs(*order.slots(ends[part], ends[part + 1]), lengths[mine], slots[mine])
        members.extend(mine[packs.members])
    assert members == expected.members.tolist()
    assert sorted(members) == list(range(200))
    assert np.mean(np.diff(expected.offsets) > 1) > 0.3


@given(
    st.dictionaries(
        st.lists(st.integers(0, 5), min_size=1, max_size=4).map(lambda lengths: tuple(sorted(lengths))),
        st.integers(1, 9),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_the_pack_of_a_slot_is_found_without_a_table(strategies, seed):
    order = PackOrder(strategies, seed)
    slot_lengths, slot_numbers, depths = order.slots(0, order.num_packs)
    for length in set(slot_lengths.tolist()):
        numbers = slot_numbers[slot_lengths == length]
        assert sorted(numbers.tolist()) == list(range(len(numbers)))
    packs = np.repeat(np.arange(order.num_packs), depths)
    assert order.find_packs(slot_lengths, slot_numbers).tolist() == packs.tolist()
    held = Counter(tuple(part.tolist()) for part in np.split(slot_lengths, np.cumsum(depths)[:-1]))
    assert held == Counter(strategies)


def test_fill_packs_example():
    lengths, slots = np.array([3, 5, 3]), np.array([8, 4, 9])
    packs = fill_packs(np.array([3, 5, 3]), np.array([9, 4, 8]), np.array([2, 1]), lengths, slots)
    assert packs.members.tolist() == [2, 1, 0] and packs.offsets.tolist() == [0, 2, 3]
    assert packs.owners.tolist() == [0, 0, 1] and packs.slots.tolist() == [0, 1, 0]
    assert packs.totals(np.array([1, 20, 300])).tolist() == [320, 1]
    with pytest.raises(ValueError, match="must be one for the lengths"):
        fill_packs(np.array([3, 5, 3]), np.array([9, 4, 7]), np.array([2, 1]), lengths, slots)


def test_the_seed_chooses_packs_and_sequences():
    plan = make_plan("test", 8, "max", [((8,), 50), ((4, 4), 50)])
    lengths = np.repeat([8, 4], [50, 100])
    one, same, other = (assign_sequences(plan, lengths, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.members, same.members) and np.array_equal(one.offsets, same.offsets)
    assert not np.array_equal(one.members, other.members) and not np.array_equal(one.offsets, other.offsets)
    # equal strategies and equal lengths are spread: in order of strategy there would be one change
    assert np.count_nonzero(np.diff(one.depths)) > 30
    members_of_8 = one.members[lengths[one.members] == 8]
    assert not np.array_equal(members_of_8, np.sort(members_of_8))
    totals = np.array([0, 0, 0, 50])
    slots = [choose_slots(np.full(50, 3), np.zeros(4, int), totals, seed) for seed in (1, 1, 2)]
    assert np.array_equal(slots[0], slots[1]) and not np.array_equal(slots[0], slots[2])
    assert sorted(slots[0]) == sorted(slots[2]) == list(range(50))
