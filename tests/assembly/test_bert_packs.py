"""BERT's sequences are assembled each exactly once and unchanged, with room for all predictions."""

import itertools
from collections import Counter

import numpy as np
import pytest
from unpacked_records import list_packed, list_unpacked, load, make_features, write_features

from bert_packed import schema
from bert_packed.assembly.assignment import assign_sequences
from bert_packed.assembly.record_kinds import BertKind, assemble_packs
from bert_packed.core.settings import InputError
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import count_lengths
from bert_packed.packing.plan import make_plan

S = 16


def make_case(tmp_path, depth="max"):
    lengths = np.random.default_rng(0).integers(1, S + 1, 60)
    features = make_features(lengths, S)
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    plan = pack_lpfhp(count_lengths(lengths, S), S, depth)
    return features, sequences, plan, assign_sequences(plan, sequences["lengths"], seed=7)


@pytest.mark.parametrize("depth", [1, 2, 3, "max"])
def test_every_sequence_is_in_one_pack_unchanged(tmp_path, depth):
    features, sequences, plan, packs = make_case(tmp_path, depth)
    assert sorted(packs.members) == list(range(60))
    spec = schema.PackSpec(S, plan.depth, BertKind(S).measure(sequences, packs))
    arrays = assemble_packs(sequences, packs, spec)
    assert Counter(list_packed(arrays)) == Counter(list_unpacked(features))
    assert arrays[schema.INPUT_IDS].shape == (plan.num_packs, S)
    if depth != 1:
        assert np.mean(arrays[schema.INPUT_MASK].max(axis=1) > 1) > 0.3  # packs that really are packs
    lengths = sequences["lengths"]
    assert Counter(
        tuple(sorted(lengths[packs.between(i, i + 1).members].tolist())) for i in range(len(packs))
    ) == Counter(plan.strategies)
    # packs of any part are those of the whole
    halves = [assemble_packs(sequences, packs.between(*ends), spec) for ends in ((0, 5), (5, len(packs)))]
    for name, values in arrays.items():
        assert np.array_equal(values, np.concatenate([half[name] for half in halves])), name


def test_assembled_arrays_are_the_record_of_the_schema(tmp_path):
    features = make_features([4, 3], 8, max_predictions=2)
    features[schema.INPUT_IDS][:, :4] = [[2, 7, 4, 3], [2, 9, 3, 0]]
    features[schema.SEGMENT_IDS][:, :4] = [[0, 0, 1, 1], [0, 0, 0, 0]]
    features[schema.MASKED_LM_POSITIONS][:] = [[2, 0], [1, 0]]
    features[schema.MASKED_LM_IDS][:] = [[8, 0], [9, 0]]
    features[schema.MASKED_LM_WEIGHTS][:] = [[1, 0], [1, 0]]
    features[schema.NEXT_SENTENCE_LABELS][:] = [[1], [0]]
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    plan = make_plan("test", 8, "max", [((3, 4), 1)])
    packs = assign_sequences(plan, sequences["lengths"], seed=0)
    assert packs.members.tolist() == [1, 0]  # ascending length
    expected = {
        "input_ids": [2, 9, 3, 2, 7, 4, 3, 0],
        "input_mask": [1, 1, 1, 2, 2, 2, 2, 0],
        "segment_ids": [0, 0, 0, 0, 0, 1, 1, 0],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 0],
        "masked_lm_positions": [1, 5, 0],
        "masked_lm_ids": [9, 8, 0],
        "masked_lm_weights": [1, 2, 0],
        "next_sentence_positions": [0, 3, 0],
        "next_sentence_labels": [0, 1, 0],
        "next_sentence_weights": [1, 1, 0],
    }
    for weights in ("sequence", "binary"):
        arrays = BertKind(8, masked_lm_weights=weights).assemble(sequences, packs, schema.PackSpec(8, 3, 3))
        assert {name: values[0].tolist() for name, values in arrays.items()} == expected
        expected["masked_lm_weights"] = [1, 1, 0]


def test_packs_over_the_spec_are_refused(tmp_path):
    """One token, one sequence or one prediction is too many."""
    _, sequences, _, packs = make_case(tmp_path)
    pairs = list(itertools.pairwise(packs.offsets.tolist()))
    needed = [
        max(int(sizes[packs.members[first:last]].sum()) for first, last in pairs)
        for sizes in (sequences["lengths"], np.ones(len(sequences), int), sequences["num_predictions"])
    ]
    assert len(set(needed)) == 3
    assert assemble_packs(sequences, packs, schema.PackSpec(*needed))
    for place in range(3):
        smaller = [size - (number == place) for number, size in enumerate(needed)]
        with pytest.raises(ValueError, match="packs must fit `spec`"):
            assemble_packs(sequences, packs, schema.PackSpec(*smaller))


def test_room_for_predictions_is_measured_or_set():
    for setting, measured, found in ((0, 5, 5), (0, 0, 1), (5, 5, 5), (7, 5, 7), (1, 0, 1)):
        kind = BertKind(16, max_predictions_per_pack=setting)
        assert kind.make_spec(3, measured) == schema.PackSpec(16, 3, found)
    with pytest.raises(InputError, match=r"must be at least 6, .* Received: 5\."):
        BertKind(16, max_predictions_per_pack=5).make_spec(3, 6)


# Overlong sequences


@pytest.fixture
def overlong(tmp_path):
    """Sequences of 3, 6 and 5 tokens."""
    features = make_features([3, 6, 5], 8, max_predictions=3)
    features[schema.INPUT_IDS][1] = [2, 7, 4, 6, 9, 3, 0, 0]
    features[schema.SEGMENT_IDS][1] = [0, 0, 0, 0, 1, 1, 0, 0]
    features[schema.MASKED_LM_POSITIONS][1] = [2, 3, 5]
    features[schema.MASKED_LM_IDS][1] = [20, 30, 50]
    features[schema.MASKED_LM_WEIGHTS][1] = 1
    return load(write_features(tmp_path / "in.tfrecord", features))


def test_truncation_keeps_the_start_and_the_closing_token(overlong):
    short, counts = BertKind(5, "truncate").fit(overlong)
    assert counts == {"truncated": 1, "dropped": 0}
    assert short["lengths"].tolist() == [3, 5, 5]
    assert short["tokens"][3:8].tolist() == [2, 7, 4, 6, 3]
    assert short["token_type_ids"][3:8].tolist() == [0, 0, 0, 0, 1]
    shorter, counts = BertKind(4, "truncate").fit(overlong)
    assert counts == {"truncated": 2, "dropped": 0}
    assert shorter["lengths"].tolist() == [3, 4, 4]
    assert shorter["tokens"][:3].tolist() == overlong["tokens"][:3].tolist()
    assert shorter["tokens"][3:7].tolist() == [2, 7, 4, 3]
    assert shorter["token_type_ids"][3:7].tolist() == [0, 0, 0, 1]  # the [SEP] stays sentence B's
    predictions = slice(*shorter.offsets("prediction_ids")[1:3])
    # position 3 falls away; the last token's prediction moves with it
    assert shorter["prediction_positions"][predictions].tolist() == [2, 3]
    assert shorter["prediction_ids"][predictions].tolist() == [20, 50]


def test_dropping_and_refusing(overlong):
    kept, counts = BertKind(5, "drop").fit(overlong)
    assert counts == {"truncated": 0, "dropped": 1} and kept["record_numbers"].tolist() == [1, 3]
    for choice in ("error", "truncate", "drop"):
        assert BertKind(6, choice).fit(overlong) == (overlong, {"truncated": 0, "dropped": 0})
    # the first that is too long is named, even if it is not the longest
    for length, record, received in ((5, 2, 6), (2, 1, 3)):
        with pytest.raises(
            InputError, match=rf"record {record}: .*max_seq_length={length} .*Received: {received} tokens"
        ):
            BertKind(length).fit(overlong)
