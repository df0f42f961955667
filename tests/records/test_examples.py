"""Records are encoded as TensorFlow does, byte for byte, and decoded to the numbers that it parses."""

import contextlib

import numpy as np
import pytest
from packed_records import PACK
from unpacked_records import example, make_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records.example_bytes import serialize_examples, serialize_ragged
from bert_packed.records.examples import (
    Example,
    OtherFormError,
    decode_columns,
    decode_varints,
    parse_examples,
    parse_ragged,
)
from bert_packed.records.tfrecords import join_records

tf = pytest.importorskip("tensorflow")  # what files are compared with

DTYPES = {"words": "int64", "weights": "float32"}
LARGEST = [5, 127, 128, 300, 2**14, 2**21 - 1, 2**28 - 1, 2**28, 2**35, 2**63 - 1]


def columns_of(serialized):
    wanted = {name: tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64) for name, dtype in DTYPES.items()}
    parsed = tf.io.parse_example(serialized, wanted)
    return {name: (values.values.numpy(), values.row_lengths().numpy()) for name, values in parsed.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, (values, counts) in expected.items():
        np.testing.assert_array_equal(found[name][0], values)
        np.testing.assert_array_equal(found[name][1], counts)


# Encoding


@pytest.mark.parametrize("largest", [1, 127, 128, 16383, 16384, 2**16 - 1, 2**16, 2**21, 2**31 - 1, 2**40])
def test_serialization_equals_tensorflow(largest):
    values = np.random.default_rng(0).integers(0, largest, (20, 9), endpoint=True)
    values[3, 2] = largest
    features = {
        "input_ids": values,
        "next_sentence_labels": values[:, :1] % 2,
        "masked_lm_weights": values[:, :3] % 2,
    }
    expected = [example({name: column[row] for name, column in features.items()}) for row in range(20)]
    assert serialize_examples(features) == expected
    assert serialize_examples(dict(reversed(features.items()))) == expected
    del features["masked_lm_weights"]
    counts = np.resize([2, 9, 1], 20)
    columns = {
        name: (column[np.arange(column.shape[1]) < counts[:, None]], np.minimum(counts, column.shape[1]))
        for name, column in features.items()
    }
    assert serialize_ragged(columns) == [
        example({name: column[row, : counts[row]] for name, column in features.items()}) for row in range(20)
    ]


def test_sizes_of_every_part_are_written_as_tensorflow_does():
    """Sizes of one byte end at 127, of two at 16383: of the values, the feature, its entry and the record."""
    for length in (*range(90, 135), *range(16340, 16390, 7), 16383, 16384):
        features = {"input_ids": np.full((1, length), 5), "gr\u00f6\u00dfe": np.zeros((1, 1), np.int64)}
        (record,) = serialize_examples(features)
        expected = {name: values[0] for name, values in features.items()}
        assert record == example(expected), length


@pytest.mark.parametrize(
    ("serialize", "features", "message"),
    [
        (serialize_examples, {"a": np.array([[1, -3]])}, r"must not be negative\. Received: -3"),
        (serialize_examples, {"a": np.array([[1, 200], [-1, 0]])}, r"must not be negative\. Received: -1"),
        (serialize_examples, {"a": np.zeros((2, 3)), "b": np.zeros((1, 3))}, r"shape \[n, length\]"),
        (serialize_ragged, {"a": (np.arange(3), np.array([1, 1]))}, "as many values as it says"),
    ],
)
def test_what_cannot_be_serialized_is_named(serialize, features, message):
    with pytest.raises(ValueError, match=message):
        serialize(features)


# Decoding


@pytest.mark.parametrize("largest", LARGEST)
def test_columns_are_what_tensorflow_parses(largest):
    rng = np.random.default_rng(largest % 1000)
    serialized = []
    for size in (1, 7, 300, 40_000):  # more than is decoded at once
        words = rng.integers(0, largest, size, endpoint=True).tolist()
        serialized.append(
            example({"weights": [0.5] * (size % 5 + 1), "words": [largest, *words], "other": [3]})
        )
    found = decode_columns(join_records(serialized), DTYPES)
    assert_equal(found, columns_of(serialized))
    assert found["words"][0].dtype == (
        np.uint8 if largest < 128 else np.uint32 if largest < 2**28 else np.int64
    )
    assert found["weights"][0].dtype == np.float32


def test_negative_numbers_are_read_anywhere_in_a_buffer():
    words = [[-1, 4, -(2**63)], [7]]
    serialized = [example({"weights": [1.5], "words": some}) for some in words]
    records = join_records([b"before", *serialized, b"after"])
    records = type(records)(records.content, records.starts[1:-1], records.ends[1:-1])
    assert_equal(decode_columns(records, DTYPES), columns_of(serialized))


def test_features_without_a_value_in_any_record_are_read():
    serialized = []
    for words in ([1, 300], [5]):
        record = Example.FromString(example({"words": words, "zero": [0]}))
        record.features.feature["weights"].float_list.SetInParent()
        serialized.append(record.SerializeToString(deterministic=True))
    found = decode_columns(join_records(serialized), DTYPES)
    assert_equal(found, columns_of(serialized))
    assert found["weights"][1].tolist() == [0, 0]


WEIGHTS = bytes([10, 7, *b"weights", 18, 8, 18, 6, 10, 4, *b"\0\0\xc0\x3f"])
WORDS = bytes([10, 5, *b"words", 18, 7, 26, 5, 10, 3, 1, 172, 2])


def to_entries(*entries):
    """A record of the bytes of a map's entries, in this order."""
    content = b"".join(bytes([10, len(entry), *entry]) for entry in entries)
    return bytes([10, len(content), *content])


GOOD = to_entries(WEIGHTS, WORDS)
assert example({"weights": [1.5], "words": [1, 300]}) == GOOD
OTHERS = {
    "lacks a feature": example({"weights": [1.5]}),
    "has no value": example({"weights": [1.5], "words": []}),
    "has one feature more": example({"weights": [1.5], "words": [1], "zero": [0]}),
    "is empty": b"",
    "is followed by something": GOOD + b"\x12\x00",
    # the format allows a list of numbers one by one
    "is not packed": bytes([10, 15, 10, 13, 10, 5, *b"words", 18, 4, 26, 2, 8, 7]),
    "has another order": to_entries(WORDS, WEIGHTS),
    "has a feature twice": to_entries(WEIGHTS, WORDS, WORDS),
    "has names of other sizes": to_entries(WEIGHTS, bytes([10, 4, *b"word", 18, 0]), WORDS),
}
WRONG = {
    "has another type": (example({"weights": [1], "words": [1]}), "weights must hold float32.* a int64_list"),
    "is none": (b"\xff\xff\xff", r"must be a tf\.train\.Example"),
    "is cut": (GOOD[:-1], r"must be a tf\.train\.Example"),
    "has half a number": (
        to_entries(WEIGHTS[:9] + bytes([18, 6, 18, 4, 10, 2, 0, 0]), WORDS),
        r"must be a tf\.train\.Example",
    ),
    "has a varint that goes on": (GOOD[:-1] + b"\xff", r"must be a tf\.train\.Example"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("place", [0, 1, 2])
def test_other_forms_are_read_record_by_record(other, place):
    serialized = [GOOD, GOOD]
    assert decode_columns(join_records(serialized), DTYPES) is not None
    serialized.insert(place, other)
    assert decode_columns(join_records(serialized), DTYPES) is None
    for records in (serialized, [other, other]):
        found = parse_ragged(join_records(records), DTYPES)
        assert_equal(found, columns_of(records))
        assert [found[name][0].dtype for name in DTYPES] == list(DTYPES.values())


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("place", [0, 1, 2])
def test_records_that_cannot_be_read_are_named(wrong, message, place):
    serialized = [GOOD, GOOD]
    serialized.insert(place, wrong)
    for records, number in ((serialized, 11 + place), ([wrong, wrong], 11)):
        assert decode_columns(join_records(records), DTYPES) is None
        with pytest.raises(InputError, match=rf"x\.tfrecord, record {number}: {message}"):
            parse_ragged(join_records(records, "x.tfrecord", 11), DTYPES)


def test_a_flipped_bit_gives_no_other_numbers_than_tensorflow():
    serialized = [GOOD, example({"weights": [2.5], "words": [5, 70_000]}), GOOD]
    decoded, changed = [], []
    for place in range(8 * len(serialized[1])):
        record = bytearray(serialized[1])
        record[place // 8] ^= 1 << place % 8
        found = decode_columns(join_records([serialized[0], bytes(record), serialized[2]]), DTYPES)
        if found is not None:
            decoded.append(found)
            changed.append(bytes(record))
    assert 0 < len(decoded) < 8 * len(serialized[1])
    expected = columns_of([record for one in changed for record in (serialized[0], one, serialized[2])])
    for name, (values, counts) in expected.items():
        np.testing.assert_array_equal(np.concatenate([found[name][0] for found in decoded]), values)
        np.testing.assert_array_equal(np.concatenate([found[name][1] for found in decoded]), counts)


@pytest.mark.parametrize(("num_bytes", "is_read"), [(1, True), (4, True), (5, False)])
def test_sizes_of_many_bytes_are_of_another_form(num_bytes, is_read):
    """The format allows a size more bytes than it needs."""
    size = [0x81, *[0x80] * (num_bytes - 2), 0] if num_bytes > 1 else [1]
    values = bytes([10, *size, 7])
    values = bytes([26, len(values), *values])
    record = to_entries(bytes([10, 5, *b"words", 18, len(values), *values]))
    dtypes = {"words": "int64"}
    found = decode_columns(join_records([record]), dtypes)
    assert (found["words"][0].tolist() if is_read else found) == ([7] if is_read else None)
    assert parse_ragged(join_records([record]), dtypes)["words"][0].tolist() == [7]


@pytest.mark.parametrize(
    ("content", "ends", "expected"),
    [
        ([1, 172, 2, 5, 7], [3, 5], ([1, 300, 5, 7], [2, 2])),
        # rows without a number
        ([172, 2, 5], [0, 2, 2, 3], ([300, 5], [0, 1, 0, 1])),
        ([], [0, 0], ([], [0, 0])),
        ([5, 172], [2], None),  # no last byte
        ([172, 2, 5], [1, 3], None),  # which is in the next row
        ([5, *[255] * 10, 1], [12], None),  # longer than any number
    ],
)
def test_varints_by_hand(content, ends, expected):
    refused = pytest.raises(OtherFormError) if expected is None else contextlib.nullcontext()
    with refused:
        values, counts = decode_varints(np.array(content, np.uint8), np.array(ends))
        assert (values.tolist(), counts.tolist()) == expected


# Records of fixed lengths; behind others' bytes they have a form that is parsed record by record

BOTH_FORMS = pytest.mark.parametrize("after", [b"", b"\x12\x00"], ids=["usual", "another form"])


@BOTH_FORMS
def test_features_of_fixed_lengths(after):
    packs = [{**PACK, schema.INPUT_IDS: [n, *PACK[schema.INPUT_IDS][1:]]} for n in (2, 300, 70_000)]
    serialized = [example(pack) + after for pack in packs]
    lengths = {name: len(values) for name, values in PACK.items()}
    found = parse_examples(join_records(serialized), lengths)
    wanted = {name: tf.io.FixedLenFeature([size], schema.dtype(name)) for name, size in lengths.items()}
    assert found.keys() == lengths.keys()
    for name, values in tf.io.parse_example(serialized, wanted).items():
        assert found[name].dtype == values.numpy().dtype
        np.testing.assert_array_equal(found[name], values.numpy())
    some = {name: size for name, size in lengths.items() if name != schema.SEGMENT_IDS}
    assert parse_examples(join_records(serialized), some).keys() == some.keys()


@BOTH_FORMS
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({schema.INPUT_IDS: 4}, r"record 12: input_ids must have length 4, as in .* Received: 5\."),
        ({schema.INPUT_IDS: 5}, r"record 11: input_ids must have length 5, as in .* Received: 4\."),
        ({schema.INPUT_IDS: 0}, r"record 11: input_ids must have length 0, as in .* Received: 4\."),
        ({"position": 8}, r"record 11: features position are missing\. Received: a\\nb, input_ids, "),
        ({"position": 0}, r"record 11: features position are missing\. Received: a\\nb, input_ids, "),
        ({schema.MASKED_LM_WEIGHTS: 4, schema.INPUT_MASK: 5}, r"record 11: input_mask must have length 5"),
    ],
)
def test_other_lengths_and_missing_features_are_named(after, lengths, message):
    features = [make_features([3], size) | {"a\nb": np.array([[1]])} for size in (4, 5)]
    mixed = [record + after for some in features for record in serialize_examples(some)]
    batch = join_records(mixed, "x.tfrecord", 11)
    with pytest.raises(InputError, match=rf"x\.tfrecord, {message}"):
        parse_examples(batch, lengths)


@pytest.mark.parametrize("length", [0, 1])
def test_features_of_another_type_are_named(length):
    record = example({"input_ids": [1.5], "words": [3]})
    with pytest.raises(InputError, match=r"record 7: input_ids must be a int64_list\. Received: a float"):
        parse_examples(join_records([record], "x.tfrecord", 7), {schema.INPUT_IDS: length})


@BOTH_FORMS
def test_a_feature_without_a_value_or_a_kind_has_length_0(after):
    record = Example.FromString(example({schema.INPUT_IDS: [5, 300]}))
    assert not record.features.feature[schema.MASKED_LM_IDS].WhichOneof("kind")  # asking makes it
    batch = join_records([record.SerializeToString(deterministic=True) + after] * 2)
    found = parse_examples(batch, {schema.INPUT_IDS: 2, schema.MASKED_LM_IDS: 0})
    assert found[schema.INPUT_IDS].tolist() == [[5, 300]] * 2
    assert found[schema.MASKED_LM_IDS].shape == (2, 0)


@BOTH_FORMS
def test_records_of_several_files_keep_their_origins(after):
    records = serialize_examples(make_features([3], 4)) + serialize_examples(make_features([3], 5))
    batch = join_records([record + after for record in records])
    origins = [("a.tfrecord", 7), ("b.tfrecord", 2)]
    with pytest.raises(InputError, match=r"b\.tfrecord, record 2: input_ids must have length 4"):
        parse_examples(batch, {schema.INPUT_IDS: 4}, origins=origins)
