"""Records for causal language modelling are read as they are written, with every rule checked."""

import copy

import pytest
from causal_files import make_sequences, read_examples, write_sequences
from packed_records import CAUSAL_PACK as PACK

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.read_causal import read_causal, read_packed_causal, read_parts
from bert_packed.records.record_rules import LayoutError

UNPACKED = {
    schema.INPUT_IDS: [0, 7, 4, 8],
    schema.LABEL_IDS: [7, 4, 8, 0],
    schema.LABEL_MASK: [1, 1, 1, 0],
    schema.LABEL_BYTES: [4, 3, 3, 0],
    schema.NUM_BYTES: [10],
}


def test_unpacked_records_are_read_as_written(tmp_path):
    written = make_sequences([5, 1, 9, 2, 40], seed=3)
    (found,) = read_causal(write_sequences(tmp_path / "a.tfrecord", written))
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


def test_label_bytes_may_be_left_out(tmp_path):
    features = {name: values for name, values in UNPACKED.items() if name != schema.LABEL_BYTES}
    (found,) = read_causal(write_sequences(tmp_path / "a.tfrecord", [features]))
    assert "label_bytes" not in found.layout and found["num_bytes"].tolist() == [10]


def test_what_is_no_unpacked_record(tmp_path):
    lacking = {name: values for name, values in UNPACKED.items() if name != schema.NUM_BYTES}
    with pytest.raises(InputError, match="features num_bytes are missing"):
        list(read_causal(write_sequences(tmp_path / "a.tfrecord", [lacking])))
    with pytest.raises(InputError, match="packed already"):
        list(read_causal(write_sequences(tmp_path / "b.tfrecord", [PACK])))


def test_a_pack_is_read_as_its_sequences(tmp_path):
    (found,) = read_packed_causal(write_sequences(tmp_path / "p.tfrecord", [PACK, PACK]))
    assert found["lengths"].tolist() == [4, 3] * 2 and found["record_numbers"].tolist() == [1, 1, 2, 2]
    assert found["tokens"].tolist() == [0, 7, 4, 8, 0, 5, 0] * 2
    assert found["labels"].tolist() == [7, 4, 8, 9, 5, 0, 0] * 2
    assert found["label_mask"].tolist() == [1, 1, 1, 1, 1, 1, 0] * 2
    assert found["num_bytes"].tolist() == [14, 3] * 2 and found["first_positions"].tolist() == [0] * 4


def change(name, index, value):
    """The pack with one value changed."""
    changed = copy.deepcopy(PACK)
    changed[name][index] = value
    return {name: changed[name]}


# Padding between two sequences, and a sequence too many, which nothing else betrays
PADDED_WITHIN = {
    schema.INPUT_IDS: [0, 7, 4, 0, 0, 5, 0, 0],
    schema.INPUT_MASK: [1, 1, 1, 0, 2, 2, 2, 0],
    schema.POSITION_IDS: [0, 1, 2, 0, 0, 1, 2, 0],
    schema.LABEL_IDS: [7, 4, 8, 0, 5, 0, 0, 0],
    schema.LABEL_MASK: [1, 1, 1, 0, 2, 2, 0, 0],
}
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
    (change(schema.INPUT_MASK, 2, 3), "input_mask must count sequences"),
    (change(schema.INPUT_MASK, 7, 1), "input_mask must count sequences"),
    (PADDED_WITHIN, "input_mask must count sequences 1, 2, .* Received: 2 at index 4"),
    (FOUR_SEQUENCES, "input_mask must be at most K=3. Received: 4 at index 5"),
    (change(schema.POSITION_IDS, 4, 4), "position_ids must restart at 0"),
    (change(schema.POSITION_IDS, 0, 1), "position_ids must restart at 0"),
    (change(schema.POSITION_IDS, 7, 1), "position_ids must restart at 0"),
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


def test_batches_are_numbered_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    path = write_sequences(tmp_path / "a.tfrecord", make_sequences([3] * 5))
    assert [batch["record_numbers"].tolist() for batch in read_causal(path)] == [[1, 2], [3, 4], [5]]
    path = write_sequences(tmp_path / "p.tfrecord", [PACK] * 3)
    assert [batch["record_numbers"].tolist() for batch in read_packed_causal(path)] == [[1, 1, 2, 2], [3, 3]]
    assert read_examples([path]) == [PACK] * 3
