"""Batches of fine-tuning by hand: labels in their slots, positions from the pack's start, and back again."""

import numpy as np
import pytest

from bert_packed.assembly.assignment import Packs
from bert_packed.assembly.update_packs import Updates, fit_predictions
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences, without_predictions
from bert_packed.schema import PackSpec
from bert_packed.tasks.batches import LabelledSequences, make_batch, predict, train_batches

SPEC = PackSpec(8, 3, 1)
TOKENS = [[2, 7, 4, 3], [2, 9, 3], [2, 8, 8, 8, 3]]


@pytest.fixture
def data():
    sequences = make_sequences(
        BERT_LAYOUT,
        "x",
        tokens=np.concatenate(TOKENS),
        token_type_ids=np.concatenate([[0, 0, 1, 1], [0, 0, 1], [0, 0, 0, 1, 1]]),
        lengths=[4, 3, 5],
        record_numbers=[1, 2, 3],
    )
    labels = {"start_positions": np.array([2, 1, 4]), "classes": np.array([5, 7, 6])}
    return LabelledSequences(sequences, labels, positions=("start_positions",))


PACKS = Packs(np.array([1, 0, 2]), np.array([0, 2, 3]))  # the first pack holds sequence 1, then 0


def test_a_batch_by_hand(data):
    batch = make_batch(data, PACKS, SPEC, 3)
    expected = {
        "token_ids": [[2, 9, 3, 2, 7, 4, 3, 0], [2, 8, 8, 8, 3, 0, 0, 0], [0] * 8],
        "sequence_ids": [[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0], [0] * 8],
        "token_type_ids": [[0, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0, 0], [0] * 8],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 0, 0], [0] * 8],
        "cls_positions": [[0, 3, 0], [0, 0, 0], [0, 0, 0]],
        "slot_weights": [[1, 1, 0], [1, 0, 0], [0, 0, 0]],
        "start_positions": [[1, 3 + 2, 0], [4, 0, 0], [0, 0, 0]],
        "classes": [[7, 5, 0], [6, 0, 0], [0, 0, 0]],
    }
    assert {name: values.tolist() for name, values in batch.items()} == expected


def test_predictions_of_the_sequences_come_with_them(data):
    asked = data.sequences.replace(
        prediction_positions=np.array([1, 2, 1, 3], np.int32),
        prediction_ids=np.array([4, 5, 6, 7], np.int32),
        num_predictions=np.array([2, 1, 1]),
    )
    updates = fit_predictions(
        Updates([PACKS, PACKS.between(1, 2)], PackSpec(8, 3, 0), 2), asked["num_predictions"]
    )
    assert updates.spec == PackSpec(8, 3, 3)
    batch = make_batch(LabelledSequences(asked, {}), PACKS, updates.spec, 3)
    assert batch["prediction_positions"].tolist() == [[1, 3 + 1, 3 + 2], [3, 0, 0], [0] * 3]
    assert batch["prediction_ids"].tolist() == [[6, 4, 5], [7, 0, 0], [0] * 3]
    assert batch["prediction_sequences"].tolist() == [[1, 2, 2], [1, 0, 0], [0] * 3]
    plain = make_batch(LabelledSequences(without_predictions(asked), {}), PACKS, SPEC, 3)
    assert plain.keys() == batch.keys() - {f"prediction_{name}" for name in ("positions", "ids", "sequences")}


def test_a_run_that_continues_takes_the_next_updates(data):
    updates = Updates([PACKS.between(0, 1), PACKS.between(1, 2), PACKS], SPEC, 2)
    whole = [batch["token_ids"].tolist() for batch in train_batches(data, updates, 2)]
    assert len(whole) == 3 and whole[0] != whole[1]
    for first in range(4):
        rest = train_batches(data, updates, 2, first_step=first)
        assert [batch["token_ids"].tolist() for batch in rest] == whole[first:]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_each_sequence_gets_its_own_outputs(data, batch_size):
    def forward(batch):
        slots = np.stack([batch["cls_positions"], batch["slot_weights"]], axis=-1)
        tokens = batch["token_ids"] * 10.0
        return {"tokens": tokens, "slots": slots, "vectors": np.stack([tokens, -tokens], axis=-1)}

    found = predict(forward, data.sequences, PACKS, SPEC, batch_size)
    assert [values.tolist() for values in found["tokens"]] == [[10.0 * t for t in its] for its in TOKENS]
    assert [values.tolist() for values in found["slots"]] == [[3, 1], [0, 1], [0, 1]]
    want = [[[10.0 * t, -10.0 * t] for t in its] for its in TOKENS]
    assert [values.tolist() for values in found["vectors"]] == want
    assert all(values.base is None for values in found["tokens"])  # no view of a whole batch
