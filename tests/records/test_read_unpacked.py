"""Unpacked records become columns; what breaks a rule is named by file, record and rule."""

import numpy as np
import pytest
import tensorflow as tf
from packed_records import PACK
from unpacked_records import list_unpacked, load, make_features, write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.read_bert import read_unpacked
from bert_packed.records.sequences import concatenate, take

PREDICTIONS = (schema.MASKED_LM_POSITIONS, schema.MASKED_LM_IDS, schema.MASKED_LM_WEIGHTS)


def assert_holds(sequences, features):
    for index, (tokens, token_types, predictions, label) in enumerate(list_unpacked(features)):
        one = take(sequences, np.array([index]))
        assert one["tokens"].tolist() == list(tokens)
        assert one["token_type_ids"].tolist() == list(token_types)
        assert list(zip(one["prediction_positions"], one["prediction_ids"], strict=True)) == list(predictions)
        assert one["next_sentence_labels"].tolist() == [label]


@pytest.mark.parametrize(("lengths", "size"), [([5, 8, 2, 7, 8], 8), ([300, 2, 512, 256], 512)])
def test_unpacked_records_are_read_in_columns(tmp_path, lengths, size, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    features = make_features(lengths, size)
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    assert sequences["lengths"].tolist() == lengths
    assert sequences["record_numbers"].tolist() == list(range(1, len(lengths) + 1))
    assert sequences.origin(2).endswith("in.tfrecord, record 3")
    assert_holds(sequences, features)


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
    assert_holds(take(joined, [0, 1]), first)
    assert_holds(take(joined, np.array([False, False, True, True])), second)


def test_predictions_in_any_order_become_ascending(tmp_path):
    features = make_features([6], 8)
    features[schema.MASKED_LM_POSITIONS][:] = [0, 4, 1, 3]
    features[schema.MASKED_LM_IDS][:] = [90, 94, 91, 93]
    features[schema.MASKED_LM_WEIGHTS][:] = [0, 1, 1, 1]
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    assert sequences["prediction_positions"].tolist() == [1, 3, 4]
    assert sequences["prediction_ids"].tolist() == [91, 93, 94]


def test_the_first_record_says_how_long_features_are(tmp_path):
    bad = make_features([3], 4)
    del bad[schema.MASKED_LM_IDS]
    with pytest.raises(
        InputError, match=r"record 1: features masked_lm_ids are missing\. Received: input_ids, "
    ):
        load(write_features(tmp_path / "x.tfrecord", bad))
    wrong = make_features([3], 4)
    wrong[schema.INPUT_MASK] = wrong[schema.INPUT_MASK][:, :3]
    with pytest.raises(InputError, match=r"record 1: input_mask must have length 4\. Received: 3"):
        load(write_features(tmp_path / "y.tfrecord", wrong))
    mixed = [record for size in (4, 5) for record in serialize_examples(make_features([3], size))]
    tfrecords.write_records(tmp_path / "z.tfrecord", mixed)
    with pytest.raises(InputError, match=r"z\.tfrecord, record 2: input_ids must have length 4.*Received: 5"):
        load(tmp_path / "z.tfrecord")


def test_values_of_a_feature_that_is_empty_in_the_first_record_are_not_lost(tmp_path):
    without, with_three = make_features([5], 8), make_features([5, 5], 8, max_predictions=3)
    for name in PREDICTIONS:
        without[name] = without[name][:, :0]
    first, *others = serialize_examples(without) + serialize_examples(with_three)
    tfrecords.write_records(tmp_path / "x.tfrecord", [first, first, *others])
    with pytest.raises(InputError, match=r"record 3: masked_lm_positions must have length 0.* Received: 3"):
        load(tmp_path / "x.tfrecord")
    for after in (b"", b"\x12\x00"):
        tfrecords.write_records(tmp_path / "y.tfrecord", [first + after] * 3)
        assert load(tmp_path / "y.tfrecord")["num_predictions"].tolist() == [0, 0, 0]


def test_packed_where_unpacked_is_wanted(tmp_path):
    path = write_features(tmp_path / "p.tfrecord", {name: [values] for name, values in PACK.items()})
    with pytest.raises(InputError, match=r"p\.tfrecord must hold unpacked records.*packed already"):
        list(read_unpacked(path))


@pytest.mark.parametrize(
    ("feature", "values", "message"),
    [
        (schema.INPUT_MASK, [1, 0, 1, 0], r"input_mask must be ones, then zeros\. Received: 1 at index 2"),
        (schema.INPUT_MASK, [0, 0, 0, 0], r"input_mask must begin with 1"),
        (schema.INPUT_MASK, [1, 2, 0, 0], r"input_mask must be 0 or 1\. Received: 2"),
        (schema.INPUT_IDS, [1, 2**31, 1, 0], r"input_ids must be in 0\.\.2147483647\. Received: 2147483648"),
        (schema.INPUT_IDS, [-4, 1, 1, 0], r"input_ids must be in 0.* Received: -4 at index 0"),
        (schema.SEGMENT_IDS, [0, 2, 1, 0], r"segment_ids must be 0 or 1\. Received: 2"),
        (schema.NEXT_SENTENCE_LABELS, [2], r"next_sentence_labels must be 0 or 1\. Received: 2"),
        (schema.MASKED_LM_POSITIONS, [1, 3], r"masked_lm_positions must lie within the .* Received: 3"),
        (schema.MASKED_LM_POSITIONS, [-1, 2], r"masked_lm_positions must lie within the .* Received: -1"),
        (schema.MASKED_LM_POSITIONS, [1, 1], r"masked_lm_positions must not name .* Received: 1 at index 1"),
        (schema.MASKED_LM_IDS, [1, 2**31], r"masked_lm_ids must be in 0\.\.2147483647"),
        (schema.MASKED_LM_IDS, [-1, 1], r"masked_lm_ids must be in 0\.\.2147483647\. Received: -1"),
        (schema.MASKED_LM_WEIGHTS, [1, 0.5], r"masked_lm_weights must be 0 or 1\. Received: 0\.5"),
    ],
)
def test_nonsense_is_named_by_record(tmp_path, feature, values, message):
    features = make_features([3, 3, 3], 4, max_predictions=2)
    features[schema.MASKED_LM_POSITIONS][:] = [1, 2]
    features[schema.MASKED_LM_WEIGHTS][:] = 1
    records = serialize_examples(features)
    record = tf.train.Example.FromString(records[1])  # ours are never negative
    if feature == schema.MASKED_LM_WEIGHTS:
        record.features.feature[feature].float_list.value[:] = values
    else:
        record.features.feature[feature].int64_list.value[:] = values
    records[1] = record.SerializeToString(deterministic=True)
    tfrecords.write_records(tmp_path / "x.tfrecord", records)
    with pytest.raises(InputError, match=rf"x\.tfrecord, record 2: {message}"):
        load(tmp_path / "x.tfrecord")


def test_the_largest_numbers_are_read(tmp_path):
    features = make_features([3], 4)
    features[schema.INPUT_IDS][0, 1] = features[schema.MASKED_LM_IDS][0, 0] = 2**31 - 1
    features[schema.MASKED_LM_WEIGHTS][0, 0] = 1
    sequences = load(write_features(tmp_path / "x.tfrecord", features))
    assert sequences["tokens"][1] == sequences["prediction_ids"][0] == 2**31 - 1
