"""The packed record is what the design page says, and readers of either format find their features."""

import numpy as np
import pytest

from bert_packed import schema


def test_every_packed_feature_has_a_shape_and_a_dtype():
    spec = schema.PackSpec(max_seq_length=8, max_sequences_per_pack=3, max_predictions_per_pack=5)
    shapes = {name: spec.shape(name) for name in schema.PACKED_LENGTHS}
    assert {shape for shape in shapes.values()} == {(8,), (3,), (5,)}
    assert shapes["input_ids"] == (8,) and shapes["masked_lm_ids"] == (5,)
    assert shapes["next_sentence_weights"] == (3,)
    assert all(np.dtype(schema.dtype(name)) in (np.int64, np.float32) for name in schema.PACKED_LENGTHS)
    assert schema.dtype("masked_lm_weights") == schema.dtype("next_sentence_weights") == "float32"


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
