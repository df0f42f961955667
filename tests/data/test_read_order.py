"""Training's order: each pack once an epoch, any two may meet, and any place is found without the others."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from packs import random_packs, write_packs
from unpacked_records import read_records

from bert_packed.data import read_order as read_order_module
from bert_packed.data.read_order import (
    IN_ORDER_PACKS,
    ProcessShard,
    balance_steps,
    find_spans,
    index_files,
    read_order,
)
from bert_packed.records.tfrecords import FRAME_BYTES, scan_file


def take(num_packs, buffer, count, seed=1, first=0):
    packs = itertools.chain.from_iterable(read_order(num_packs, seed, buffer, first))
    return np.array(list(itertools.islice(packs, count)))


# Buffers are below, at and above the packs; stretches have one pack and several, or a short last one
SIZES = [(1, 5), (7, 3), (12, 12), (50, 7), (1000, 130), (1001, 200), (100, 10**15), (2500, 1)]


@pytest.mark.parametrize(("num_packs", "buffer"), SIZES)
def test_every_epoch_has_each_pack_once(num_packs, buffer):
    order = take(num_packs, buffer, 4 * num_packs).reshape(4, num_packs)
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(num_packs), (4, 1)))
    if buffer == 1:
        assert np.array_equal(order[0], np.arange(num_packs))
    elif num_packs > 5:
        assert len({tuple(epoch) for epoch in order.tolist()}) == 4  # each in another order
        assert not np.array_equal(order[0], take(num_packs, buffer, num_packs, seed=2))


@pytest.mark.parametrize(("num_packs", "buffer"), SIZES)
def test_any_place_is_found_without_those_before(num_packs, buffer):
    whole = take(num_packs, buffer, 3 * num_packs + 40)
    rng = np.random.default_rng(3)
    ends = np.array([0, 1, num_packs - 1, num_packs, num_packs + 1, 2 * num_packs])
    for first in np.unique(np.concatenate([ends, rng.integers(0, 3 * num_packs, 20)])):
        assert np.array_equal(take(num_packs, buffer, 40, first=first), whole[first : first + 40]), first


def test_the_first_block_is_resumed_at_its_end_in_every_epoch():
    """Two blocks hold stretches of two packs; in some epochs the short stretch begins the second block."""
    for epoch in range(100):
        first = epoch * 257
        found = [*take(257, 130, 129, first=first), *take(257, 130, 128, first=first + 129)]
        assert sorted(found) == list(range(257)), epoch


@pytest.mark.parametrize(("num_packs", "buffer"), SIZES)
def test_no_more_than_the_buffer_is_held(num_packs, buffer):
    most = IN_ORDER_PACKS if buffer == 1 else buffer
    blocks = list(itertools.islice(read_order(num_packs, 1, buffer), 20))
    assert all(map(len, blocks)) and max(map(len, blocks)) <= most
    # the buffer is used: stretches of equal length leave a little of it empty
    assert max(map(len, blocks)) >= min(num_packs, most * 0.95)


def test_resuming_computes_the_block_it_stopped_in_and_no_other(monkeypatch):
    computed = []
    block = read_order_module._Epoch.block
    monkeypatch.setattr(
        read_order_module._Epoch, "block", lambda self, number: computed.append(number) or block(self, number)
    )
    next(read_order(10**9, 1, 1000, first=10**12 + 123_456_789))
    assert len(computed) == 1


def test_each_block_is_shuffled_by_a_key_of_its_own(monkeypatch):
    keys, shuffle_places = [], read_order_module.shuffle_places
    monkeypatch.setattr(
        read_order_module, "shuffle_places", lambda *of: keys.append(of[2]) or shuffle_places(*of)
    )
    list(itertools.islice(read_order(40, 7, 10), 12))  # three epochs of four blocks
    blocks = [key for key in keys if key[2] == read_order_module.PACKS]
    assert len(blocks) == len(set(blocks)) == 12
    assert {key[0] for key in keys} == {7}


def count_pairs(packs):
    """Numbers of pairs that look drawn, some many times as large as others."""
    return (packs * 7919 % 101) ** 3


def take_balanced(num_packs, buffer, sizes, num_devices, micro, first=0):
    """The packs of steps of some sizes, dealt to devices: list of arrays."""
    blocks = read_order(num_packs, 1, buffer, first)
    steps = itertools.chain(sizes, itertools.repeat(micro))
    packs = balance_steps(blocks, steps, count_pairs, num_devices, micro, num_packs, first)
    found = np.fromiter(itertools.islice(itertools.chain.from_iterable(packs), sum(sizes)), np.int64)
    return np.split(found, np.cumsum(sizes)[:-1])


def test_packs_are_dealt_as_in_the_docstring():
    pairs = np.array([2, 9, 1, 3, 4, 8, 3, 4])
    (packs,) = balance_steps([np.arange(8)], itertools.repeat(8), lambda packs: pairs[packs], 2, 4, 8)
    assert pairs[packs].tolist() == [9, 4, 8, 4, 3, 1, 3, 2]


# Steps are smaller and larger than a block, and than an epoch; they grow; a device has one pack and many
@pytest.mark.parametrize(("num_packs", "buffer"), SIZES[2:])
@pytest.mark.parametrize(
    ("sizes", "num_devices", "micro"),
    [([8] * 40, 4, 4), ([12, 12, 24, 36, 48, 48] * 3, 3, 12), ([64] * 9, 2, 64)],
)
def test_a_step_keeps_its_packs_and_devices_share_its_work(num_packs, buffer, sizes, num_devices, micro):
    """Else a step had other sequences than before, or a device more work than a pack can explain."""
    ends = np.cumsum(sizes)
    shuffled = np.split(take(num_packs, buffer, ends[-1]), ends[:-1])
    found = take_balanced(num_packs, buffer, sizes, num_devices, micro)
    busiest = []
    for end, size, before, after in zip(ends, sizes, shuffled, found, strict=True):
        assert sorted(after) == sorted(before)
        if (end - size) // num_packs != (end - 1) // num_packs:
            assert after.tolist() == before.tolist()
            continue
        owners = [ProcessShard(micro, number, num_devices) for number in range(num_devices)]
        sums = [
            [count_pairs(step[owner.holds(np.arange(size))]).sum() for owner in owners]
            for step in (before, after)
        ]
        assert np.ptp(sums[1]) <= count_pairs(after).max()
        busiest.append(np.max(sums, axis=1) / np.mean(sums, axis=1))
    if len(busiest) > 5 and micro > num_devices:
        assert np.mean(busiest, axis=0)[1] < 1 + 0.5 * (np.mean(busiest, axis=0)[0] - 1)
    for number in (1, len(sizes) // 2, len(sizes) - 1):
        rest = take_balanced(num_packs, buffer, sizes[number:], num_devices, micro, int(ends[number - 1]))
        assert [step.tolist() for step in rest] == [step.tolist() for step in found[number:]]


def count_meetings(order, batch_size, num_packs):
    """Number of batches that any two packs shared: int array `[N, N]`."""
    met = np.zeros((num_packs, num_packs), np.int64)
    for batch in order[: len(order) // batch_size * batch_size].reshape(-1, batch_size):
        met[np.ix_(batch, batch)] += 1
    return met


@pytest.mark.parametrize(("num_packs", "buffer", "batch"), [(48, 8, 4), (40, 10, 6)])
def test_any_two_packs_meet_as_often_as_in_a_uniform_shuffle(num_packs, buffer, batch):
    """If blocks kept their packs, only one pair in six would meet at all."""
    epochs = 120
    met = count_meetings(take(num_packs, buffer, epochs * num_packs), batch, num_packs)
    rng = np.random.default_rng(0)
    shuffled = np.concatenate([rng.permutation(num_packs) for _ in range(epochs)])
    wanted = count_meetings(shuffled, batch, num_packs)
    found, uniform = (counts[np.triu_indices(num_packs, 1)] for counts in (met, wanted))
    expected = uniform.mean()
    assert found.mean() == pytest.approx(expected, rel=0.02)
    # Poisson about the mean, as far as a thousand pairs go: neither does a pair stand out, nor all a little
    assert np.abs(found - expected).max() < 5.5 * np.sqrt(expected)
    assert 0.8 * uniform.var() < found.var() < 1.25 * uniform.var()


def test_packs_of_a_stretch_meet_others_too():
    """Stretches of 4 packs, whose borders move: neighbours share a block in most epochs, others do not."""
    num_packs, buffer, epochs = 2048, 256, 20
    order = take(num_packs, buffer, epochs * num_packs).reshape(epochs, num_packs)
    blocks = np.empty((epochs, num_packs), np.int64)
    np.put_along_axis(blocks, order, np.arange(num_packs)[None] // buffer, axis=1)
    share = {d: (blocks[:, d:] == blocks[:, :-d]).mean() for d in (1, 2, 3, 4, 9, 700)}
    base = buffer / num_packs
    # a border is between two packs at distance d in d of 4 epochs
    for d, found in share.items():
        together = max(0, 1 - d / 4)
        assert found == pytest.approx(together + (1 - together) * base, abs=0.02), d


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("packs"), np.random.default_rng(4)
    paths = [folder / f"{number}.tfrecord" for number in range(4)]
    for path, count in zip(paths, (20, 1, 8, 19), strict=True):
        write_packs(path, random_packs(rng, count, 24), 24)
    return [str(path) for path in paths]


@pytest.mark.parametrize("cut", [-1, -3, 4])
def test_a_file_cut_short_has_no_number_of_records(tmp_path, files, cut):
    damaged = tmp_path / "damaged.tfrecord"
    damaged.write_bytes(Path(files[0]).read_bytes()[:cut])
    assert scan_file(damaged).num_records is None
    with pytest.raises(ValueError, match="truncated or corrupt"):
        index_files([str(damaged)])


def test_spans_are_the_packs_that_follow_one_another_in_a_file(files):
    index = index_files(files)
    assert index.starts.tolist() == [0, 20, 21, 29, 48]
    packs = np.array([0, 1, 9, 10, 11, 19, 20, 21, 30, 46, 47])
    spans = find_spans(index, packs)
    assert spans.files.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert spans.counts.tolist() == [2, 3, 1, 1, 1, 1, 2]
    assert spans.numbers.tolist() == [1, 10, 20, 1, 1, 2, 18]
    for file, offset, count, number, num_bytes in zip(
        *(getattr(spans, name) for name in ("files", "offsets", "counts", "numbers", "num_bytes")),
        strict=True,
    ):
        starts = np.cumsum([0, *(len(r) + FRAME_BYTES for r in read_records(files[file]))])
        assert offset == starts[number - 1]
        assert offset + num_bytes == starts[number - 1 + count]  # not a byte of others
