"""Steps of equally many sequences: each epoch whole, the same sequences packed or not, packs that fit."""

import itertools

import numpy as np
import pytest

from bert_packed.assembly.update_packs import check_depth, pack_all, plan_updates
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHM_NAMES

LENGTHS = np.random.default_rng(0).integers(3, 16, 101).astype(np.int64)


def plan(depth="max", num_updates=20, batch_size=16, algorithm="cghp", seed=3, lengths=LENGTHS):
    return plan_updates(lengths, num_updates, batch_size, 24, depth, algorithm, seed)


def step_members(updates):
    return [sorted(packs.members.tolist()) for packs in updates.packs]


@pytest.mark.parametrize("depth", ["max", 3, 2, 1])
@pytest.mark.parametrize("algorithm", ["cghp", "bfd", "spfhp"])
def test_steps_have_their_batch_and_epochs_each_sequence(depth, algorithm):
    """In packs that fit."""
    updates = plan(depth, algorithm=algorithm)
    assert len(updates.packs) == 20
    for packs in updates.packs:
        assert len(packs.members) == 16
        depths = np.diff(packs.offsets)
        assert depths.min() >= 1 and depths.max() <= updates.spec.max_sequences_per_pack
        assert depth == "max" or depths.max() <= depth
        assert np.add.reduceat(LENGTHS[packs.members], packs.offsets[:-1]).max() <= 24
    assert updates.num_packs == max(map(len, updates.packs))
    # 320 are 3 epochs of 101 and 17 more, whatever the order within the steps
    counts = np.bincount(np.concatenate([packs.members for packs in updates.packs]), minlength=101)
    assert (counts.min(), counts.max(), counts.sum()) == (3, 4, 320)


def test_packed_and_unpacked_steps_have_the_same_sequences():
    packed, shallow, unpacked = plan("max"), plan(2), plan(1)
    assert step_members(packed) == step_members(shallow) == step_members(unpacked)
    assert packed.packing_factor > shallow.packing_factor > unpacked.packing_factor == 1
    assert unpacked.num_packs == 16
    assert step_members(packed) != step_members(plan("max", seed=4))


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_every_algorithm_packs_the_same_long_sequences(algorithm):
    lengths = np.random.default_rng(2).integers(20, 66, 24).astype(np.int64)
    check_depth(algorithm, 128, 3)
    updates = plan_updates(lengths, 3, 8, 128, 3, algorithm, 0)
    unpacked = plan_updates(lengths, 3, 8, 128, 1, "cghp", 0)
    assert step_members(updates) == step_members(unpacked)
    assert updates.spec.max_sequences_per_pack <= 3 and updates.packing_factor > 1
    assert sorted(pack_all(lengths, 128, 3, algorithm)[0].members.tolist()) == list(range(24))


@pytest.mark.parametrize("algorithm", ["nnlshp", "ennlshp"])
def test_depths_that_least_squares_cannot_list_are_refused(algorithm):
    for depth in ("max", 20):
        with pytest.raises(InputError, match=f"`max_sequences_per_pack` must be lower .* Received: {depth}"):
            check_depth(algorithm, 384, depth)


def test_epochs_differ():
    updates = step_members(plan(num_updates=12, lengths=LENGTHS[:96]))
    first, second = updates[:6], updates[6:]
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(96))
    assert sorted(first) != sorted(second)


def test_no_step_has_more_packs_than_its_sequences_need_alone():
    # Of these, three steps draw packs that their own sequences can do with fewer of
    lengths = np.random.default_rng(0).integers(3, 13, 40).astype(np.int64)
    updates = plan(num_updates=30, batch_size=5, lengths=lengths)
    for packs in updates.packs:
        alone, _ = pack_all(lengths[packs.members], 24, "max", "cghp")
        assert len(packs) <= len(alone)


def test_longer_runs_begin_alike():
    assert step_members(plan(num_updates=40))[:20] == step_members(plan())


def test_steps_are_nearly_as_full_as_the_whole():
    lengths = np.random.default_rng(1).integers(20, 200, 1500).astype(np.int64)
    updates = plan_updates(lengths, 45, 32, 256, "max", "cghp", 0)
    packs, _ = pack_all(lengths, 256, "max", "cghp")
    assert updates.packing_factor > 0.97 * len(lengths) / len(packs)
    assert updates.efficiency(lengths) > 0.95


@pytest.mark.parametrize("batch_size", [1, 2, 7, 101, 250])
def test_any_batch_size(batch_size):
    updates = plan(batch_size=batch_size, num_updates=6)
    assert {len(packs.members) for packs in updates.packs} == {batch_size}
    drawn = np.bincount(np.concatenate([packs.members for packs in updates.packs]), minlength=101)
    assert drawn.max() - drawn.min() <= 1 or batch_size == 250


def test_few_sequences_fill_large_steps():
    updates = plan_updates(np.array([5, 7], np.int64), 3, 5, 24, "max", "cghp", 0)
    counts = np.array([np.bincount(packs.members, minlength=2) for packs in updates.packs])
    assert counts.sum(axis=1).tolist() == [5, 5, 5]
    assert (np.abs(np.diff(np.cumsum(counts, axis=0))) <= 1).all()  # no epoch begins before the last ends
