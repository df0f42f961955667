"""Records for causal language modelling are read as they are written, with every rule checked."""

import copy
import itertools
import json

import numpy as np
import pytest
from causal_files import make_sequences, read_examples, write_sequences
from packed_records import CAUSAL_PACK as PACK

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.read_causal import (
    find_num_rows,
    read_causal,
    read_joined,
    read_packed_causal,
    read_parts,
)
from bert_packed.records.record_rules import LayoutError
from bert_packed.records.sequences import concatenate

UNPACKED = {
    schema.INPUT_IDS: [0, 7, 4, 8],
    schema.LABEL_IDS: [7, 4, 8, 0],
    schema.LABEL_MASK: [1, 1, 1, 0],
    schema.LABEL_BYTES: [4, 3, 3, 0],
    schema.NUM_BYTES: [10],
}


def without(features, name):
    return {other: values for other, values in features.items() if other != name}


def test_unpacked_records_are_read_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    written = make_sequences([5, 1, 9, 2, 40], seed=3)
    found = concatenate(list(read_causal(write_sequences(tmp_path / "a.tfrecord", written))))
    assert found["lengths"].tolist() == [5, 1, 9, 2, 40]
    assert found["record_numbers"].tolist() == [1, 2, 3, 4, 5]
    for name, column in (
        (schema.INPUT_IDS, found["tokens"]),
        (schema.LABEL_IDS, found["labels"]),
        (schema.LABEL_MASK, found["label_mask"]),
        (schema.LABEL_BYTES, found["label_bytes"]),
        (schema.NUM_BYTES, found["num_bytes"]),
    ):
        assert column.tolist() == [value for features in written for value in features[name]], name


def test_label_bytes_alone_may_be_left_out(tmp_path):
    def read_without(name):
        return read_causal(write_sequences(tmp_path / "a.tfrecord", [without(UNPACKED, name)]))

    (found,) = read_without(schema.LABEL_BYTES)
    assert "label_bytes" not in found.layout and found["num_bytes"].tolist() == [10]
    with pytest.raises(InputError, match="features num_bytes are missing"):
        list(read_without(schema.NUM_BYTES))


def test_packs_are_read_as_their_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    path = write_sequences(tmp_path / "p.tfrecord", [PACK] * 3)
    assert read_examples([path]) == [PACK] * 3
    found = concatenate(list(read_packed_causal(path)))
    assert found["lengths"].tolist() == [4, 3] * 3 and found["record_numbers"].tolist() == [1, 1, 2, 2, 3, 3]
    assert found["tokens"].tolist() == [0, 7, 4, 8, 0, 5, 0] * 3
    assert found["labels"].tolist() == [7, 4, 8, 9, 5, 0, 0] * 3
    assert found["label_mask"].tolist() == [1, 1, 1, 1, 1, 1, 0] * 3
    assert found["num_bytes"].tolist() == [14, 3] * 3 and found["first_positions"].tolist() == [0] * 6
    with pytest.raises(InputError, match="packed already"):
        list(read_causal(path))


def change(name, index, value):
    """The pack with one value changed."""
    changed = copy.deepcopy(PACK)
    changed[name][index] = value
    return {name: changed[name]}


# A sequence too many, which nothing else betrays
FOUR_SEQUENCES = {
    schema.INPUT_MASK: [1, 1, 1, 2, 3, 4, 4, 0],
    schema.POSITION_IDS: [0, 1, 2, 0, 0, 0, 1, 0],
    schema.LABEL_IDS: [7, 4, 8, 9, 5, 0, 0, 0],
    schema.LABEL_MASK: [1, 1, 1, 2, 3, 4, 0, 0],
    schema.SEQUENCE_WEIGHTS: [1, 1, 1],
    schema.SEQUENCE_BYTES: [14, 3, 3],
}


BROKEN = [
    ({schema.INPUT_IDS: []}, "input_ids must have a token"),
    ({schema.LABEL_IDS: [7, 4, 8]}, r"label_ids must be as long as input_ids\. Received: 3"),
    ({schema.LABEL_MASK: [1, 1]}, "label_mask must be as long as input_ids"),
    ({schema.LABEL_BYTES: [10]}, "label_bytes must be as long as input_ids"),
    ({schema.NUM_BYTES: []}, "num_bytes must have one value"),
    ({schema.NUM_BYTES: [-10]}, "num_bytes must not be negative"),
    ({schema.NUM_BYTES: [11]}, "num_bytes must be the sum of label_bytes"),
    ({schema.LABEL_BYTES: [4, 7, -1, 0]}, "label_bytes must be in 0"),
    ({schema.LABEL_BYTES: [4, 3, 0, 3]}, "label_bytes must be 0 where nothing is predicted"),
    ({schema.LABEL_MASK: [1, 2, 1, 0]}, r"label_mask must be 0 or 1\. Received: 2 at index 1"),
    ({schema.LABEL_IDS: [7, 4, 8, 9]}, r"label_ids must be 0 where nothing .* Received: 9 at index 3"),
    ({schema.LABEL_IDS: [0, 7, 4, 0]}, "label_ids must be the next token"),
    ({schema.INPUT_IDS: [-1, 7, 4, 8]}, "input_ids must be in 0"),
    ({schema.INPUT_IDS: [2**31, 7, 4, 8]}, "input_ids must be in 0"),
    (
        {schema.LABEL_MASK: [0] * 4, schema.LABEL_IDS: [0] * 4, schema.LABEL_BYTES: [0] * 4},
        "num_bytes must be 0 where nothing is predicted",
    ),
]
BROKEN_PACKS = [
    (change(schema.INPUT_MASK, 0, 2), "input_mask must begin with sequence 1"),
    (FOUR_SEQUENCES, "input_mask must be at most K=3. Received: 4 at index 5"),
    (change(schema.POSITION_IDS, 4, 4), "position_ids must restart at 0"),
    (change(schema.POSITION_IDS, 0, 1), "position_ids must restart at 0"),
    (change(schema.INPUT_IDS, 7, 1), "input_ids must be 0 in padding"),
    (change(schema.INPUT_IDS, 0, -1), "input_ids must be in 0"),
    (change(schema.LABEL_MASK, 3, 2), "label_mask must be the sequence of its token, or 0"),
    (change(schema.LABEL_MASK, 7, 1), "label_mask must be the sequence of its token, or 0"),
    (change(schema.LABEL_MASK, 0, -1), "label_mask must be the sequence of its token, or 0"),
    (change(schema.LABEL_IDS, 1, 5), "label_ids must be the next token"),
    (change(schema.LABEL_IDS, 6, 5), "label_ids must be 0 where nothing is predicted"),
    (change(schema.SEQUENCE_WEIGHTS, 2, 1), "sequence_weights must be 1 per sequence"),
    (change(schema.SEQUENCE_BYTES, 2, 1), "sequence_bytes must be 0 in an unused slot"),
    (change(schema.SEQUENCE_BYTES, 1, -1), "sequence_bytes must not be negative"),
    (
        {schema.LABEL_MASK: [1, 1, 1, 1, 0, 0, 0, 0], schema.LABEL_IDS: [7, 4, 8, 9, 0, 0, 0, 0]},
        "sequence_bytes must be 0 where nothing is predicted",
    ),
]


@pytest.mark.parametrize(
    ("features", "readers", "changed", "message"),
    [(UNPACKED, [read_causal], *row) for row in BROKEN]
    + [(PACK, [read_packed_causal, read_parts], *row) for row in BROKEN_PACKS],
)
def test_a_broken_rule_is_named(tmp_path, features, readers, changed, message):
    path = write_sequences(tmp_path / "a.tfrecord", [features, {**features, **changed}])
    for read in readers:
        with pytest.raises(InputError, match=rf"a\.tfrecord, record 2: {message}"):
            list(read(path))


def test_parts_may_go_on_where_a_pack_begins_and_nowhere_else(tmp_path):
    goes_on = {**PACK, schema.POSITION_IDS: [5, 6, 7, 8, 0, 1, 2, 0]}
    empty = {name: [0] * len(values) for name, values in PACK.items()}
    path = write_sequences(tmp_path / "p.tfrecord", [goes_on, empty, PACK])
    ((found, records),) = read_parts(path)
    assert len(records) == 3 and found["first_positions"].tolist() == [5, 0, 0, 0]
    assert found["record_numbers"].tolist() == [1, 1, 3, 3]
    for rows, wrong in (([goes_on], "restart at 0"), ([empty], "begin with sequence 1")):
        with pytest.raises(LayoutError, match=wrong):
            list(read_packed_causal(write_sequences(tmp_path / "q.tfrecord", rows)))
    for positions in ([5, 6, 7, 8, 1, 2, 3, 0], [5, 6, 7, 7, 0, 1, 2, 0], [-1, 0, 1, 2, 0, 1, 2, 0]):
        path = write_sequences(tmp_path / "q.tfrecord", [{**PACK, schema.POSITION_IDS: positions}])
        with pytest.raises(LayoutError, match="restart at 0"):
            list(read_parts(path))


S, NUM_ROWS = 6, 3
SEQUENCES = make_sequences([3, 20, 1, 6, 5, 2, 13, 4, 9, 6], vocab_size=40)
NAMES = (schema.INPUT_IDS, schema.LABEL_IDS, schema.LABEL_MASK)


def make_packs(row):
    """The packs of a row of sequences, one after the other, as dicts of lists."""
    tokens = [
        (number, position, *(sequence[name][position] for name in (*NAMES, schema.LABEL_BYTES)))
        for number, sequence in enumerate(row)
        for position in range(len(sequence[schema.INPUT_IDS]))
    ]
    packs = []
    for start in range(0, len(tokens), S):
        some = tokens[start : start + S]
        numbers = sorted({number for number, *_ in some})
        slots = [numbers.index(number) + 1 for number, *_ in some]
        columns = {
            schema.INPUT_IDS: [token[2] for token in some],
            schema.INPUT_MASK: slots,
            schema.POSITION_IDS: [token[1] for token in some],
            schema.LABEL_IDS: [token[3] for token in some],
            schema.LABEL_MASK: [token[4] * slot for token, slot in zip(some, slots, strict=True)],
        }
        sums = [sum(token[5] for token in some if token[0] == number) for number in numbers]
        packs.append(
            {name: values + [0] * (S - len(values)) for name, values in columns.items()}
            | {schema.SEQUENCE_WEIGHTS: [1] * len(numbers) + [0] * (S - len(numbers))}
            | {schema.SEQUENCE_BYTES: sums + [0] * (S - len(sums))}
        )
    return packs


def write_rows(folder, num_files=2, change=lambda packs: None):
    """Write sequences in rows, every third to each; returns the paths."""
    rows = [make_packs(SEQUENCES[number::NUM_ROWS]) for number in range(NUM_ROWS)]
    empty = {name: [0] * len(values) for name, values in rows[0][0].items()}
    steps = itertools.zip_longest(*rows, fillvalue=empty)
    packs = [pack for step in steps for pack in step]
    change(packs)
    folder.mkdir(exist_ok=True)
    size = -(-len(packs) // num_files)
    parts = [packs[start : start + size] for start in range(0, len(packs), size)]
    return [write_sequences(folder / f"{number}.tfrecord", part) for number, part in enumerate(parts)]


def list_joined(paths):
    found, num_packs = [], 0

    def see(path, parts, count):
        nonlocal num_packs
        num_packs += count

    for sequences in read_joined(paths, NUM_ROWS, see):
        for index in range(len(sequences)):
            first, last = sequences.offsets("tokens")[index : index + 2]
            columns = (sequences[name][first:last].tolist() for name in ("tokens", "labels", "label_mask"))
            found.append((*columns, int(sequences["num_bytes"][index]), sequences.origin(index)))
    return sorted(found), num_packs


@pytest.mark.parametrize("num_files", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 2, 4, 100])
def test_sequences_are_whole_again(tmp_path, monkeypatch, num_files, batch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", batch)
    paths = write_rows(tmp_path / "a", num_files)
    found, num_packs = list_joined(paths)
    assert [one[:4] for one in found] == sorted(
        (*(sequence[name] for name in NAMES), *sequence[schema.NUM_BYTES]) for sequence in SEQUENCES
    )
    size = -(-num_packs // num_files)
    origins = set()
    for row in range(NUM_ROWS):
        lengths = [len(sequence[schema.INPUT_IDS]) for sequence in SEQUENCES[row::NUM_ROWS]]
        for start in np.cumsum([0, *lengths[:-1]]).tolist():
            pack = start // S * NUM_ROWS + row
            origins.add(f"{paths[pack // size]}, record {pack % size + 1}")
    assert {one[4] for one in found} == origins


def skip_a_position(packs):
    packs[4][schema.POSITION_IDS] = [place + 1 for place in packs[4][schema.POSITION_IDS]]


def begin_in_the_middle(packs):
    packs[2][schema.POSITION_IDS][0] = 4  # the first of its row


def pad_a_row(packs):
    for name in packs[1]:
        packs[1][name] = [0] * len(packs[1][name])


def pad_the_end_of_a_pack(packs):
    for name in (*NAMES, schema.INPUT_MASK, schema.POSITION_IDS):
        packs[2][name][-1] = 0
    packs[5][schema.POSITION_IDS] = list(range(S))  # its row goes on with another sequence


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (skip_a_position, "record 5: position_ids must go on from the row's pack before, at 6. Received: 7."),
        (
            begin_in_the_middle,
            "record 3: position_ids must go on from the row's pack before, at 0. Received: 4",
        ),
        (pad_a_row, "record 5: a row must have padding at its end only. Received: a token after it."),
        (pad_the_end_of_a_pack, "record 6: a row must have padding at its end only."),
        (lambda packs: packs.pop(), "`num_rows` must divide the number of packs. Received: 3, "),
    ],
)
def test_invalid_rows_are_named(tmp_path, monkeypatch, batch, change, message):
    monkeypatch.setattr(tfrecords, "READ_BATCH", batch)
    with pytest.raises(LayoutError) as found:
        list_joined(write_rows(tmp_path / "a", 1, change))
    assert message in str(found.value) and str(tmp_path / "a") in str(found.value)


def test_manifests_agree_on_the_number_of_rows(tmp_path):
    for name, manifest in {
        "a": {"split_sequences": True, "num_rows": 3},
        "b": {"split_sequences": True, "num_rows": 4},
        "c": {"split_sequences": False},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    a, b, c, d = (f"{tmp_path}/{name}/x" for name in "abcd")
    assert [find_num_rows(paths) for paths in ([a], [b], [c, d], [a, a])] == [3, 4, 0, 3]
    for paths in ([a, b], [a, c], [d, b]):
        with pytest.raises(InputError, match="one --split_sequences and --num_rows"):
            find_num_rows(paths)
