"""Each sequence is assembled exactly once and unchanged; packs are shuffled by their seed alone."""

import itertools
from collections import Counter

import numpy as np
import pytest
from causal_files import write_causal
from unpacked_records import list_packed, list_unpacked, load, make_features, write_features

from bert_packed import schema
from bert_packed.assembly.assignment import assign_sequences
from bert_packed.assembly.bert_packs import BertKind, assemble_packs
from bert_packed.assembly.causal_packs import CausalKind
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.packing.histogram import count_lengths
from bert_packed.packing.plan import make_plan
from bert_packed.records.read_causal import read_causal

S = 16


def make_case(tmp_path, seed=0, depth="max", algorithm="lpfhp"):
    lengths = np.random.default_rng(seed).integers(1, S + 1, 60)
    features = make_features(lengths, S, seed)
    sequences = load(write_features(tmp_path / "in.tfrecord", features))
    plan = ALGORITHMS[algorithm](count_lengths(lengths, S), S, depth)
    return features, sequences, plan


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("depth", [1, 2, 3, "max"])
def test_every_sequence_is_in_one_pack_unchanged(tmp_path, algorithm, depth):
    features, sequences, plan = make_case(tmp_path, depth=depth, algorithm=algorithm)
    packs = assign_sequences(plan, sequences["lengths"], seed=7)
    assert sorted(packs.members) == list(range(60))
    num_predictions = packs.totals(sequences["num_predictions"])
    spec = schema.PackSpec(S, plan.depth, int(num_predictions.max()))
    arrays = assemble_packs(sequences, packs, spec)
    assert Counter(list_packed(arrays)) == Counter(list_unpacked(features))
    assert arrays[schema.INPUT_IDS].shape == (plan.num_packs, S)
    if depth != 1:
        assert np.mean(arrays[schema.INPUT_MASK].max(axis=1) > 1) > 0.3  # packs that really are packs
    lengths = sequences["lengths"]
    assert Counter(
        tuple(sorted(lengths[packs.between(i, i + 1).members].tolist())) for i in range(len(packs))
    ) == Counter(plan.strategies)


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
    arrays = assemble_packs(sequences, packs, schema.PackSpec(8, 3, 3))
    assert {name: values[0].tolist() for name, values in arrays.items()} == {
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


def test_assignment_depends_on_the_seed_alone(tmp_path):
    _, sequences, plan = make_case(tmp_path)
    first = assign_sequences(plan, sequences["lengths"], seed=1)
    again = assign_sequences(plan, sequences["lengths"], seed=1)
    other = assign_sequences(plan, sequences["lengths"], seed=2)
    assert np.array_equal(first.members, again.members)
    assert not np.array_equal(first.members, other.members)


def test_equal_strategies_and_equal_lengths_are_spread():
    plan = make_plan("test", 8, "max", [((8,), 50), ((4, 4), 50)])
    lengths = np.repeat([8, 4], [50, 100])
    packs = assign_sequences(plan, lengths, seed=0)
    depths = np.diff(packs.offsets)
    assert np.count_nonzero(np.diff(depths)) > 30  # in order of strategy there would be one change
    members_of_8 = packs.members[lengths[packs.members] == 8]
    assert not np.array_equal(members_of_8, np.sort(members_of_8))


def test_plan_for_other_lengths_is_refused():
    plan = make_plan("test", 8, "max", [((3, 5), 1)])
    with pytest.raises(ValueError, match="one for the lengths"):
        assign_sequences(plan, np.array([3, 4]), seed=0)
    with pytest.raises(ValueError, match="one for the lengths"):
        assign_sequences(plan, np.array([3, 5, 5]), seed=0)


def test_part_is_a_run_of_packs(tmp_path):
    _, sequences, plan = make_case(tmp_path)
    packs = assign_sequences(plan, sequences["lengths"], seed=0)
    spec = schema.PackSpec(S, plan.depth, int(packs.totals(sequences["num_predictions"]).max()))
    whole = assemble_packs(sequences, packs, spec)
    halves = [assemble_packs(sequences, packs.between(*ends), spec) for ends in ((0, 5), (5, len(packs)))]
    for name, values in whole.items():
        assert np.array_equal(values, np.concatenate([half[name] for half in halves])), name


def test_packs_over_the_spec_are_refused(tmp_path):
    """By one token, one sequence or one prediction."""
    _, sequences, plan = make_case(tmp_path)
    packs = assign_sequences(plan, sequences["lengths"], seed=0)
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


# Overlong sequences


def overlong_case(tmp_path):
    features = make_features([3, 6, 5], 8, max_predictions=3)
    features[schema.INPUT_IDS][1] = [2, 7, 4, 6, 9, 3, 0, 0]
    features[schema.SEGMENT_IDS][1] = [0, 0, 0, 0, 1, 1, 0, 0]
    features[schema.MASKED_LM_POSITIONS][1] = [2, 3, 5]
    features[schema.MASKED_LM_IDS][1] = [20, 30, 50]
    features[schema.MASKED_LM_WEIGHTS][1] = 1
    return features, load(write_features(tmp_path / "in.tfrecord", features))


def test_truncation_keeps_the_start_and_the_closing_token(tmp_path):
    features, sequences = overlong_case(tmp_path)
    short, counts = BertKind(5, "truncate").fit(sequences)
    assert counts == {"truncated": 1, "dropped": 0}
    assert short["lengths"].tolist() == [3, 5, 5]
    assert short["tokens"][3:8].tolist() == [2, 7, 4, 6, 3]
    assert short["token_type_ids"][3:8].tolist() == [0, 0, 0, 0, 1]
    shorter, counts = BertKind(4, "truncate").fit(sequences)
    assert counts == {"truncated": 2, "dropped": 0}
    assert shorter["tokens"][3:7].tolist() == [2, 7, 4, 3]
    assert shorter["token_type_ids"][3:7].tolist() == [0, 0, 0, 1]  # the [SEP] stays sentence B's
    predictions = slice(*shorter.offsets("prediction_ids")[1:3])
    # position 3 falls away; the last token's prediction moves with it
    assert shorter["prediction_positions"][predictions].tolist() == [2, 3]
    assert shorter["prediction_ids"][predictions].tolist() == [20, 50]
    assert shorter["lengths"].tolist() == [3, 4, 4]
    untouched = list_unpacked(features)[0]
    assert tuple(shorter["tokens"][:3].tolist()) == untouched[0]


def test_dropping_and_refusing(tmp_path):
    _, sequences = overlong_case(tmp_path)
    kept, counts = BertKind(5, "drop").fit(sequences)
    assert counts == {"truncated": 0, "dropped": 1}
    assert kept["record_numbers"].tolist() == [1, 3]
    same, counts = BertKind(6, "error").fit(sequences)
    assert same is sequences and counts == {"truncated": 0, "dropped": 0}
    with pytest.raises(InputError, match=r"record 2: .*max_seq_length=5 .*Received: 6 tokens"):
        BertKind(5, "error").fit(sequences)
    # of several the first, not the longest
    with pytest.raises(InputError, match=r"record 1: .*max_seq_length=2 .*Received: 3 tokens"):
        BertKind(2, "error").fit(sequences)


def test_causal_sequences_are_dropped_or_refused_and_never_truncated(tmp_path):
    """Bytes of lost labels cannot be told from those that are left."""
    write_causal(tmp_path / "in.tfrecord", [3, 5, 6])
    (sequences,) = read_causal(str(tmp_path / "in.tfrecord"))
    kept, counts = CausalKind(5, "drop").fit(sequences)
    assert kept["record_numbers"].tolist() == [1, 2] and counts == {"truncated": 0, "dropped": 1}
    for overlong in ("error", "truncate"):
        assert CausalKind(6, overlong).fit(sequences) == (sequences, {"truncated": 0, "dropped": 0})
        with pytest.raises(InputError, match=r"record 2: .*max_seq_length=4 .*Received: 5 tokens"):
            CausalKind(4, overlong).fit(sequences)
