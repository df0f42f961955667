"""Baselines and decreasing algorithms equal, pack for pack, taking one sequence at a time."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_packed.packing import baselines
from bert_packed.packing.baselines import (
    SortedBatching,
    cost_of_sorted_batching,
    greedy_starts,
    pack_local_greedy,
    shuffled_lengths,
)
from bert_packed.packing.descending import pack_bfd, pack_ffd
from bert_packed.packing.histogram import count_lengths
from bert_packed.packing.plan import make_plan


def fit_one_at_a_time(lengths, size, depth, choose):
    packs = []
    for length in lengths:
        fitting = [pack for pack in packs if sum(pack) + length <= size and len(pack) < depth]
        if fitting:
            choose(fitting).append(length)
        else:
            packs.append([length])
    return make_plan("any", size, depth, [(pack, 1) for pack in packs]).strategies


def first(packs):
    return packs[0]


def fullest(packs):
    return max(packs, key=sum)  # of equals the first


@pytest.mark.parametrize("pack, choose", [(pack_ffd, first), (pack_bfd, fullest)])
@given(lengths=st.lists(st.integers(1, 20), max_size=60), depth=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_decreasing_equals_one_at_a_time(pack, choose, lengths, depth):
    plain = fit_one_at_a_time(sorted(lengths, reverse=True), 20, depth, choose)
    assert pack(count_lengths(lengths, 20), 20, depth).strategies == plain


@given(lengths=st.lists(st.integers(1, 20), max_size=60), depth=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_greedy_starts_equal_a_plain_loop(lengths, depth):
    starts, used, held = [], 20, 0
    for position, length in enumerate(lengths):
        if used + length > 20 or held == depth:
            starts.append(position)
            used, held = 0, 0
        used, held = used + length, held + 1
    assert greedy_starts(np.array(lengths, np.int64), 20, depth) == starts


@given(
    lengths=st.lists(st.integers(1, 20), max_size=40), depth=st.integers(1, 20), buffer_size=st.integers(1, 9)
)
@settings(max_examples=60, deadline=None)
def test_local_greedy_equals_a_plain_loop(lengths, depth, buffer_size):
    packs, pack, arriving, waiting = [], [], list(lengths), []
    while arriving or waiting:
        while arriving and len(waiting) < buffer_size:
            waiting.append(arriving.pop(0))
        fitting = [length for length in waiting if length <= 20 - sum(pack)]
        if not fitting or len(pack) == depth:
            packs.append(pack)
            pack = []
            continue
        pack.append(max(fitting))
        waiting.remove(max(fitting))
    plain = make_plan("any", 20, depth, [(pack, 1) for pack in [*packs, pack]]).strategies
    with mock.patch.object(baselines, "shuffled_lengths", lambda *_: np.array(lengths, np.int64)):
        plan = pack_local_greedy(count_lengths(lengths, 20), 20, depth, buffer_size=buffer_size)
    assert plan.strategies == plain


def test_the_order_of_arrival_is_of_the_seed():
    orders = [shuffled_lengths(np.arange(20), seed).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == [length for length in range(1, 21) for _ in range(length - 1)]


def test_sorted_batching_by_hand():
    cost = cost_of_sorted_batching(count_lengths([2, 3, 3, 7, 8], 8), 8, 2)
    assert cost == SortedBatching(28, 23 / 28, 40 / 28, 3)
    assert cost_of_sorted_batching([0, 0], 2, 4) == SortedBatching(0, 1.0, 1.0, 0)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40), batch_size=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_sorted_batching_equals_batch_by_batch(lengths, batch_size):
    lengths.sort()
    batches = [lengths[at : at + batch_size] for at in range(0, len(lengths), batch_size)]
    cost = cost_of_sorted_batching(count_lengths(lengths, 9), 9, batch_size)
    assert cost.num_tokens == sum(len(batch) * batch[-1] for batch in batches)
    assert cost.num_shapes == len({batch[-1] for batch in batches})
