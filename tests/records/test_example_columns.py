"""Columns of a batch are what TensorFlow parses, or None: never other numbers."""

import numpy as np
import pytest
import tensorflow as tf

from bert_packed.records.example_bytes import encode_varints
from bert_packed.records.example_columns import decode_columns, decode_varints
from bert_packed.records.record_batches import join_records

DTYPES = {"words": "int64", "weights": "float32"}
LARGEST = [5, 127, 128, 300, 2**14, 2**21 - 1, 2**28 - 1, 2**28, 2**35, 2**63 - 1]


def to_example(**features):
    """A serialized Example; whole numbers become an int64_list, others a float_list."""
    kinds = {}
    for name, values in features.items():
        if any(isinstance(value, float) for value in values):
            kinds[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            kinds[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Example(features=tf.train.Features(feature=kinds)).SerializeToString(deterministic=True)


def columns_of(serialized):
    wanted = {name: tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64) for name, dtype in DTYPES.items()}
    parsed = tf.io.parse_example(serialized, wanted)
    return {name: (values.values.numpy(), values.row_lengths().numpy()) for name, values in parsed.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, (values, counts) in expected.items():
        np.testing.assert_array_equal(found[name][0], values)
        np.testing.assert_array_equal(found[name][1], counts)


@pytest.mark.parametrize("largest", LARGEST)
def test_columns_are_what_tensorflow_parses(largest):
    rng = np.random.default_rng(largest % 1000)
    serialized = []
    for size in (1, 7, 300, 20_000):
        words = rng.integers(0, largest, size, endpoint=True).tolist()
        serialized.append(to_example(weights=[0.5] * (size % 5 + 1), words=[largest, *words], other=[3]))
    found = decode_columns(join_records(serialized), DTYPES)
    assert_equal(found, columns_of(serialized))
    assert found["words"][0].dtype == (
        np.uint8 if largest < 128 else np.uint32 if largest < 2**28 else np.int64
    )
    assert found["weights"][0].dtype == np.float32


def test_negative_numbers_are_read():
    serialized = [to_example(weights=[1.5], words=[-1, 4, -(2**63)]), to_example(weights=[0.25], words=[7])]
    assert_equal(decode_columns(join_records(serialized), DTYPES), columns_of(serialized))


def test_records_need_not_begin_the_buffer():
    serialized = [to_example(weights=[1.5], words=[n]) for n in (3, 1000, 5)]
    records = join_records([b"before", *serialized, b"after"])
    records = type(records)(records.content, records.starts[1:-1], records.ends[1:-1])
    assert_equal(decode_columns(records, DTYPES), columns_of(serialized))


def test_features_without_a_value_in_any_record_are_read():
    empty = tf.train.Feature(float_list=tf.train.FloatList())
    serialized = []
    for words in ([1, 300], [5]):
        record = tf.train.Example.FromString(to_example(words=words, zero=[0]))
        record.features.feature["weights"].CopyFrom(empty)
        serialized.append(record.SerializeToString(deterministic=True))
    found = decode_columns(join_records(serialized), DTYPES)
    assert_equal(found, columns_of(serialized))
    assert found["weights"][1].tolist() == [0, 0]


GOOD = to_example(weights=[1.5], words=[1, 300])
OTHERS = {
    "lacks a feature": to_example(weights=[1.5]),
    "has another type": to_example(weights=[1], words=[1]),
    "has no value": to_example(weights=[1.5], words=[]),
    "has one feature more": to_example(weights=[1.5], words=[1], zero=[0]),
    "is empty": b"",
    "is none": b"\xff\xff\xff",
    "is cut": GOOD[:-1],
    "is followed by something": GOOD + b"\x12\x00",
    "has a varint that goes on": GOOD[:-1] + b"\xff",
    # a list of numbers one by one, as the format allows: TensorFlow reads it
    "is not packed": bytes([10, 14, 10, 12, 10, 5, *b"words", 18, 3, 26, 1 + 1, 8, 7])[:-1],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("place", [0, 1, 2])
def test_other_forms_are_left_to_others(other, place):
    serialized = [GOOD, GOOD]
    assert decode_columns(join_records(serialized), DTYPES) is not None
    serialized.insert(place, other)
    assert decode_columns(join_records(serialized), DTYPES) is None


def test_a_flipped_bit_gives_no_other_numbers_than_tensorflow():
    serialized = [GOOD, to_example(weights=[2.5], words=[5, 70_000]), GOOD]
    num_read = 0
    for place in range(8 * len(serialized[1])):
        changed = bytearray(serialized[1])
        changed[place // 8] ^= 1 << place % 8
        batch = [serialized[0], bytes(changed), serialized[2]]
        found = decode_columns(join_records(batch), DTYPES)
        if found is not None:
            num_read += 1
            assert_equal(found, columns_of(batch))
    assert 0 < num_read < 8 * len(serialized[1])


@pytest.mark.parametrize(("num_bytes", "is_read"), [(1, True), (4, True), (5, False)])
def test_sizes_of_many_bytes_are_left_to_others(num_bytes, is_read):
    """The format allows a size more bytes than it needs."""
    name = bytes([10, 5, *b"words"])
    values = bytes([10, *[0x81] + [0x80] * (num_bytes - 2) + [0]]) if num_bytes > 1 else bytes([10, 1])
    values += b"\x07"
    for tag in (0x1A, 0x12):
        values = bytes([tag, len(values), *values])
    entry = name + values
    features = bytes([10, len(entry), *entry])
    record = bytes([10, len(features), *features])
    dtypes = {"words": "int64"}
    parsed = tf.io.parse_example([record], {"words": tf.io.FixedLenFeature([1], tf.int64)})
    assert parsed["words"].numpy().tolist() == [[7]]
    found = decode_columns(join_records([record]), dtypes)
    assert (found["words"][0].tolist() if is_read else found) == ([7] if is_read else None)


def test_varints_are_decoded_as_they_were_encoded():
    rng = np.random.default_rng(0)
    for largest in LARGEST[:-1]:
        rows = rng.integers(0, largest, (5, 40_000), endpoint=True)  # more than is decoded at once
        content, ends = encode_varints(rows)
        values, counts = decode_varints(np.frombuffer(content, np.uint8), ends)
        np.testing.assert_array_equal(values.reshape(5, -1), rows)
        assert counts.tolist() == [40_000] * 5


@pytest.mark.parametrize(
    ("content", "ends"),
    [
        (b"\x05\xac", [2]),  # no last byte
        (b"\xac\x02\x05", [1, 3]),  # which is in the next row
        (b"\x05" + b"\xff" * 10 + b"\x01", [12]),  # longer than any number
    ],
)
def test_varints_that_are_none(content, ends):
    assert decode_varints(np.frombuffer(content, np.uint8), np.array(ends)) is None


def test_rows_without_varints():
    values, counts = decode_varints(np.frombuffer(b"\xac\x02\x05", np.uint8), np.array([0, 2, 2, 3]))
    assert (values.tolist(), counts.tolist()) == ([300, 5], [0, 1, 0, 1])
    values, counts = decode_varints(np.zeros(0, np.uint8), np.array([0, 0]))
    assert (values.tolist(), counts.tolist()) == ([], [0, 0])
