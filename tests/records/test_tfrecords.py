"""Records survive writing and reading; each kind of bad file or record gets its own message."""

import io
import os
import stat

import numpy as np
import pytest
import tensorflow as tf
from unpacked_records import list_unpacked, load, make_features, write_features

from bert_packed import schema
from bert_packed.core import files
from bert_packed.core.settings import InputError
from bert_packed.records import record_batches, tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.record_batches import join_records
from bert_packed.records.sequences import concatenate, range_indices, rank_in_groups, take


@pytest.fixture
def unpacked(tmp_path):
    return write_features(tmp_path / "in.tfrecord", make_features([5, 8, 2, 7, 8], 8))


def test_written_file_is_read_back(tmp_path):
    entry = tfrecords.write_records(tmp_path / "x.tfrecord", [b"one", b"two", b"three"])
    assert list(tfrecords.read_records(tmp_path / "x.tfrecord")) == [b"one", b"two", b"three"]
    assert tfrecords.count_records(tmp_path / "x.tfrecord") == 3
    assert (entry.name, entry.num_records) == ("x.tfrecord", 3)
    assert entry.sha256 == files.file_sha256(tmp_path / "x.tfrecord")


def test_a_file_written_whole_has_its_own_name(tmp_path):
    entry = tfrecords.write_file(tmp_path / "x.tfrecord", [b"one", b"two"])
    assert (entry.name, entry.num_records) == ("x.tfrecord", 2)
    assert entry.sha256 == files.file_sha256(tmp_path / "x.tfrecord")
    assert [path.name for path in tmp_path.iterdir()] == ["x.tfrecord"]


def has_full_device():
    return os.path.exists("/dev/full") and stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.skipif(not has_full_device(), reason="needs a device that is always full")
def test_full_disk_is_an_operating_system_error():
    with pytest.raises(OSError, match=r"/dev/full: .*No space left"):
        tfrecords.write_records("/dev/full", [b"x" * 100])


def test_batches_follow_one_another(tmp_path):
    tfrecords.write_records(tmp_path / "x.tfrecord", [b"%d" % i for i in range(7)])
    batches = [batch.to_list() for batch in tfrecords.read_batches(tmp_path / "x.tfrecord", batch_size=3)]
    assert batches == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6"]]


def test_batches_are_bounded_by_bytes(tmp_path):
    """The largest record of a batch does not count: any can be read. Order and content do not change."""
    path = tmp_path / "x.tfrecord"
    sizes = [*[10] * 50, 5000, *[10] * 50, *[400] * 30, *[10] * 50]
    serialized = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    tfrecords.write_records(path, serialized)
    batches = [batch.to_list() for batch in tfrecords.read_batches(path, 64, max_bytes=1000)]
    assert [record for batch in batches for record in batch] == serialized
    assert len(batches[0]) == 64  # 5,000 and 63 small ones
    for batch in batches:
        assert sum(map(len, batch)) - max(map(len, batch)) <= 1000
    assert max(len(batch) for batch in batches if len(batch[0]) == 400) > 1
    one_by_one = [len(batch) for batch in tfrecords.read_batches(path, 64, max_bytes=0)]
    assert one_by_one == [1] * len(sizes)


@pytest.mark.parametrize(("most_bytes", "sizes"), [(150, [4, 4]), (149, [4, 3, 1]), (49, [4, 1, 1, 1, 1])])
def test_batches_end_where_the_next_record_would_be_too_much(tmp_path, most_bytes, sizes):
    """Four records of 1 byte, then of 50: the largest of a batch is not counted."""
    tfrecords.write_records(tmp_path / "x.tfrecord", [b"x" * size for size in [*[1] * 4, *[50] * 4]])
    batches = tfrecords.read_batches(tmp_path / "x.tfrecord", 4, most_bytes)
    assert [len(batch) for batch in batches] == sizes


def test_batches_are_read_across_and_beyond_the_pieces_of_a_file(tmp_path, monkeypatch):
    serialized = [bytes([size % 256]) * size for size in [3, 0, 500, 7, 90, 1]]
    path = tmp_path / "x.tfrecord"
    tfrecords.write_records(path, serialized)
    for read_ahead in (1, 8, 64, 2**20):
        monkeypatch.setattr(record_batches, "READ_AHEAD", read_ahead)
        assert list(tfrecords.read_records(path)) == serialized
    content = bytearray(path.read_bytes())
    for byte in (0, 7):  # a length that the file might have, and one that no memory has
        content[19 + byte] = 255  # of the second record's length
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"x\.tfrecord, record 2: the record is truncated or corrupt"):
            list(tfrecords.read_batches(path, max_bytes=100))


def test_a_damaged_length_is_not_followed_through_the_file(tmp_path, monkeypatch):
    """It might name all of a file that no memory holds."""
    path, num_read = tmp_path / "x.tfrecord", 0
    tfrecords.write_records(path, [b"x" * 100] * 50)
    content = bytearray(path.read_bytes())
    content[:2] = (5000).to_bytes(2, "little")
    path.write_bytes(content)

    class Counting(io.BytesIO):
        def read(self, size):
            nonlocal num_read
            num_read += size
            return super().read(size)

    monkeypatch.setattr(record_batches, "READ_AHEAD", 64)
    monkeypatch.setattr(files, "open_file", lambda path: Counting(content))
    with pytest.raises(InputError, match="is not a TFRecord file"):
        list(tfrecords.read_batches(path))
    assert num_read == 64


def test_what_stands_before_the_damage_is_read(tmp_path):
    path = tmp_path / "x.tfrecord"
    tfrecords.write_records(path, [b"abc", b"de", b"f" * 9])
    content = bytearray(path.read_bytes())
    content[19 + 12] ^= 1
    path.write_bytes(content)
    batches = tfrecords.read_batches(path)
    assert next(batches).to_list() == [b"abc"]
    with pytest.raises(InputError, match="record 2"):
        next(batches)


def test_an_error_of_the_disk_names_the_file(unpacked, monkeypatch):
    class Failing(io.BytesIO):
        def read(self, size):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "open_file", lambda path: Failing())
    with pytest.raises(OSError, match=r"in\.tfrecord: .*Input/output error") as found:
        list(tfrecords.read_batches(unpacked))
    assert not isinstance(found.value, InputError)


def test_sequences_longer_than_a_byte_counts(tmp_path):
    sequences = load(write_features(tmp_path / "in.tfrecord", make_features([300, 2, 512, 256], 512)))
    assert sequences["lengths"].tolist() == [300, 2, 512, 256]
    assert sequences["tokens"].dtype == np.int32


def test_unpacked_records_are_read_in_columns(tmp_path):
    features = make_features([5, 8, 2, 7, 8], 8)
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    assert sequences["lengths"].tolist() == [5, 8, 2, 7, 8]
    for index, (tokens, token_types, predictions, label) in enumerate(list_unpacked(features)):
        one = take(sequences, np.array([index]))
        assert one["tokens"].tolist() == list(tokens)
        assert one["token_type_ids"].tolist() == list(token_types)
        assert list(zip(one["prediction_positions"], one["prediction_ids"], strict=True)) == list(predictions)
        assert one["next_sentence_labels"].tolist() == [label]
        assert one["record_numbers"].tolist() == [index + 1]
    assert sequences.origin(2).endswith("in.tfrecord, record 3")


def test_files_of_other_widths_join(tmp_path):
    first = make_features([5, 8], 8, max_predictions=4)
    second = make_features([3, 12], 16, seed=1, max_predictions=9)
    joined = concatenate(
        [
            load(write_features(tmp_path / "a.tfrecord", first)),
            load(write_features(tmp_path / "b.tfrecord", second)),
        ]
    )
    assert joined["lengths"].tolist() == [5, 8, 3, 12]
    assert joined["num_predictions"].sum() == sum(
        len(s[2]) for s in list_unpacked(first) + list_unpacked(second)
    )
    for some in (take(joined, [2, 1]), take(joined, np.array([False, True, True, False]))):
        found = {some.origin(i).split("/")[-1]: some["lengths"][i] for i in range(2)}
        assert found == {"a.tfrecord, record 2": 8, "b.tfrecord, record 1": 3}


def test_predictions_in_any_order_become_ascending(tmp_path):
    features = make_features([6], 8)
    features[schema.MASKED_LM_POSITIONS][:] = [0, 4, 1, 3]
    features[schema.MASKED_LM_IDS][:] = [90, 94, 91, 93]
    features[schema.MASKED_LM_WEIGHTS][:] = [0, 1, 1, 1]
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    assert sequences["prediction_positions"].tolist() == [1, 3, 4]
    assert sequences["prediction_ids"].tolist() == [91, 93, 94]


def test_range_indices():
    assert range_indices([5, 0], [3, 2]).tolist() == [5, 6, 7, 0, 1]


def test_ranks_count_those_before():
    groups = np.random.default_rng(0).integers(0, 5, 300).tolist()
    expected = [groups[:place].count(group) for place, group in enumerate(groups)]
    assert rank_in_groups(np.array(groups)).tolist() == expected


# Files


@pytest.mark.parametrize("content", [b"some text, longer than a header", b"\x1f\x8b" + bytes(50), b"short"])
def test_not_a_tfrecord(tmp_path, content):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.tfrecord is not a TFRecord file"):
        list(tfrecords.read_records(path))


def test_truncated_and_corrupt_records_are_named(tmp_path):
    path = tmp_path / "x.tfrecord"
    tfrecords.write_records(path, [b"a" * 20] * 3)  # 36 bytes each
    content = path.read_bytes()
    for cut in (1, 5, 25, 30, 35):  # the last three within the header, which TensorFlow lets pass
        path.write_bytes(content[:-cut])
        with pytest.raises(InputError, match=r"x\.tfrecord, record 3: the record is truncated or corrupt"):
            list(tfrecords.read_records(path))
    path.write_bytes(content[:50] + b"#" + content[51:])
    with pytest.raises(InputError, match=r"x\.tfrecord, record 2: the record is truncated or corrupt"):
        tfrecords.count_records(path)


def test_empty_and_missing_files(tmp_path):
    (tmp_path / "x.tfrecord").touch()
    with pytest.raises(InputError, match=r"x\.tfrecord, which is empty"):
        list(tfrecords.read_records(tmp_path / "x.tfrecord"))
    with pytest.raises(OSError, match=r"none\.tfrecord"):
        list(tfrecords.read_records(tmp_path / "none.tfrecord"))


# Records


def test_record_that_is_no_example(tmp_path):
    good = serialize_examples(make_features([3], 4))
    tfrecords.write_records(tmp_path / "x.tfrecord", [*good, b"\xff\xff\xff"])
    with pytest.raises(InputError, match=r"record 2: must be a tf\.train\.Example"):
        load(tmp_path / "x.tfrecord")


def test_missing_feature_names_those_found(tmp_path):
    good, bad = make_features([3, 3], 4), make_features([3], 4)
    del bad[schema.MASKED_LM_IDS]
    with pytest.raises(
        InputError, match=r"record 1: features masked_lm_ids are missing\. Received: input_ids, "
    ):
        load(write_features(tmp_path / "x.tfrecord", bad))
    serialized = serialize_examples(good) + serialize_examples(bad)
    tfrecords.write_records(tmp_path / "y.tfrecord", serialized)
    with pytest.raises(InputError, match=r"y\.tfrecord, record 3: features masked_lm_ids are missing"):
        load(tmp_path / "y.tfrecord")


def test_feature_of_another_length_or_type(tmp_path):
    mixed = serialize_examples(make_features([3], 4)) + serialize_examples(make_features([3], 5))
    tfrecords.write_records(tmp_path / "x.tfrecord", mixed)
    with pytest.raises(InputError, match=r"record 2: input_ids must have length 4.*Received: 5"):
        load(tmp_path / "x.tfrecord")
    wrong = make_features([3], 4)
    wrong[schema.INPUT_MASK] = wrong[schema.INPUT_MASK][:, :3]
    with pytest.raises(InputError, match=r"record 1: input_mask must have length 4\. Received: 3"):
        load(write_features(tmp_path / "y.tfrecord", wrong))
    text = tf.train.Example.FromString(mixed[0])
    text.features.feature[schema.INPUT_IDS].bytes_list.value.append(b"words")
    tfrecords.write_records(tmp_path / "z.tfrecord", [text.SerializeToString()])
    with pytest.raises(
        InputError, match=r"record 1: input_ids must be a int64_list\. Received: a bytes_list"
    ):
        load(tmp_path / "z.tfrecord")


PREDICTIONS = (schema.MASKED_LM_POSITIONS, schema.MASKED_LM_IDS, schema.MASKED_LM_WEIGHTS)


@pytest.mark.parametrize("after", [b"", b"\x12\x00"], ids=["ours", "another form"])
def test_values_of_a_feature_that_is_empty_in_the_first_record_are_not_lost(tmp_path, after):
    without, with_three = make_features([5], 8), make_features([5, 5], 8, max_predictions=3)
    for name in PREDICTIONS:
        without[name] = without[name][:, :0]
    first, *others = [
        record + after for record in serialize_examples(without) + serialize_examples(with_three)
    ]
    tfrecords.write_records(tmp_path / "x.tfrecord", [first, first, *others])
    with pytest.raises(
        InputError,
        match=r"x\.tfrecord, record 3: masked_lm_positions must have length 0, as in the file's first "
        r"record\. Received: 3",
    ):
        load(tmp_path / "x.tfrecord")
    tfrecords.write_records(tmp_path / "y.tfrecord", [first] * 3)
    assert load(tmp_path / "y.tfrecord")["num_predictions"].tolist() == [0, 0, 0]


def test_records_of_later_batches_are_numbered_on():
    mixed = serialize_examples(make_features([3], 4)) + serialize_examples(make_features([3], 5))
    lengths = {schema.INPUT_IDS: 4}
    with pytest.raises(InputError, match=r"x, record 12: input_ids must have length 4.*Received: 5"):
        tfrecords.parse_examples(join_records(mixed), lengths, "x", 11)
    with pytest.raises(InputError, match=r"x, record 11: input_ids must hold float32\. Received: a int64"):
        tfrecords.parse_ragged(join_records(mixed), {schema.INPUT_IDS: "float32"}, "x", 11)


@pytest.mark.parametrize(
    ("feature", "values", "message"),
    [
        (schema.INPUT_MASK, [1, 0, 1, 0], r"input_mask must be ones, then zeros\. Received: 1 at index 2"),
        (schema.INPUT_MASK, [0, 0, 0, 0], r"input_mask must begin with 1"),
        (schema.INPUT_MASK, [1, 2, 0, 0], r"input_mask must be 0 or 1\. Received: 2"),
        (schema.INPUT_IDS, [1, 2**33, 1, 0], r"input_ids must be in 0\.\.2147483647\. Received: 8589934592"),
        (schema.SEGMENT_IDS, [0, 5, 1, 0], r"segment_ids must be 0 or 1\. Received: 5"),
        (schema.NEXT_SENTENCE_LABELS, [7], r"next_sentence_labels must be 0 or 1\. Received: 7"),
        (
            schema.MASKED_LM_POSITIONS,
            [1, 3],
            r"masked_lm_positions must lie within the sequence\. Received: 3",
        ),
        (
            schema.MASKED_LM_POSITIONS,
            [1, 1],
            r"masked_lm_positions must not name .* twice\. Received: 1 at index 1",
        ),
        (schema.MASKED_LM_IDS, [1, 2**33], r"masked_lm_ids must be in 0\.\.2147483647"),
        (schema.MASKED_LM_WEIGHTS, [1, 0.5], r"masked_lm_weights must be 0 or 1\. Received: 0\.5"),
    ],
)
def test_nonsense_is_named_by_record(tmp_path, feature, values, message):
    features = make_features([3, 3, 3], 4, max_predictions=2)
    features[schema.MASKED_LM_POSITIONS][:] = [1, 2]
    features[schema.MASKED_LM_WEIGHTS][:] = 1
    features[feature][1] = values
    with pytest.raises(InputError, match=rf"x\.tfrecord, record 2: {message}"):
        load(write_features(tmp_path / "x.tfrecord", features))


@pytest.mark.parametrize("feature", [schema.INPUT_IDS, schema.MASKED_LM_POSITIONS, schema.MASKED_LM_IDS])
def test_negative_numbers_are_refused(tmp_path, feature):
    features = make_features([3], 4)
    features[schema.MASKED_LM_WEIGHTS][:] = [1, 1, 0, 0]
    features[schema.MASKED_LM_POSITIONS][:] = [0, 1, 0, 0]
    record = tf.train.Example.FromString(serialize_examples(features)[0])
    record.features.feature[feature].int64_list.value[0] = -4
    tfrecords.write_records(tmp_path / "x.tfrecord", [record.SerializeToString()])
    with pytest.raises(InputError, match=rf"record 1: {feature} must .*Received: -4 at index 0"):
        load(tmp_path / "x.tfrecord")
