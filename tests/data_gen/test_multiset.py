"""Multisets compared by sums: every difference is found, in little memory."""

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from bert_packed.records.read_bert import read_packed
from data_gen import verification as multiset
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import BucketSums, compare_files, find_buckets, hold, unmatched

S = 16


def draw(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


def sums_of(*parts):
    sums = BucketSums()
    for part in parts:
        sums.add(part)
    return sums


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
    held, _ = hold([(digests[:9], origins[:9]), (digests[9:], origins[9:])], different)
    assert np.array_equal(held, digests[np.isin(find_buckets(digests), different)])


def test_equal_digests_cancel_nothing():
    """Exclusive or, the tempting other choice, takes two equal sequences for none, or for two others."""
    digests = draw(3)
    digests[:, 0] = digests[0, 0]  # one bucket, and equal numbers: the sums alone can tell
    one, two, three = digests[:1], digests[1:2], digests[2:]
    assert len(sums_of(one, one, three).find_different(sums_of(two, two, three))) == 1
    assert len(sums_of(digests[[0, 0, 2]]).find_different(sums_of(digests[[1, 1, 2]]))) == 1
    assert len(sums_of(one, one, one).find_different(sums_of(one))) == 1


def test_unmatched_is_the_difference_of_multisets():
    a, b, c = [1, 1], [1, 2], [0, 9]
    left, right = np.array([a, b, a], np.uint64), np.array([a, c], np.uint64)
    assert [rows.tolist() for rows in unmatched(left, right)] == [[1, 2], [1]]
    assert [rows.tolist() for rows in unmatched(left, right[:0])] == [[0, 1, 2], []]
    rng = np.random.default_rng(0)
    left, right = (rng.integers(0, 9, (300, 2)).astype(np.uint64) for _ in range(2))
    expected, partners = [], list(map(tuple, right.tolist()))
    for row, digest in enumerate(map(tuple, left.tolist())):
        if digest in partners:
            partners.remove(digest)
        else:
            expected.append(row)
    assert unmatched(left, right)[0].tolist() == expected
    assert sorted(map(tuple, right[unmatched(left, right)[1]].tolist())) == sorted(partners)


def test_entirely_different_files_are_counted(tmp_path, monkeypatch):
    lengths = np.random.default_rng(5).integers(3, S, 300)
    one, other = (
        write_features(tmp_path / f"{seed}.tfrecord", make_features(lengths, S, seed)) for seed in range(2)
    )
    out = tmp_path / "out"
    pack(PackConfig(input_file=other, output_dir=str(out), max_seq_length=S, num_workers=1))
    packs = sorted(str(path) for path in out.glob("*.tfrecord"))
    expected = compare_files([one], packs, "error")
    assert (expected.num_missing, expected.num_unexpected) == (300, 300)
    numbers = next(read_packed(packs[0]))["record_numbers"][:5]
    assert [sentence.split(" (")[0] for sentence in expected.differences] == [
        *(f"in the inputs, not in the packs: {one}, record {number}" for number in range(1, 6)),
        *(f"in the packs, not in the inputs: {packs[0]}, record {number}" for number in numbers),
    ]
    monkeypatch.setattr(multiset, "MOST_HELD", 100)
    assert compare_files([one], packs, "error") == expected
