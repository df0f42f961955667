"""Each sequence has one slot of the sequence's length, or one place in a row, whoever computes it.

This file alone catches a cut of rows that loses or repeats tokens, and shuffles that are no permutations.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from causal_files import make_sequences, read_examples, sequences_of, write_sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_packed import schema
from bert_packed.assembly.assignment import (
    PackOrder,
    assign_sequences,
    choose_slots,
    cut_sequences,
    fill_packs,
    find_rows,
    lengths_in_row,
    plan_rows,
)
from bert_packed.assembly.record_kinds import share_bytes
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import count_lengths
from bert_packed.packing.plan import make_plan
from bert_packed.records import tfrecords
from bert_packed.records.provenance import find_sources
from bert_packed.records.read_causal import read_causal
from bert_packed.records.sequences import rank_in_groups
from bert_packed.records.shuffle import find_items, shuffle_places
from data_gen import assignments, pack_job, pack_steps
from data_gen.pack_config import PackConfig

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
    # one call shuffles items of two shuffles
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
    # By a plain loop, with the padding of packs of 20 tokens
    wanted = np.full(order.num_packs, 20)
    np.subtract.at(wanted, packs, slot_lengths)
    wanted **= 2
    np.add.at(wanted, packs, slot_lengths**2)
    assert order.count_pairs(np.arange(order.num_packs)[::-1], 20).tolist() == wanted[::-1].tolist()


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
    # each length has its own key: equally many sequences of 4 come in another order
    other_slots = choose_slots(np.full(50, 4), np.zeros(5, int), np.append(totals, 50), 1)
    assert not np.array_equal(slots[0], other_slots)


histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=12)
COLUMNS = (schema.INPUT_IDS, schema.LABEL_IDS, schema.LABEL_MASK)


@given(histogram=histograms, num_rows=st.integers(1, 9), seed=st.integers(0, 3))
@settings(deadline=None)
def test_rows_and_places_are_each_taken_once(histogram, num_rows, seed):
    lengths = np.repeat(sorted(histogram), [histogram[length] for length in sorted(histogram)])
    num_rows = min(num_rows, len(lengths))
    plan = plan_rows(*np.unique(lengths, return_counts=True), num_rows)
    rows, places = find_rows(plan, lengths, rank_in_groups(lengths), seed)
    found = {(row, place): length for row, place, length in zip(rows, places, lengths, strict=True)}
    assert len(found) == len(lengths)
    for row in range(num_rows):
        there = lengths_in_row(plan, row, 0, int(plan.row_counts[row]), seed)
        assert len(there) > 0
        assert [found[row, place] for place in range(len(there))] == there.tolist()
        assert plan.row_tokens[row] == there.sum()
        assert np.array_equal(lengths_in_row(plan, row, 1, len(there), seed), there[1:])
    assert np.ptp(plan.row_tokens) <= lengths.max()


def test_the_order_is_drawn_by_the_seed():
    lengths = np.arange(1, 41)
    plan = plan_rows(lengths, np.full(40, 5), 4)
    rows = [lengths_in_row(plan, row, 0, 50, seed).tolist() for row, seed in ((0, 1), (1, 1), (0, 2))]
    assert sorted(rows[0]) == sorted(rows[2])
    assert all(one != other for one, other in itertools.combinations(rows, 2))
    assert all(np.corrcoef(row, range(50))[0, 1] ** 2 < 0.2 for row in rows)  # nor by length


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), size=st.integers(1, 12))
@settings(deadline=None)
def test_sequences_are_cut_where_packs_end_by_a_plain_loop(lengths, size):
    starts = np.cumsum(lengths) - lengths
    wanted = []
    for owner, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        first = 0
        for token in range(1, length + 1):
            if token == length or (start + token) % size == 0:
                wanted.append((owner, first, token - first))
                first = token
    assert (
        list(zip(*(array.tolist() for array in cut_sequences(starts, lengths, size)), strict=True)) == wanted
    )


def pack_rows(tmp_path, path, size, num_rows):
    """Lay a file into rows: the manifest, and the packs in order."""
    given = {"split_sequences": True, "num_shards": 3, "num_workers": 1, "provenance": True}
    out = str(tmp_path / "out")
    config = PackConfig(input_file=path, output_dir=out, max_seq_length=size, num_rows=num_rows, **given)
    return pack_job.pack(config), read_examples((tmp_path / "out").glob("packed-*.tfrecord"))


def join_rows(packs, num_rows):
    """The sequences of rows and their parts, by a plain loop: list of (sequence, bytes of its parts)."""
    found = []
    for row in range(num_rows):
        is_over = False
        for packed in packs[row::num_rows]:
            parts = sequences_of(packed)
            for part in parts:
                assert not is_over
                first = part[schema.POSITION_IDS][0]
                assert part[schema.POSITION_IDS] == list(range(first, first + len(part[schema.INPUT_IDS])))
                if first == 0:
                    found.append(([[], [], []], []))
                sequence, num_bytes = found[-1]
                assert len(sequence[0]) == first
                for whole, name in zip(sequence, COLUMNS, strict=True):
                    whole.extend(part[name])
                num_bytes.append((len(part[schema.INPUT_IDS]), part[schema.NUM_BYTES][0]))
            is_over = sum(len(part[schema.INPUT_IDS]) for part in parts) < len(packed[schema.INPUT_IDS])
    return found


@pytest.mark.parametrize(("num_rows", "size"), [(1, 8), (4, 7), (20, 16)])
def test_rows_hold_every_sequence_once_without_padding_between(tmp_path, monkeypatch, num_rows, size):
    monkeypatch.setattr(assignments, "PLACES_AT_ONCE", 3)
    monkeypatch.setattr(assignments, "PLACES_APART", 1)
    # there are several runs, none of which has all places
    monkeypatch.setattr(tfrecords, "READ_BATCH", 8)
    monkeypatch.setattr(pack_steps, "RUN_BYTES", 1)
    sequences = make_sequences([*np.random.default_rng(3).integers(1, 20, 17).tolist(), 100, size, 2 * size])
    path = write_sequences(tmp_path / "in.tfrecord", sequences)
    manifest, packs = pack_rows(tmp_path, path, size, num_rows)
    found = join_rows(packs, num_rows)
    wanted = [[sequence[name] for name in (*COLUMNS, schema.NUM_BYTES)] for sequence in sequences]
    assert sorted([*whole, [sum(size for _, size in parts)]] for whole, parts in found) == sorted(wanted)
    by_tokens = {tuple(sequence[schema.INPUT_IDS]): sequence for sequence in sequences}
    for (tokens, *_), parts in found:
        first, label_bytes = 0, by_tokens[tuple(tokens)][schema.LABEL_BYTES]
        for num_tokens, num_bytes in parts:
            assert num_bytes == sum(label_bytes[first : first + num_tokens])
            first += num_tokens
    num_tokens = sum(len(sequence[schema.INPUT_IDS]) for sequence in sequences)
    depths = [max(packed[schema.INPUT_MASK]) for packed in packs]
    assert len(packs) % num_rows == 0 and manifest["num_packs"] == len(packs)
    # there are as few steps as the longest sequence leaves, which is laid whole
    most = -(-num_tokens // num_rows) + max(len(s[schema.INPUT_IDS]) for s in sequences)
    assert len(packs) // num_rows <= -(-most // size)
    assert manifest["split_sequences"] is True and manifest["num_rows"] == num_rows
    assert manifest["num_tokens"] == num_tokens and manifest["num_parts"] == sum(depths) > len(sequences)
    assert manifest["depth"] == max(depths) == len(packs[0][schema.SEQUENCE_BYTES])
    assert manifest["efficiency"] == num_tokens / (len(packs) * size)
    for shard in (tmp_path / "out").glob("packed-*.tfrecord"):
        held = read_examples([shard])
        assert len(held) % num_rows == 0  # whole steps; and each part's record is known
        # 7 has no common factor with the numbers of rows, so that each row is met
        for record in range(1, len(held) + 1, 7):
            parts = sequences_of(held[record - 1])
            sources = find_sources(str(shard), record) if parts else []
            for part, (_, source) in zip(parts, sources, strict=True):
                first, last = part[schema.POSITION_IDS][0], part[schema.POSITION_IDS][-1]
                assert sequences[source - 1][schema.INPUT_IDS][first : last + 1] == part[schema.INPUT_IDS]


def test_bytes_are_shared_out_where_records_do_not_say(tmp_path):
    sequences = make_sequences([5, 9, 3, 17])
    bare = [{name: values for name, values in s.items() if name != schema.LABEL_BYTES} for s in sequences]
    path = write_sequences(tmp_path / "in.tfrecord", bare)
    (batch,) = read_causal(path)
    shares = share_bytes(batch)
    for index, sequence in enumerate(sequences):
        its = shares[slice(*batch.offsets("tokens")[index : index + 2])]
        mask = np.array(sequence[schema.LABEL_MASK])
        assert its.sum() == sequence[schema.NUM_BYTES][0]
        assert not its[mask == 0].any() and np.ptp(its[mask == 1]) <= 1
    by_hand = {**bare[0], schema.INPUT_IDS: [1, 2, 3, 4], schema.LABEL_IDS: [2, 3, 4, 0]}
    by_hand |= {schema.LABEL_MASK: [1, 1, 1, 0], schema.NUM_BYTES: [8]}
    (batch,) = read_causal(write_sequences(tmp_path / "hand.tfrecord", [by_hand]))
    assert share_bytes(batch).tolist() == [2, 3, 3, 0]
    _, packs = pack_rows(tmp_path, path, 4, 1)
    assert sorted(sum(size for _, size in parts) for _, parts in join_rows(packs, 1)) == sorted(
        sequence[schema.NUM_BYTES][0] for sequence in sequences
    )
