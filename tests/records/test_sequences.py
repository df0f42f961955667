"""Sequences in columns: made, taken by number, joined, and compared by their content; shapes of packs."""

import numpy as np
import pytest

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import sequences as sequences_module
from bert_packed.records.sequences import (
    BERT_LAYOUT,
    CAUSAL_LAYOUT,
    FIRST_POSITIONS,
    ORIGINS,
    Column,
    Sequences,
    check_vocabulary,
    concatenate,
    content_digests,
    make_sequences,
    take,
)

WIDE = {"sizes": Column("<i8"), "pair": Column("<f4", width=2), "frames": Column("<f4", "sizes", width=3)}


def make_wide(num_rows=50):
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 5, num_rows)
    frames = rng.random(3 * sizes.sum()).astype(np.float32)
    return Sequences(
        WIDE, {"sizes": sizes, "pair": rng.random(2 * num_rows).astype(np.float32), "frames": frames}
    )


def make_bert(path="a", **changed):
    columns = {
        "tokens": [2, 7, 4, 3, 2, 4, 4],
        "token_type_ids": [0, 0, 1, 1, 0, 0, 0],
        "lengths": [4, 3],
        "prediction_positions": [2, 1, 2],
        "prediction_ids": [8, 9, 5],
        "num_predictions": [1, 2],
        "next_sentence_labels": [1, 0],
        "record_numbers": [1, 2],
    }
    return make_sequences(BERT_LAYOUT, path, **{**columns, **changed})


@pytest.mark.parametrize("taken_at_once", [1, 7, 2**20])
def test_sequences_are_taken_by_number(monkeypatch, taken_at_once):
    monkeypatch.setattr(sequences_module, "TAKEN_AT_ONCE", taken_at_once)
    sequences, rows = make_wide(), [4, 0, 8, 4, 49, 3]
    taken = take(sequences, np.array(rows))
    ends = np.cumsum(sequences["sizes"])
    frames = sequences["frames"].reshape(-1, 3)
    expected = [frames[ends[row] - sequences["sizes"][row] : ends[row]] for row in rows]
    assert np.array_equal(taken["frames"].reshape(-1, 3), np.concatenate(expected))
    assert np.array_equal(taken["pair"].reshape(-1, 2), sequences["pair"].reshape(-1, 2)[rows])
    assert len(taken) == 6 and taken.offsets("frames").tolist() == [0, *np.cumsum(list(map(len, expected)))]


def test_joined_sequences_keep_their_files():
    batches = [make_bert("a"), make_bert("b", record_numbers=[7, 8]), make_bert("a", record_numbers=[3, 4])]
    joined = concatenate(batches)
    assert [joined.origin(i) for i in range(6)] == [
        f"{path}, record {number}" for path, number in zip("aabbaa", (1, 2, 7, 8, 3, 4), strict=True)
    ]
    assert joined["tokens"].tolist() == batches[0]["tokens"].tolist() * 3
    assert joined.offsets("prediction_ids").tolist() == [0, 1, 3, 4, 6, 7, 9]


def test_digests_are_of_the_content_alone():
    digests = content_digests(make_bert(), BERT_LAYOUT)
    assert digests.shape == (2, 2) and digests[0].tolist() != digests[1].tolist()
    moved = make_bert("b", record_numbers=[5, 5], file_indices=[3, 3])
    assert np.array_equal(content_digests(moved, BERT_LAYOUT), digests)
    backwards = take(make_bert(), [1, 0])
    assert np.array_equal(content_digests(backwards, BERT_LAYOUT), digests[::-1])
    for name in BERT_LAYOUT.keys() - ORIGINS - {"lengths", "num_predictions"}:
        values = make_bert()[name].copy()
        values[-1] += 1
        other = content_digests(make_bert(**{name: values}), BERT_LAYOUT)
        assert np.array_equal(other[0], digests[0]) and not np.array_equal(other[1], digests[1]), name
    # the same entries are divided otherwise
    assert not np.array_equal(content_digests(make_bert(num_predictions=[2, 1]), BERT_LAYOUT)[0], digests[0])
    # a packed sequence has a column more than one that was not packed
    part = make_sequences(CAUSAL_LAYOUT | FIRST_POSITIONS, "a", lengths=[1], tokens=[5], record_numbers=[1])
    whole = make_sequences(CAUSAL_LAYOUT, "a", lengths=[1], tokens=[5], record_numbers=[1])
    assert np.array_equal(*(content_digests(one, CAUSAL_LAYOUT) for one in (part, whole)))


CAUSAL = {"lengths": [2, 3], "tokens": [1, 2, 3, 4, 5], "labels": [2, 0, 4, 299, 0], "record_numbers": [1, 2]}


@pytest.mark.parametrize(
    "sequences",
    [
        make_bert(tokens=[2, 7, 4, 3, 2, 4, 299]),
        make_bert(prediction_ids=[8, 9, 299]),
        make_sequences(CAUSAL_LAYOUT, "a", **CAUSAL),
    ],
    ids=["tokens", "prediction_ids", "labels"],
)
def test_ids_outside_the_vocabulary_are_named(sequences):
    """The message has the record of the sequence whose token or label they are."""
    for vocab_size in (300, None):
        check_vocabulary(sequences, vocab_size)
    with pytest.raises(InputError, match=r"a, record 2: .* the vocab_size=299 .* Received: 299\."):
        check_vocabulary(sequences, 299)


def test_packs_without_room_for_predictions_are_causal():
    spec = schema.PackSpec(max_seq_length=8, max_sequences_per_pack=3, max_predictions_per_pack=0)
    assert spec.objective == "causal_lm" and set(spec.lengths) == set(schema.CAUSAL_LENGTHS)
    assert {name: spec.shape(name) for name in spec.lengths} == {
        "input_ids": (8,),
        "input_mask": (8,),
        "position_ids": (8,),
        "label_ids": (8,),
        "label_mask": (8,),
        "sequence_weights": (3,),
        "sequence_bytes": (3,),
    }
    assert [name for name in spec.lengths if schema.dtype(name) == "float32"] == ["sequence_weights"]
    berts = schema.PackSpec(8, 3, 1)
    assert berts.objective == "mlm_nsp" and berts.lengths is schema.PACKED_LENGTHS


@pytest.mark.parametrize(("length", "predictions"), [(128, 20), (384, 56), (512, 76), (64, 10), (100, 15)])
def test_default_predictions(length, predictions):
    assert schema.default_predictions(length) == predictions
