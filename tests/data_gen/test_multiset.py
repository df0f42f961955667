"""Multisets compared by sums: every difference is found, in little memory."""

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from bert_packed.records.read_bert import read_packed
from data_gen import verification
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import (
    NUM_BUCKETS,
    BucketSums,
    compare_files,
    find_buckets,
    find_unmatched,
    group_buckets,
    hold,
    unmatched,
)

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


def test_a_digest_that_adds_nothing_is_counted():
    nothing = np.zeros((2, 2), np.uint64)
    assert len(sums_of(nothing).find_different(sums_of(nothing[:1]))) == 1


@pytest.mark.parametrize("half", [0, 1])
def test_both_halves_of_a_digest_count(half):
    one = draw(1)
    other = one.copy()
    other[0, half] += np.uint64(NUM_BUCKETS)  # in the same bucket
    assert len(sums_of(one).find_different(sums_of(other))) == 1


def test_buckets_are_grouped_to_fit(monkeypatch):
    counts = np.zeros(NUM_BUCKETS, np.int64)
    counts[:5] = [3, 4, 2, 9, 7]
    for most, expected in ((7, [[0, 1], [2], [3], [4]]), (6, [[0], [1, 2], [3], [4]]), (25, [[*range(5)]])):
        monkeypatch.setattr(verification, "MOST_HELD", most)
        assert [group.tolist() for group in group_buckets(np.arange(5), counts)] == expected
    assert group_buckets(np.arange(0), counts) == []


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


@pytest.mark.parametrize("most_held", [100, 10**6])
def test_what_has_no_partner_is_found_group_by_group(monkeypatch, most_held):
    """Of sides that share a third, and hold some digests twice."""
    monkeypatch.setattr(verification, "MOST_HELD", most_held)
    digests, held_at_once = draw(400), []
    sides = [np.concatenate([digests[:200], digests[:9]]), np.concatenate([digests[130:], digests[130:140]])]
    origins = [np.stack([np.arange(len(side))] * 3, axis=1) for side in sides]

    def reader(number):
        columns = sides[number], origins[number]
        return lambda: [tuple(column[some] for column in columns) for some in (slice(70), slice(70, None))]

    def watch(batches, buckets):
        found = hold(batches, buckets)
        held_at_once.append(len(found[0]))
        return found

    monkeypatch.setattr(verification, "hold", watch)
    groups = list(find_unmatched([sums_of(side) for side in sides], [reader(0), reader(1)]))
    found = [np.concatenate([group[side] for group in groups])[:, 0].tolist() for side in range(2)]
    assert sorted(found[0]) == [*range(130), *range(200, 209)]
    assert sorted(found[1]) == [*range(70, 280)]
    assert max(map(sum, zip(held_at_once[::2], held_at_once[1::2], strict=True))) <= most_held
    assert len(groups) > 3 if most_held == 100 else len(groups) == 1
    assert list(find_unmatched([sums_of(sides[0])] * 2, [reader(0), reader(0)])) == []


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
    monkeypatch.setattr(verification, "MOST_HELD", 100)
    assert compare_files([one], packs, "error") == expected
