"""Strategies that fill a pack exactly are listed once each, and counted without being listed."""

import itertools

import pytest

from bert_packed.packing.plan import count_strategies, list_strategies


def by_trying(size, depth):
    """Every ascending tuple of at most `depth` slots that adds up to `size`, in order."""
    slots = range(1, size + 1)
    found = [
        each
        for number in range(1, min(depth, size) + 1)
        for each in itertools.combinations_with_replacement(slots, number)
        if sum(each) == size
    ]
    return sorted(found)


@pytest.mark.parametrize(("size", "depth"), [(1, 1), (1, 3), (7, 1), (8, 3), (9, 4), (10, 10), (6, 50)])
def test_strategies_are_those_of_trying(size, depth):
    listed = list_strategies(size, depth)
    assert listed.shape[1] == min(size, depth)
    assert [tuple(slot for slot in row if slot) for row in listed.tolist()] == by_trying(size, depth)
    assert all(sorted(row, key=lambda slot: slot == 0) == row for row in listed.tolist())  # 0 to the right
    assert count_strategies(size, depth) == len(listed)


def test_the_numbers_of_the_paper():
    assert [count_strategies(512, depth) for depth in (1, 2, 3)] == [1, 257, 22_102]
    assert len(list_strategies(512, 3)) == 22_102


def test_counting_ends_at_its_limit():
    exact = count_strategies(60, 60)
    assert exact == 966_467  # partitions of 60
    assert 1000 < count_strategies(60, 60, limit=1000) < exact
    assert count_strategies(60, 60, limit=exact) == exact
    assert count_strategies(8, 3, limit=5) == 10  # at depth 2 there are 5, no more than the limit
    assert 10**6 < count_strategies(8192, 8192, limit=10**6) < 10**8
