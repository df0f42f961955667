"""The convolution of packs and SiLU against a plain loop, and its taps at the start of a sequence.

Legend: B packs per batch, S pack length, E width, W taps.
"""

import numpy as np
import pytest
from keras import ops

from bert_packed.layers.causal_convolution import conv1d_pack
from bert_packed.training.backend import gradient

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
POSITIONS = np.array([[0, 0, 1, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]], np.int32)
RNG = np.random.default_rng(0)
X, BIAS = RNG.normal(size=(2, 10, 3)).astype(np.float32), RNG.normal(size=3).astype(np.float32)
KERNELS = {taps: RNG.normal(size=(taps, 3)).astype(np.float32) for taps in (2, 4)}


def plain_convolution(x, kernel, bias, positions, tail=None):
    """Tap by tap, as far back as the position goes, and before the pack into the tail; then SiLU."""
    taps = len(kernel)
    out = np.zeros(x.shape)
    for pack, token in np.ndindex(x.shape[:2]):
        out[pack, token] = bias
        for back in range(min(taps, positions[pack, token] + 1)):
            place = token - back
            if place >= 0:
                out[pack, token] += kernel[taps - 1 - back] * x[pack, place]
            elif tail is not None:
                out[pack, token] += kernel[taps - 1 - back] * tail[pack, taps - 1 + place]
    return out / (1 + np.exp(-out))


def gradients_of_loop(weights, given, positions, tail=None, step=1e-5):
    """Of the weighted sum by x, kernel and bias: central differences in float64."""

    def target(arguments):
        return np.sum(weights * plain_convolution(*arguments, positions, tail))

    given = [np.array(values, np.float64) for values in given]
    gradients = [np.zeros(values.shape) for values in given]
    for values, gradient_of_values in zip(given, gradients, strict=True):
        for place in np.ndindex(values.shape):
            kept = values[place]
            values[place] = kept + step
            above = target(given)
            values[place] = kept - step
            gradient_of_values[place] = (above - target(given)) / (2 * step)
            values[place] = kept
    return gradients


@pytest.mark.parametrize("taps", KERNELS)
def test_values_are_those_of_a_plain_loop(taps):
    got, tail = conv1d_pack(X, KERNELS[taps], BIAS, POSITIONS)
    np.testing.assert_allclose(got, plain_convolution(X, KERNELS[taps], BIAS, POSITIONS), atol=1e-6)
    np.testing.assert_array_equal(ops.convert_to_numpy(tail), X[:, -(taps - 1) :])
    without, _ = conv1d_pack(X, KERNELS[taps], None, POSITIONS)
    np.testing.assert_allclose(without, plain_convolution(X, KERNELS[taps], 0, POSITIONS), atol=1e-6)


def test_gradients_are_those_of_a_plain_loop():
    weights = np.float32(np.random.default_rng(1).normal(size=X.shape))
    given = [X, KERNELS[4], BIAS]

    def target(arguments):
        return ops.sum(weights * conv1d_pack(*arguments, POSITIONS)[0])

    found = gradient(target)([ops.convert_to_tensor(values) for values in given])
    for got, want in zip(found, gradients_of_loop(weights, given, POSITIONS), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_nothing_passes_a_start():
    changed = X.copy()
    changed[0, :3] = np.inf  # the neighbours of the third sequence
    changed[0, 9] = np.nan
    got, want = (ops.convert_to_numpy(conv1d_pack(x, KERNELS[4], BIAS, POSITIONS)[0]) for x in (changed, X))
    np.testing.assert_array_equal(got[0, 3:9], want[0, 3:9])
    assert not np.isfinite(got[0, :3]).any()


def test_a_pack_goes_on_where_its_first_position_says_so():
    positions = np.stack([np.arange(10), np.r_[0:5, 0:5]]).astype(np.int32)
    whole = plain_convolution(X, KERNELS[4], BIAS, positions)
    for cut in (1, 2, 5, 8):
        first, tail = conv1d_pack(X[:, :cut], KERNELS[4], BIAS, positions[:, :cut])
        second, _ = conv1d_pack(X[:, cut:], KERNELS[4], BIAS, positions[:, cut:], tail)
        np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-6)


def test_without_positions_a_pack_is_one_sequence(monkeypatch):
    """From the tail before it, and without a selection."""
    monkeypatch.setattr(ops, "where", None)
    tail = np.random.default_rng(2).normal(size=(2, 3, 3)).astype(np.float32)
    got, after = conv1d_pack(X, KERNELS[4], BIAS, None, tail)
    positions = np.tile(np.arange(10) + 3, (2, 1))
    np.testing.assert_allclose(got, plain_convolution(X, KERNELS[4], BIAS, positions, tail), atol=1e-6)
    np.testing.assert_array_equal(ops.convert_to_numpy(after), X[:, -3:])
