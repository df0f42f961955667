"""The inverse of packing by hand: every sequence in a separate row, whatever the pack says of positions."""

import numpy as np
import pytest

from bert_packed.evaluation.contamination import unpack_batch
from bert_packed.objectives.features import RECORDED

BATCH = {
    "token_ids": [[2, 7, 3, 2, 9, 0], [2, 8, 8, 3, 0, 0]],
    "sequence_ids": [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]],
    "token_type_ids": [[0, 0, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0]],
    "position_ids": [[5, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5]],  # wrong, and not looked at
    "prediction_positions": [[1, 3, 4], [2, 0, 0]],
    "prediction_ids": [[11, 12, 13], [14, 0, 0]],
    "prediction_sequences": [[1, 2, 2], [1, 0, 0]],
    "cls_positions": [[0, 4], [1, 0]],  # wrong too
    "nsp_labels": [[1, 0], [1, 0]],
    "slot_weights": [[1, 1], [1, 0]],
}
UNPACKED = {
    "token_ids": [[2, 7, 3, 0, 0, 0], [2, 9, 0, 0, 0, 0], [2, 8, 8, 3, 0, 0]],
    "sequence_ids": [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    "token_type_ids": [[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]],
    "position_ids": [[0, 1, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 2, 3, 0, 0]],
    "prediction_positions": [[1, 0, 0], [0, 1, 0], [2, 0, 0]],
    "prediction_ids": [[11, 0, 0], [12, 13, 0], [14, 0, 0]],
    "prediction_sequences": [[1, 0, 0], [1, 1, 0], [1, 0, 0]],
    "cls_positions": [[0, 0]] * 3,
    "nsp_labels": [[1, 0], [0, 0], [1, 0]],
    "slot_weights": [[1, 0]] * 3,
}


@pytest.mark.parametrize(("multiple", "num_rows"), [(1, 3), (2, 4), (3, 3), (5, 5)])
def test_sequences_stand_alone(multiple, num_rows):
    assert BATCH.keys() == {feature.name for feature in RECORDED}
    rows, slots = unpack_batch({name: np.array(values) for name, values in BATCH.items()}, multiple)
    assert slots.tolist() == [[0, 1], [0, 2], [1, 1]]
    assert rows.keys() == BATCH.keys()
    for name, values in UNPACKED.items():
        empty = [[0] * len(values[0])] * (num_rows - 3)
        assert rows[name].tolist() == values + empty, name
