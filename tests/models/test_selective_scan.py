"""The scan of packs against a plain loop over tokens, values and gradients; and its cut at every start.

Legend: B packs per batch, S pack length, E inner width, Z states of a channel.
"""

import keras
import numpy as np
import pytest
from keras import ops

from bert_packed.architectures.mamba.selective_scan import ssm_pack
from bert_packed.training.backend import gradient

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
B, S, E, Z = 2, 11, 3, 2
# A single token, a start right after it, a long sequence, padding (which restarts with each token)
POSITIONS = np.array([[0, 0, 1, 2, 3, 4, 5, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], np.int32)
NAMES = ("u", "delta", "a", "b", "c")


def random_inputs(seed=0, shape=(B, S, E, Z)):
    rng = np.random.default_rng(seed)
    packs, length, width, states = shape
    return {
        "u": rng.normal(size=(packs, length, width)),
        "delta": np.exp(rng.normal(size=(packs, length, width)) - 1),
        "a": -np.exp(rng.normal(size=(states, width))),
        "b": rng.normal(size=(packs, length, states)),
        "c": rng.normal(size=(packs, length, states)),
    }


def plain_scan(u, delta, a, b, c, positions=POSITIONS, state=None):
    """Token by token and channel by channel, in float64."""
    packs, length, width = u.shape
    out = np.zeros(u.shape)
    after = np.zeros((packs, a.shape[0], width))
    for pack in range(packs):
        for channel in range(width):
            states = np.zeros(a.shape[0]) if state is None else state[pack, :, channel]
            for token in range(length):
                if positions[pack, token] == 0:
                    states = np.zeros(a.shape[0])
                size = delta[pack, token, channel]
                states = (
                    np.exp(size * a[:, channel]) * states + size * u[pack, token, channel] * b[pack, token]
                )
                out[pack, token, channel] = np.dot(states, c[pack, token])
            after[pack, :, channel] = states
    return out, after


def scan(inputs, positions=POSITIONS, **options):
    arrays = (ops.convert_to_tensor(np.float32(inputs[name])) for name in NAMES)
    return ssm_pack(*arrays, *tensors(positions), **options)


def tensors(positions):
    return [None if positions is None else ops.convert_to_tensor(positions)]


def close(got, want, tolerance=1e-5):
    got = np.asarray(ops.convert_to_numpy(got))
    assert got.shape == want.shape and np.abs(want).max() > 0
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def gradients_of_loop(inputs, weights, positions=POSITIONS):
    """Of `sum(weights * out)`, by central differences of the plain loop, number by number."""
    step, found = 1e-5, {}
    for name in NAMES:
        found[name] = np.zeros(inputs[name].shape)
        for place in np.ndindex(inputs[name].shape):
            ends = []
            for sign in (1, -1):
                moved = {**inputs, name: inputs[name].copy()}
                moved[name][place] += sign * step
                ends.append(np.sum(weights * plain_scan(**moved, positions=positions)[0]))
            found[name][place] = (ends[0] - ends[1]) / (2 * step)
    return found


def gradients_of_scan(inputs, weights, positions=POSITIONS, **options):
    weights = np.float32(weights)

    def target(name):
        return lambda value: ops.sum(weights * scan_with(name, value)[0])

    def scan_with(name, value):
        arrays = [value if one == name else ops.convert_to_tensor(np.float32(inputs[one])) for one in NAMES]
        return ssm_pack(*arrays, *tensors(positions), **options)

    return {
        name: np.asarray(gradient(target(name))(ops.convert_to_tensor(np.float32(inputs[name]))))
        for name in NAMES
    }


@pytest.mark.parametrize("chunk_length", [1, 4, 11, 32])  # one does not divide S, one is longer
def test_values_are_those_of_a_plain_loop(chunk_length):
    inputs = random_inputs()
    got, after = scan(inputs, chunk_length=chunk_length)
    want, want_after = plain_scan(**inputs)
    close(got, want)
    close(after, want_after)


def test_packs_states_and_channels_of_one_number_are_told_apart():
    inputs = random_inputs(shape=(3, 4, 3, 3))
    positions = np.array([[0, 1, 0, 1]] * 3, np.int32)
    close(scan(inputs, positions)[0], plain_scan(**inputs, positions=positions)[0])
    weights = np.random.default_rng(1).normal(size=(3, 4, 3))
    want = gradients_of_loop(inputs, weights, positions)
    for name, got in gradients_of_scan(inputs, weights, positions).items():
        close(got, want[name])


@pytest.mark.parametrize("chunk_length", [4, 32])
def test_gradients_are_those_of_a_plain_loop(chunk_length):
    inputs, weights = random_inputs(), np.random.default_rng(1).normal(size=(B, S, E))
    want = gradients_of_loop(inputs, weights)
    for name, got in gradients_of_scan(inputs, weights, chunk_length=chunk_length).items():
        close(got, want[name])


def test_without_positions_a_pack_is_one_sequence(monkeypatch):
    """From the states before it, and without a selection: what starts cost is told against this."""
    inputs, weights = random_inputs(), np.random.default_rng(1).normal(size=(B, S, E))
    whole = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    state = np.random.default_rng(2).normal(size=(B, Z, E))
    monkeypatch.setattr(ops, "where", None)
    given = ops.convert_to_tensor(np.float32(state))
    got, after = scan(inputs, None, chunk_length=4, state_BZE=given)
    want, want_after = plain_scan(**inputs, positions=whole + 1, state=state)
    close(got, want)
    close(after, want_after)
    want = gradients_of_loop(inputs, weights, whole)
    for name, got in gradients_of_scan(inputs, weights, None, chunk_length=4).items():
        close(got, want[name])


def test_nothing_passes_a_start():
    """A neighbour may be infinite: not a bit of what follows changes, nor does its gradient see it."""
    inputs, weights = random_inputs(), np.zeros((B, S, E))
    weights[0, 7:9] = 1  # of the third sequence alone
    before = gradients_of_scan(inputs, weights)
    outside = np.ones((B, S), bool)
    outside[0, 7:9] = False
    for name in ("u", "delta", "b", "c"):
        assert np.all(before[name][outside] == 0) and np.all(before[name][0, 7:9] != 0)
    changed = {name: values.copy() for name, values in inputs.items()}
    changed["u"][0, :7] = np.inf
    changed["b"][0, 9:] = -np.inf
    np.testing.assert_array_equal(
        *(np.asarray(ops.convert_to_numpy(scan(one)[0]))[0, 7:9] for one in (inputs, changed))
    )
    after = gradients_of_scan(changed, weights)
    np.testing.assert_array_equal(after["u"][0, 7:9], before["u"][0, 7:9])


def test_a_pack_goes_on_where_its_first_position_says_so():
    """Cut anywhere, with the states handed on, a sequence is as if it were whole; the states are data."""
    inputs = random_inputs()
    positions = np.stack([np.arange(S), np.r_[0:4, 0:7]]).astype(np.int32)
    whole, after = plain_scan(**inputs, positions=positions)
    for cut in (3, 6):
        sides = [slice(cut), slice(cut, None)]
        parts = [{n: v if n == "a" else v[:, side] for n, v in inputs.items()} for side in sides]
        first, state = scan(parts[0], positions[:, :cut])
        second, end = scan(parts[1], positions[:, cut:], state_BZE=state)
        close(np.concatenate([ops.convert_to_numpy(first), ops.convert_to_numpy(second)], axis=1), whole)
        close(end, after)
    restarted, _ = scan(parts[1], positions[:, cut:] * 0, state_BZE=state)
    close(restarted, plain_scan(**parts[1], positions=positions[:, cut:] * 0)[0])
    grown = gradient(lambda s: ops.sum(scan(parts[1], positions[:, cut:], state_BZE=s)[0]))(state)
    assert np.all(np.asarray(grown) == 0)


def test_numbers_add_up_in_float32():
    """Inputs of bfloat16 are widened before the first product."""
    inputs = random_inputs(shape=(1, 64, E, Z))
    positions = np.arange(64, dtype=np.int32)[None]
    narrow = [ops.cast(np.float32(inputs[name]), "bfloat16") for name in NAMES]
    rounded = {
        n: np.asarray(ops.convert_to_numpy(ops.cast(v, "float32")), float)
        for n, v in zip(NAMES, narrow, strict=True)
    }
    got, _ = ssm_pack(*narrow, ops.convert_to_tensor(positions))
    assert keras.backend.standardize_dtype(got.dtype) == "float32"
    close(got, plain_scan(**rounded, positions=positions)[0])
