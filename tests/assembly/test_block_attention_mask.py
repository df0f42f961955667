"""Attention masks of packs in the library of their ids, against a plain loop."""

import numpy as np
import pytest

import bert_packed
from bert_packed.core.settings import InputError

IDS = np.array([[1, 1, 2, 0, 0], [1, 2, 2, 3, 3]])


def plain():
    found = np.zeros((2, 1, 5, 5), bool)
    for pack, row in enumerate(IDS):
        for query, one in enumerate(row):
            for key, other in enumerate(row):
                found[pack, 0, query, key] = one == other
    return found


def arrays(library):
    if library == "numpy":
        return IDS
    if library == "keras":
        return pytest.importorskip("keras").ops.convert_to_tensor(IDS)
    module = pytest.importorskip(library)
    return module.as_tensor(IDS) if library == "torch" else module.numpy.asarray(IDS)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "keras"])
def test_each_token_sees_its_own_sequence(library):
    ids = arrays(library)
    mask = bert_packed.attention_mask(ids)
    assert type(mask).__module__ == type(ids).__module__
    assert np.array_equal(np.asarray(mask), plain()) and np.asarray(mask).dtype == bool
    assert np.array_equal(np.asarray(bert_packed.attention_mask(ids[0])), plain()[0])


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mask_to_be_added(library, dtype):
    ids = arrays(library)
    module = pytest.importorskip(library)
    dtype = getattr(module.numpy if library == "jax" else module, dtype)
    mask = np.asarray(bert_packed.attention_mask(ids, dtype))
    lowest = np.finfo(mask.dtype).min
    assert np.array_equal(mask, np.where(plain(), 0, lowest).astype(mask.dtype))
    assert str(mask.dtype) in str(dtype) or mask.dtype == dtype


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "text", 1.5])
def test_a_type_that_is_not_floating(library, dtype):
    ids = arrays(library)
    module = pytest.importorskip(library)
    given = getattr(module.numpy if library == "jax" else module, str(dtype), dtype)
    with pytest.raises(InputError, match=r"`dtype` must be a floating type of .*\. Received: "):
        bert_packed.attention_mask(ids, given)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_a_number_is_no_pack(library):
    number = arrays(library)[0, 0]
    with pytest.raises(ValueError, match=r"`sequence_ids` must be whole numbers \[\.\.\., S\]\. Received: "):
        bert_packed.attention_mask(number)


def test_float64_is_finite_where_jax_has_none():
    pytest.importorskip("jax")
    mask = np.asarray(bert_packed.attention_mask(arrays("jax"), "float64"))
    assert np.isfinite(mask).all() and mask.min() == np.finfo(mask.dtype).min


def test_lists_and_other_libraries():
    assert np.array_equal(bert_packed.attention_mask(IDS.tolist()), plain())
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(InputError, match="`dtype` must be left out for arrays of tensorflow"):
        bert_packed.attention_mask(tf.constant(IDS), "float32")


def test_in_a_keras_model():
    keras = pytest.importorskip("keras")
    ids = keras.Input((5,), dtype="int32")
    mask = keras.layers.Lambda(bert_packed.attention_mask)(ids)
    found = keras.Model(ids, mask)(keras.ops.convert_to_tensor(IDS.astype("int32")))
    assert np.array_equal(np.asarray(found), plain())
