"""Two collections are compared without holding them: sums tell whether they differ, and little is held."""

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from data_gen import multiset, verification
from data_gen.multiset import NUM_BUCKETS, BucketSums, find_buckets, group_buckets, hold
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import compare_files

S = 16


def draw(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


def sums_of(*parts):
    sums = BucketSums()
    for part in parts:
        sums.add(part)
    return sums


def test_order_and_pieces_do_not_matter():
    digests = draw(5000)
    shuffled = np.random.default_rng(1).permutation(digests)
    whole, pieces = sums_of(digests), sums_of(shuffled[:70], shuffled[70:])
    assert len(whole.find_different(pieces)) == 0
    assert whole.counts.sum() == 5000


def drop(digests):
    return digests[1:]


def double(digests):
    return np.concatenate([digests, digests[:1]])


def replace_by_another(digests):
    return np.concatenate([digests[1:], digests[1:2]])


def change_one_bit(digests):
    changed = digests.copy()
    changed[0, 1] ^= np.uint64(1)
    return changed


@pytest.mark.parametrize("damage", [drop, double, replace_by_another, change_one_bit])
def test_every_difference_shows_in_its_bucket(damage):
    digests = draw(5000)
    changed = damage(digests)
    different = sums_of(digests).find_different(sums_of(changed))
    assert set(find_buckets(digests[:1])) <= set(different.tolist()) | set(find_buckets(digests[1:2]))
    assert 1 <= len(different) <= 2
    origins = np.zeros((5000, 3), np.int64)
    held = hold([(digests[:9], origins[:9]), (digests[9:], origins[9:])], different)
    assert np.array_equal(held.digests, digests[np.isin(find_buckets(digests), different)])


def test_equal_digests_cancel_nothing():
    """Exclusive or, the tempting other choice, takes two equal sequences for none, or for two others."""
    digests = draw(3)
    digests[:, 0] = digests[0, 0]  # one bucket, and equal numbers: the sums alone can tell
    one, two, three = digests[:1], digests[1:2], digests[2:]
    assert len(sums_of(one, one, three).find_different(sums_of(two, two, three))) == 1
    assert len(sums_of(digests[[0, 0, 2]]).find_different(sums_of(digests[[1, 1, 2]]))) == 1
    assert len(sums_of(one, one, one).find_different(sums_of(one))) == 1


def test_a_digest_that_adds_nothing_is_counted():
    nothing = np.zeros((2, 2), np.uint64)
    assert len(sums_of(nothing).find_different(sums_of(nothing[:1]))) == 1


@pytest.mark.parametrize("half", [0, 1])
def test_both_halves_of_a_digest_count(half):
    one = draw(1)
    other = one.copy()
    other[0, half] += np.uint64(NUM_BUCKETS)  # in the same bucket
    assert len(sums_of(one).find_different(sums_of(other))) == 1


def test_buckets_are_grouped_to_fit():
    counts = np.zeros(NUM_BUCKETS, np.int64)
    counts[:4] = [3, 4, 2, 9]
    assert [g.tolist() for g in group_buckets(np.arange(4), counts, 7)] == [[0, 1], [2], [3]]
    assert group_buckets(np.arange(0), counts) == []


def test_entirely_different_files_are_counted_group_by_group(tmp_path, monkeypatch):
    lengths = np.random.default_rng(5).integers(3, S, 300)
    one, other = (
        write_features(tmp_path / f"{seed}.tfrecord", make_features(lengths, S, seed)) for seed in range(2)
    )
    out = tmp_path / "out"
    pack(PackConfig(input_file=other, output_dir=str(out), max_seq_length=S, num_workers=1))
    packs = sorted(str(path) for path in out.glob("*.tfrecord"))
    expected = compare_files([one], packs, "error")
    assert (expected.num_missing, expected.num_unexpected) == (300, 300)
    assert expected.differences[0].startswith(f"in the inputs, not in the packs: {one}, record 1 ")
    sizes = []

    def watch(parts, buckets):
        held = hold(parts, buckets)
        sizes.append(len(held.digests))
        return held

    monkeypatch.setattr(verification, "hold", watch)
    monkeypatch.setattr(multiset, "MOST_HELD", 100)
    assert compare_files([one], packs, "error") == expected
    assert len(sizes) >= 2 * 6 and max(a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)) <= 100
    sizes.clear()
    assert compare_files([other], packs, "error").is_equal and sizes == []
