"""Local attention in bands, and the cost of a packed ModernBERT.

`tests/checkpoints/test_references.py` compares the whole model with transformers.

Legend: B packs per batch, S pack length, N heads, H head width, D model width.
"""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops
from modern_bert_models import CONFIG
from packs import packed_and_unpacked
from plain_attention import attend_plainly

from bert_packed.architectures.modern_bert.config import FULL_ATTENTION
from bert_packed.architectures.modern_bert.layers import CutoffNormal, RotaryAttention, attend_in_window
from bert_packed.architectures.modern_bert.model import count_flops
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, MODEL_SIZES
from bert_packed.core.settings import InputError
from bert_packed.layers.context import PackContext
from bert_packed.layers.dropout import Dropout, packs_from
from bert_packed.layers.fast_gradients import gradients_are_for, gradients_for
from bert_packed.training.backend import compiled, gradient
from bert_packed.training.step_report import jax_program

pytestmark = pytest.mark.both_backends
uncompiled = pytest.mark.usefixtures("uncompiled")
NO_DROPOUT = Dropout(0.0)


def draw(length, seed=0, num_packs=2, num_heads=2, head_width=4):
    """Queries, keys, values and sequence ids of packs of three sequences, the last pack with padding."""
    rng = np.random.default_rng(seed)
    heads = rng.normal(size=(3, num_packs, length, num_heads, head_width)).astype(np.float32)
    ids_BS = np.zeros((num_packs, length), np.int32)
    for row in range(num_packs):
        bounds = np.sort(rng.integers(0, length + 1, 2))
        ids_BS[row] = 1 + np.searchsorted(bounds, np.arange(length), side="right")
    ids_BS[-1, length - length // 4 :] = 0
    return [ops.convert_to_tensor(of) for of in heads], ops.convert_to_tensor(ids_BS)


@uncompiled
# Packs are shorter and longer than the window, and whole tiles fill them or do not
@pytest.mark.parametrize(
    ("length", "window"), [(24, 5), (24, 6), (25, 24), (7, 10), (9, 1), (9, 0), (200, 64)]
)
def test_bands_are_the_dense_mask(length, window):
    assert_bands_are_dense(length, window)


def test_bands_have_the_gradients_for_cpus():
    with gradients_for("cpu"):
        assert_bands_are_dense(24, 5, [lambda: gradients_are_for("cpu")])


def assert_bands_are_dense(length, window, conditions=()):
    """Assert equal values and gradients; the `conditions` hold where the bands are traced."""
    heads, ids_BS = draw(length)
    weights = ops.convert_to_tensor(np.random.default_rng(1).normal(size=heads[0].shape).astype(np.float32))

    def of(attend):
        def target(first_BSNH):
            # Each of the three is a part of the input that is differentiated by
            found_BSNH = attend([first_BSNH + other for other in heads])
            return ops.sum(found_BSNH * weights)

        return compiled(lambda first_BSNH: (attend(heads), gradient(target)(first_BSNH)))(heads[0])

    def attend(heads):
        assert all(condition() for condition in conditions)
        return attend_in_window(heads, ids_BS, window, NO_DROPOUT)

    got = of(attend)
    want = of(lambda heads: attend_plainly(*heads, ids_BS, window))
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


@uncompiled
def test_a_part_of_a_batch_drops_the_units_of_the_whole():
    heads, ids_BS = draw(24, num_packs=3)
    dropout = Dropout(0.4)
    dropout.given_seed = np.array([3, 4], np.uint32)
    want = attend_in_window(heads, ids_BS, 5, dropout, training=True)
    for row in range(3):
        with packs_from(row, 3):
            part = [of[row : row + 1] for of in heads]
            got = attend_in_window(part, ids_BS[row : row + 1], 5, dropout, training=True)
        np.testing.assert_allclose(np.asarray(got)[0], np.asarray(want)[row], atol=1e-6)
        assert np.abs(np.asarray(want)[row] - np.asarray(want)[row - 1]).max() > 0.1


def temporary_bytes(is_global, length):
    """Temporaries of the compiled forward and backward pass of an attention layer, of one pack."""
    config = dataclasses.replace(CONFIG, local_attention=128)
    layer = RotaryAttention(config, is_global)
    layer.build((None, None, config.hidden_size))

    def target(hidden_BSD, ids_BS):
        return ops.sum(ops.square(layer(hidden_BSD, context=PackContext(ids_BS, ids_BS))))

    def step(hidden_BSD, ids_BS):
        return gradient(lambda hidden_BSD: target(hidden_BSD, ids_BS))(hidden_BSD)

    inputs = np.zeros((1, length, config.hidden_size), np.float32), np.ones((1, length), np.int32)
    if keras.backend.backend() == "jax":
        import jax

        return jax_program(jax.jit(step).lower(*inputs)).temporary_bytes
    from bert_packed.training.engines.tensorflow import tensorflow_program, tf

    inputs = [tf.constant(of) for of in inputs]
    return tensorflow_program(tf.function(step, jit_compile=True), *inputs).temporary_bytes


def test_memory_of_local_attention_grows_with_the_length():
    """Memory of global attention grows with its square."""
    short, long = (temporary_bytes(False, length) for length in (2048, 8192))
    assert 3.9 < long / short < 4.1
    one, other = (temporary_bytes(True, length) for length in (1024, 2048))
    assert other / one > 3.9 and short < other / 4


def test_initial_weights_are_finite_at_any_cutoff():
    """The share of the normal that is kept must be below 1 in float32."""
    config = dataclasses.replace(CONFIG, initializer_cutoff_factor=5.0)
    values = np.asarray(CutoffNormal(config)((2000, 1000)))
    assert 4.5 < np.abs(values).max() / 0.02 < 5.01
    with pytest.raises(InputError, match="`initializer_cutoff_factor` must be at most 5"):
        dataclasses.replace(CONFIG, initializer_cutoff_factor=5.5)


@uncompiled
def test_global_blocks_alone_take_a_fused_kernel():
    packed, _ = packed_and_unpacked()
    seen = []

    def attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS):
        seen.append(query_BSNH.shape)
        return attend_plainly(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS)

    models = [build_model(MASKED_LM, CONFIG, seed=1, attend=of) for of in (None, attend)]
    want, got = (compiled(model.encode, model)(packed) for model in models)
    assert seen == [(5, 24, 2, 8)] * 2
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-5)


def test_operations_are_counted_by_hand():
    """The published base model takes weights without tables 6 times per token, and pairs that attend."""
    config = MODEL_SIZES["modernbert-base"]
    sums = {"num_tokens": 1000.0, "num_pairs": 1e6, "num_predictions": 300.0}
    weights = 22 * (4 * 768**2 + 3 * 768 * 1152) * 1000 + (768**2 + 768 * 50368) * 300
    near = sum(min(i + 64, 999) - max(i - 64, 0) + 1 for i in range(1000))
    assert config.layer_types.count(FULL_ATTENTION) == 8
    pairs = 8 * 1e6 + 14 * near
    assert count_flops(MASKED_LM, config, sums) == 6 * weights + 12 * 768 * pairs
    short = {"num_tokens": 20.0, "num_pairs": 400.0, "num_predictions": 0.0}
    alike = 6 * 22 * (4 * 768**2 + 3 * 768 * 1152) * 20 + 12 * 768 * 22 * 400
    assert count_flops(None, config, short) == alike
