"""Layers: the mask and the gather against plain loops, padding without NaN, exact and tanh GELU."""

import numpy as np
import pytest
from keras import ops
from scipy.special import erf

from bert_packed.layers.context import PackContext, activation, gather_tokens

pytestmark = pytest.mark.both_backends


def test_mask_is_block_diagonal():
    ids = np.array([[1, 1, 2, 2, 2, 0]], np.int32)
    expected = [[a == b for b in ids[0]] for a in ids[0]]
    mask = np.array(PackContext(ops.convert_to_tensor(ids), None).mask_B1SS)
    assert mask.shape == (1, 1, 6, 6)
    np.testing.assert_array_equal(mask[0, 0], expected)


def test_gather_equals_a_loop():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(3, 7, 5)).astype(np.float32)
    positions = rng.integers(0, 7, (3, 4)).astype(np.int32)
    expected = [[hidden[row, position] for position in positions[row]] for row in range(3)]
    np.testing.assert_array_equal(gather_tokens(hidden, positions), expected)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu"])
def test_activations(name):
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    expected = {
        "gelu": x * (1 + erf(x / np.sqrt(2))) / 2,
        "gelu_new": x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": np.maximum(x, 0),
    }[name]
    np.testing.assert_allclose(activation(name)(x), expected, atol=1e-6)
