"""Attention masks of packs in the library of their ids, against a plain loop."""

import numpy as np
import pytest

import bert_packed
from bert_packed.core.settings import InputError

IDS = np.array([[1, 1, 2, 0, 0], [1, 2, 2, 3, 3]])
PLAIN = np.array([[[[one == other for other in row] for one in row]] for row in IDS.tolist()])


@pytest.fixture(params=["numpy", "torch", "jax", "keras"])
def case(request):
    """Ids in a library, and that library's module of types; None where Keras chooses."""
    if request.param == "keras":
        return pytest.importorskip("keras").ops.convert_to_tensor(IDS), None
    module = pytest.importorskip(request.param)
    types = module.numpy if request.param == "jax" else module
    return (module.as_tensor if request.param == "torch" else types.asarray)(IDS), types


def test_each_token_sees_its_own_sequence(case):
    ids, types = case
    mask = bert_packed.attention_mask(ids)
    assert type(mask).__module__ == type(ids).__module__
    assert np.array_equal(np.asarray(mask), PLAIN) and np.asarray(mask).dtype == bool
    assert np.array_equal(np.asarray(bert_packed.attention_mask(ids[0])), PLAIN[0])
    for name in ("float32", "float16") if types else ():
        mask = np.asarray(bert_packed.attention_mask(ids, getattr(types, name)))
        assert mask.dtype == name
        assert np.array_equal(mask, np.where(PLAIN, 0, np.finfo(name).min).astype(name))
    for wrong in ("int32", "bool", "text", 1.5) if types else ():
        with pytest.raises(InputError, match=r"`dtype` must be a floating type of .*\. Received: "):
            bert_packed.attention_mask(ids, getattr(types, str(wrong), wrong))
    with pytest.raises(ValueError, match=r"`sequence_ids` must be whole numbers \[\.\.\., S\]\. Received: "):
        bert_packed.attention_mask(ids[0, 0])


def test_float64_is_finite_where_jax_has_none():
    ids = pytest.importorskip("jax").numpy.asarray(IDS)
    mask = np.asarray(bert_packed.attention_mask(ids, "float64"))
    assert np.isfinite(mask).all() and mask.min() == np.finfo(mask.dtype).min


def test_lists_and_other_libraries():
    assert np.array_equal(bert_packed.attention_mask(IDS.tolist()), PLAIN)
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(InputError, match="`dtype` must be left out for arrays of tensorflow"):
        bert_packed.attention_mask(tf.constant(IDS), "float32")


def test_in_a_keras_model():
    keras = pytest.importorskip("keras")
    ids = keras.Input((5,), dtype="int32")
    mask = keras.layers.Lambda(bert_packed.attention_mask)(ids)
    found = keras.Model(ids, mask)(keras.ops.convert_to_tensor(IDS.astype("int32")))
    assert np.array_equal(np.asarray(found), PLAIN)
