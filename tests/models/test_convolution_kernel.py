"""The convolution's kernel in Pallas's interpreter: values and gradients of a plain loop, cut at starts.

Legend: B packs per batch, S pack length, E width, W taps, T tokens of a chunk.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from next_tokens import CONFIG, MAMBA2, assert_learns_alike, make_engine, packed_and_unpacked
from test_causal_convolution import gradients_of_loop, plain_convolution
from test_selective_scan import close

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
from jax import numpy as jnp  # noqa: E402
from jax.experimental import pallas  # noqa: E402

from bert_packed.evaluation import contamination  # noqa: E402
from bert_packed.kernels.tpu import convolution as tpu_convolution  # noqa: E402
from bert_packed.layers import causal_convolution  # noqa: E402

pytestmark = [
    pytest.mark.both_backends,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
]
PIECE, T, S = 4, 8, 22
# The first sequence of each pack ends at another place of the second chunk, the second four tokens later.
# Sequences go on into the third chunk; single tokens, as padding is
LENGTHS = [[8, 4, 10], [9, 4, 1, 8], [10, 4, 6, 1, 1], [11, 4, 2, 5]]
POSITIONS = np.array([np.concatenate([np.arange(n) for n in lengths]) for lengths in LENGTHS], np.int32)
B = len(POSITIONS)
TAPS = [2, 4, 7]
# E: padded; three blocks of a vector after padding; two blocks of two vectors
WIDTHS = [1, 5, 8]


@pytest.fixture(autouse=True)
def small_vectors_in_the_interpreter(monkeypatch):
    for name, value in {"PIECE": PIECE, "LANES": 2, "ROWS": 2, "BLOCK": 4}.items():
        monkeypatch.setattr(tpu_convolution, name, value)
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


def random_inputs(width, taps, seed=0):
    """x, kernel and bias."""
    rng = np.random.default_rng(seed)
    return [np.float32(rng.normal(size=shape)) for shape in ((B, S, width), (taps, width), (width,))]


def random_tail(width, taps):
    return np.float32(np.random.default_rng(2).normal(size=(B, taps - 1, width)))


def weights_of(inputs):
    return np.float32(np.random.default_rng(1).normal(size=inputs[0].shape))


def cases(tail):
    """Positions and tail to call with, and the positions for the plain loop."""
    going_on = POSITIONS + 2 * (np.cumsum(POSITIONS == 0, axis=1) == 1)  # the first sequence began before
    whole = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    return [(POSITIONS, None, POSITIONS), (going_on, tail, going_on), (None, tail, whole + tail.shape[1])]


def convolve(inputs, positions=POSITIONS, tail=None, chunk_length=T):
    arrays = [None if of is None else jnp.asarray(of) for of in (*inputs, positions, tail)]
    return tpu_convolution.conv1d_pack(*arrays, chunk_length=chunk_length)


def plain_form(inputs, positions, tail):
    """The form for other devices."""
    return causal_convolution.conv1d_pack(*inputs, positions, tail)


def gradients_of(run, inputs, weights, *arguments):
    def target(inputs):
        return (weights * run(inputs, *arguments)[0]).sum()

    return jax.grad(target)([None if values is None else jnp.asarray(values) for values in inputs])


def test_every_place_of_a_chunk_begins_a_sequence():
    starts = {(pack, token) for pack, token in np.argwhere(POSITIONS == 0)}
    assert {(place % B, T + place) for place in range(T)} <= starts
    assert S % PIECE and S > 2 * T


@pytest.mark.parametrize(("width", "taps"), [*zip(WIDTHS, TAPS, strict=True), (8, 2), (1, 7)])
def test_values_and_tail_are_those_of_a_plain_loop(width, taps):
    x, kernel, bias = random_inputs(width, taps)
    for positions, tail, for_loop in cases(random_tail(width, taps)):
        for chunk_length in (T, 64):
            got, after = convolve([x, kernel, bias], positions, tail, chunk_length)
            close(got, plain_convolution(x, kernel, bias, for_loop, tail))
            np.testing.assert_array_equal(after, x[:, S - taps + 1 :])
    close(convolve([x, kernel, None])[0], plain_convolution(x, kernel, 0, POSITIONS))


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_packs_have_any_length(length):
    """The tail after a short one is partly that before it."""
    x, kernel, bias = random_inputs(5, 7)
    x, tail = x[:, :length], random_tail(5, 7)
    positions = POSITIONS[:, :length] + 2
    got, after = convolve([x, kernel, bias], positions, tail)
    close(got, plain_convolution(x, kernel, bias, positions, tail))
    np.testing.assert_array_equal(after, np.concatenate([tail, x], axis=1)[:, length:])


@pytest.mark.parametrize("taps", TAPS)
def test_gradients_are_those_of_a_plain_loop(taps):
    inputs = random_inputs(3, taps)
    weights = weights_of(inputs)
    for positions, tail, for_loop in cases(random_tail(3, taps)):
        found = gradients_of(convolve, inputs, weights, positions, tail)
        for got, want in zip(found, gradients_of_loop(weights, inputs, for_loop, tail), strict=True):
            close(got, want)


@pytest.mark.parametrize(("width", "has_bias"), [(5, False), (8, True)])
def test_gradients_are_those_of_the_form_for_other_devices(width, has_bias):
    inputs = random_inputs(width, 4)
    weights = weights_of(inputs)
    inputs = inputs if has_bias else [*inputs[:2], None]
    for positions, tail, _ in cases(random_tail(width, 4)):
        want, got = (
            jax.tree.leaves(gradients_of(run, inputs, weights, positions, tail))
            for run in (plain_form, convolve)
        )
        for one, other in zip(got, want, strict=True):
            close(one, np.asarray(other))


def test_the_tail_is_data():
    inputs, tail = random_inputs(5, 4), jnp.asarray(random_tail(5, 4))
    assert np.all(jax.grad(lambda tail: convolve(inputs, None, tail)[0].sum())(tail) == 0)


@pytest.mark.parametrize("place", range(T))
def test_nothing_passes_a_start(place):
    """A neighbour may be infinite: not a bit of what follows changes, nor does its gradient see it."""
    (x, kernel, bias), pack, start = random_inputs(5, 4), place % B, T + place
    end = start + 1 + np.flatnonzero(np.r_[POSITIONS[pack, start + 1 :], 0] == 0)[0]
    mine, before, after = (pack, slice(start, end)), (pack, slice(start)), (pack, slice(end, S))
    weights = np.zeros(x.shape, np.float32)
    weights[mine] = 1
    kept, *_ = gradients_of(convolve, [x, kernel, bias], weights)
    outside = np.ones((B, S), bool)
    outside[mine] = False
    assert np.all(kept[outside] == 0) and np.all(kept[mine] != 0)
    changed = x.copy()
    changed[before], changed[after] = np.inf, -np.inf
    one, other = (np.asarray(convolve([of, kernel, bias])[0])[mine] for of in (x, changed))
    np.testing.assert_array_equal(one, other)
    found, *_ = gradients_of(convolve, [changed, kernel, bias], weights)
    np.testing.assert_array_equal(found[mine], kept[mine])


def test_numbers_add_up_in_float32():
    """Inputs of bfloat16 are widened before the first product, and the result is rounded once."""
    narrow = [jnp.asarray(values, jnp.bfloat16) for values in random_inputs(3, 4)]
    wide = [np.asarray(values, np.float64) for values in narrow]
    weights = np.asarray(jnp.asarray(weights_of(narrow), jnp.bfloat16), np.float32)
    rounded_once = functools.partial(np.testing.assert_allclose, rtol=2**-8, atol=1e-5)
    got, want = convolve(narrow)[0], plain_convolution(*wide, POSITIONS)
    assert got.dtype == jnp.bfloat16
    rounded_once(got.astype("float32"), want)
    with pytest.raises(AssertionError):  # a control: the other form adds up in bfloat16
        rounded_once(plain_form(narrow, POSITIONS, None)[0].astype("float32"), want)
    found = gradients_of(convolve, narrow, weights)
    for got, want in zip(found, gradients_of_loop(weights, wide, POSITIONS), strict=True):
        assert got.dtype == jnp.bfloat16
        rounded_once(got.astype("float32"), want)


@pytest.mark.parametrize(
    ("config", "build"),
    [(CONFIG, {"num_rows": 5}), (MAMBA2, {"remat": True})],
    ids=["mamba with rows", "mamba2 recomputed"],
)
def test_a_model_learns_what_it_learns_with_the_other_form(monkeypatch, config, build):
    monkeypatch.setattr(tpu_convolution, "LANES", 16)
    monkeypatch.setattr(tpu_convolution, "BLOCK", 16)
    convolve = functools.partial(tpu_convolution.conv1d_pack, chunk_length=PIECE)
    assert_learns_alike(config, build, {"convolve": convolve})


@pytest.mark.slow
def test_the_audit_sees_a_convolution_that_takes_a_pack_for_one_sequence():
    batch = packed_and_unpacked([[4, 1, 2], [1, 5], [8]], max_seq_length=8)[0]
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)

    def leaking(x, kernel, bias, position_ids, tail=None):
        return sound(x, kernel, bias, None, tail)

    sound = functools.partial(tpu_convolution.conv1d_pack, chunk_length=PIECE)
    for convolve, is_sound in ((sound, True), (leaking, False)):
        checks = contamination.audit(make_engine(config=config, build={"convolve": convolve}), batch)
        assert len(checks) > 10 and all(check.passed for check in checks) == is_sound
