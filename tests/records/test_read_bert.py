"""BERT's records are read as sequences; what breaks a rule is named by file, record and rule."""

import re

import numpy as np
import pytest
from packed_records import CAUSAL_PACK, PACK
from unpacked_records import PREDICTIONS, list_unpacked, load, make_features, write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import record_rules, tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.examples import Example
from bert_packed.records.read_bert import read_packed, read_unpacked
from bert_packed.records.record_rules import LayoutError
from bert_packed.records.sequences import concatenate, take


def write_pack(path, **changed):
    features = {name: np.array([changed.get(name, values)]) for name, values in PACK.items()}
    return write_features(path, features)


@pytest.mark.parametrize(("lengths", "size"), [([5, 8, 2, 7, 8], 8), ([300, 2, 512, 256], 512)])
def test_unpacked_records_are_read_in_columns(tmp_path, lengths, size, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    features = make_features(lengths, size)
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    assert sequences["lengths"].tolist() == lengths
    assert sequences["record_numbers"].tolist() == list(range(1, len(lengths) + 1))
    assert sequences.origin(2).endswith("in.tfrecord, record 3")
    for index, (tokens, token_types, predictions, label) in enumerate(list_unpacked(features)):
        one = take(sequences, np.array([index]))
        assert one["tokens"].tolist() == list(tokens)
        assert one["token_type_ids"].tolist() == list(token_types)
        assert list(zip(one["prediction_positions"], one["prediction_ids"], strict=True)) == list(predictions)
        assert one["next_sentence_labels"].tolist() == [label]


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


def test_values_after_an_empty_first_record_are_not_lost(tmp_path):
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
def test_invalid_values_are_named_by_record(tmp_path, feature, values, message):
    features = make_features([3, 3, 3], 4, max_predictions=2)
    features[schema.MASKED_LM_POSITIONS][:] = [1, 2]
    features[schema.MASKED_LM_WEIGHTS][:] = 1
    records = serialize_examples(features)
    record = Example.FromString(records[1])  # ours are never negative
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


# Packs


@pytest.mark.parametrize("weights", [[1, 2, 0], [1, 1, 0]])  # 1 for all as other programs want them
def test_packs_are_read_as_their_sequences(tmp_path, monkeypatch, weights):
    """Numbered on over batches, with predictions that stay with the sequences of their places."""
    features = {name: np.array([values] * 5) for name, values in PACK.items()}
    features[schema.MASKED_LM_IDS][:, 0] = range(11, 16)
    features[schema.MASKED_LM_WEIGHTS][:] = weights
    path = write_features(tmp_path / "p.tfrecord", features)
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    sequences = concatenate(list(read_packed(path)))
    assert sequences["lengths"].tolist() == [4, 3] * 5
    assert sequences["tokens"].tolist() == [2, 7, 4, 3, 2, 9, 3] * 5
    assert sequences["token_type_ids"].tolist() == [0, 0, 1, 1, 0, 0, 0] * 5
    assert sequences["num_predictions"].tolist() == [1] * 10
    assert sequences["prediction_positions"].tolist() == [2, 1] * 5
    assert sequences["prediction_ids"].tolist() == [11, 9, 12, 9, 13, 9, 14, 9, 15, 9]
    assert sequences["next_sentence_labels"].tolist() == [1, 0] * 5
    assert sequences["record_numbers"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    with pytest.raises(InputError, match=r"p\.tfrecord must hold unpacked records.*packed already"):
        list(read_unpacked(path))


RULES = [
    ({schema.INPUT_MASK: [2, 2, 2, 2, 1, 1, 1, 0]}, "input_mask must begin with sequence 1. Received: 2"),
    ({schema.INPUT_MASK: [0] * 8}, "input_mask must begin with sequence 1. Received: 0"),
    ({schema.INPUT_MASK: [1, 1, 1, 1, 3, 3, 3, 0]}, "and end in padding 0. Received: 3 at index 4"),
    ({schema.INPUT_MASK: [1, 1, 1, 1, 2, 2, 1, 0]}, "and end in padding 0. Received: 1 at index 6"),
    ({schema.INPUT_MASK: [1, 2, 3, 4, 4, 4, 4, 0]}, "input_mask must be at most K=3. Received: 4 at index 3"),
    # padding is in the middle, which nothing else betrays
    (
        {
            schema.INPUT_IDS: [2, 7, 4, 0, 2, 9, 3, 0],
            schema.INPUT_MASK: [1, 1, 1, 0, 2, 2, 2, 0],
            schema.SEGMENT_IDS: [0] * 8,
            schema.POSITION_IDS: [0, 1, 2, 0, 0, 1, 2, 0],
        },
        "and end in padding 0. Received: 2 at index 4",
    ),
    (
        {
            schema.INPUT_IDS: [2, 7, 4, 3, 0, 9, 3, 0],
            schema.INPUT_MASK: [1, 1, 1, 1, 0, 1, 1, 0],
            schema.SEGMENT_IDS: [0] * 8,
            schema.POSITION_IDS: [0, 1, 2, 3, 0, 0, 1, 0],
        },
        "and end in padding 0. Received: 1 at index 5",
    ),
    ({schema.INPUT_MASK: [1, 1, 1, 2, 2, 2, 2, 0]}, "position_ids must restart at 0 in every sequence"),
    ({schema.POSITION_IDS: [0, 1, 2, 3, 4, 5, 6, 0]}, "must restart at 0 in every sequence. Received: 4"),
    ({schema.POSITION_IDS: [1, 2, 3, 4, 0, 1, 2, 0]}, "must restart at 0 in every sequence. Received: 1"),
    ({schema.POSITION_IDS: [0, 1, 2, 3, 0, 1, 2, 3]}, "must restart at 0 in every sequence. Received: 3"),
    ({schema.INPUT_IDS: [2, 7, 4, 3, 2, 9, 3, 5]}, "input_ids must be 0 in padding. Received: 5 at index 7"),
    ({schema.INPUT_IDS: [2, 7, 2**31, 3, 2, 9, 3, 0]}, "input_ids must be in 0..2147483647. Received: 21474"),
    ({schema.SEGMENT_IDS: [0, 0, 1, 1, 0, 0, 0, 1]}, "segment_ids must be 0 in padding. Received: 1"),
    ({schema.SEGMENT_IDS: [0, 0, 1, 1, 2, 2, 2, 0]}, "segment_ids must be 0 or 1. Received: 2 at index 4"),
    ({schema.MASKED_LM_POSITIONS: [2, 8, 0]}, "masked_lm_positions must lie within the pack. Received: 8"),
    (
        {schema.MASKED_LM_POSITIONS: [2, 1, 0], schema.MASKED_LM_WEIGHTS: [1, 1, 0]},
        "masked_lm_positions must ascend. Received: 1 at index 1",
    ),
    (
        {schema.MASKED_LM_POSITIONS: [1, 1, 0], schema.MASKED_LM_WEIGHTS: [1, 1, 0]},
        "masked_lm_positions must ascend. Received: 1 at index 1",
    ),
    ({schema.MASKED_LM_POSITIONS: [2, 5, 6]}, "masked_lm_positions must be 0 where unused. Received: 6"),
    ({schema.MASKED_LM_POSITIONS: [5, 2, 0]}, "must be the sequence of the prediction's position"),
    ({schema.MASKED_LM_IDS: [8, 9, 9]}, "masked_lm_ids must be 0 where unused. Received: 9 at index 2"),
    ({schema.MASKED_LM_IDS: [8, 2**31, 0]}, "masked_lm_ids must be in 0..2147483647. Received: 21474"),
    ({schema.MASKED_LM_WEIGHTS: [2, 1, 0]}, "of the prediction's position. Received: 2.0 at index 0"),
    ({schema.MASKED_LM_WEIGHTS: [1, 1.5, 0]}, "of the prediction's position. Received: 1.5 at index 1"),
    ({schema.MASKED_LM_WEIGHTS: [0, 2, 0]}, "masked_lm_weights must end in zeros. Received: 2.0 at index 1"),
    ({schema.NEXT_SENTENCE_POSITIONS: [0, 3, 0]}, "must be the sequence's [CLS]. Received: 3 at index 1"),
    ({schema.NEXT_SENTENCE_POSITIONS: [4, 0, 0]}, "must be the sequence's [CLS]. Received: 4 at index 0"),
    ({schema.NEXT_SENTENCE_LABELS: [1, 0, 1]}, "must be 0 in an unused slot. Received: 1 at index 2"),
    ({schema.NEXT_SENTENCE_LABELS: [1, 2, 0]}, "next_sentence_labels must be 0 or 1. Received: 2"),
    ({schema.NEXT_SENTENCE_WEIGHTS: [1, 1, 1]}, "1 per sequence, else 0. Received: 1.0 at index 2"),
    ({schema.NEXT_SENTENCE_WEIGHTS: [1, 0, 0]}, "1 per sequence, else 0. Received: 0.0 at index 1"),
    ({schema.NEXT_SENTENCE_WEIGHTS: [1, 2, 0]}, "1 per sequence, else 0. Received: 2.0 at index 1"),
]


@pytest.mark.parametrize(("changed", "message"), RULES)
def test_the_rule_that_is_broken_is_named(tmp_path, changed, message):
    """The second of two packs breaks it."""
    features = {name: np.array([values, changed.get(name, values)]) for name, values in PACK.items()}
    path = write_features(tmp_path / "p.tfrecord", features)
    with pytest.raises(LayoutError, match=rf"p\.tfrecord, record 2: .*{re.escape(message)}"):
        list(read_packed(path))


def test_the_last_slot_may_be_used(tmp_path):
    changed = {schema.INPUT_MASK: [1, 1, 1, 1, 2, 2, 3, 0], schema.POSITION_IDS: [0, 1, 2, 3, 0, 1, 0, 0]}
    changed |= {schema.NEXT_SENTENCE_POSITIONS: [0, 4, 6], schema.NEXT_SENTENCE_WEIGHTS: [1, 1, 1]}
    changed[schema.INPUT_IDS] = [2**31 - 1, 7, 4, 3, 2, 9, 3, 0]
    (sequences,) = read_packed(write_pack(tmp_path / "p.tfrecord", **changed))
    assert sequences["lengths"].tolist() == [4, 2, 1] and sequences["tokens"][0] == 2**31 - 1


def test_packs_have_one_spec(tmp_path):
    path = write_pack(tmp_path / "a.tfrecord")
    assert record_rules.read_pack_spec([path, path]) == schema.PackSpec(8, 3, 3)
    fewer = {"masked_lm_positions": [2, 5], "masked_lm_ids": [8, 9], "masked_lm_weights": [1, 2]}
    with pytest.raises(InputError, match=r"a\.tfrecord: 8, 3, 3; .*b\.tfrecord: 8, 3, 2\."):
        record_rules.read_pack_spec([path, write_pack(tmp_path / "b.tfrecord", **fewer)])


def test_the_spec_of_packs_for_causal_language_modelling(tmp_path):
    causal = write_features(tmp_path / "c.tfrecord", {name: [row] for name, row in CAUSAL_PACK.items()})
    spec = record_rules.read_pack_spec([causal])
    assert spec == schema.PackSpec(8, 3, 0) and spec.objective == schema.CAUSAL_LM
    berts = write_pack(tmp_path / "p.tfrecord")
    with pytest.raises(InputError, match=r"one objective.*c\.tfrecord: causal_lm; .*p\.tfrecord: mlm_nsp\."):
        record_rules.read_pack_spec([causal, berts])
    objectives = [record_rules.find_common_objective([path, path]) for path in (causal, berts)]
    assert objectives == ["causal_lm", "mlm_nsp"]
    short = {name: [row[:7]] if name == schema.LABEL_IDS else [row] for name, row in CAUSAL_PACK.items()}
    with pytest.raises(InputError, match=r"label_ids must have length 8\. Received: 7"):
        record_rules.read_pack_spec([write_features(tmp_path / "short.tfrecord", short)])
    unpacked = {name: [[1]] for name in schema.CAUSAL_UNPACKED_LENGTHS}
    with pytest.raises(InputError, match="holds unpacked records; pack them first"):
        record_rules.read_pack_spec([write_features(tmp_path / "u.tfrecord", unpacked)])


def test_unpacked_where_packs_are_wanted_gives_the_command(tmp_path):
    unpacked = write_features(tmp_path / "in.tfrecord", make_features([5, 8], 8))
    command = (
        rf"python data_gen/pack_tfrecords\.py --input_file={unpacked} --max_seq_length=\d+ --output_dir=\S+"
    )
    with pytest.raises(InputError, match=rf"holds unpacked records; pack them first: {command}"):
        record_rules.read_pack_spec([unpacked])


@pytest.mark.parametrize(
    "read",
    [
        lambda path: record_rules.read_pack_spec([path]),
        lambda path: list(read_packed(path)),
        lambda path: list(read_unpacked(path)),
    ],
)
def test_graphcores_layout_is_refused_by_its_name(tmp_path, read):
    """Packs that `--output_format=graphcore` made, as long as there was one."""
    features = {f"packed_{name}": np.array([values]) for name, values in PACK.items()}
    path = write_features(tmp_path / "p.tfrecord", features)
    with pytest.raises(InputError, match=r"p\.tfrecord must be packed again: .* Graphcore's .* 0\.1\.0 "):
        read(path)
