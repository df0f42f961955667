"""The scan of a Mamba-2 against that of a Mamba-1 with equal decays; and its cut at every start.

Legend: B packs per batch, S pack length, T tokens of a chunk, N heads, H head width, E inner width, Z states
of a channel, G groups of heads.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops
from next_tokens import MAMBA2, make_engine, packed_and_unpacked

from bert_packed.architectures.mamba.selective_scan import ssm_pack
from bert_packed.architectures.mamba2 import model as mamba2
from bert_packed.architectures.mamba2 import state_space_duality
from bert_packed.architectures.mamba2.state_space_duality import ssd_pack
from bert_packed.evaluation import contamination
from bert_packed.layers.causal_convolution import conv1d_pack
from bert_packed.training.backend import compiled, gradient

pytestmark = pytest.mark.both_backends
B, S, N, H, G, Z = 2, 14, 4, 2, 2, 3
E, T = N * H, 4
NAMES = ("x", "delta", "a", "b", "c", "skip")
# Single tokens, starts at every place of a chunk of 4, two in one chunk, one over three chunks, padding
POSITIONS = np.array(
    [[0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4]], np.int32
)


def random_inputs(seed=0, length=S):
    rng = np.random.default_rng(seed)
    inputs = {
        "x": rng.normal(size=(B, length, E)),
        "delta": np.exp(rng.normal(size=(B, length, N)) - 1),
        "a": -np.exp(rng.normal(size=N)),
        "b": rng.normal(size=(B, length, G, Z)),
        "c": rng.normal(size=(B, length, G, Z)),
        "skip": rng.normal(size=N),
    }
    return {name: np.float32(values) for name, values in inputs.items()}


WEIGHTS = np.float32(np.random.default_rng(1).normal(size=(B, S, E)))
NOTHING = np.zeros((B, Z, E), np.float32)


def duality(inputs, positions, state, chunk_length):
    return ssd_pack(*(inputs[name] for name in NAMES), positions, state, chunk_length)


def selective(inputs, positions, state, chunk_length):
    """The same by the other scan, token by token, in which each channel and state has its own decay."""
    x, delta, a, b, c, skip = (inputs[name] for name in NAMES)
    found = []
    for group in range(G):
        heads, channels = (slice(group * n // G, (group + 1) * n // G) for n in (N, E))
        a_ZE = ops.repeat(a[heads], H)[None] * ops.ones((Z, 1))
        delta_BSE = ops.repeat(delta[:, :, heads], H, axis=-1)
        given = (b[:, :, group], c[:, :, group], positions, state[..., channels])
        found.append(ssm_pack(x[..., channels], delta_BSE, a_ZE, *given, chunk_length))
    y, after = (ops.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
    return y + x * ops.repeat(skip, H), after


@functools.cache
def program(scan, chunk_length=T):
    """A function of inputs to outputs, states after them, and gradients of `sum(weights * outputs)`."""

    def found(inputs, positions, state, weights):
        def target(inputs):
            return ops.sum(weights * scan(inputs, positions, state, chunk_length)[0])

        return *scan(inputs, positions, state, chunk_length), gradient(target)(inputs)

    run = compiled(found)

    def numbers(inputs, positions=POSITIONS, state=NOTHING, weights=WEIGHTS):
        y, after, gradients = run(inputs, positions, state, weights)
        return np.asarray(y), np.asarray(after), {name: np.asarray(one) for name, one in gradients.items()}

    return numbers


def close(got, want, tolerance=2e-6):
    assert got.shape == want.shape and np.abs(want).max() > 0
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def all_close(got, want):
    close(got[0], want[0])
    close(got[1], want[1])
    for name, values in want[2].items():
        close(got[2][name], values)


def test_sequences_start_at_every_place_of_a_chunk():
    assert {*np.nonzero((POSITIONS == 0) & (np.arange(S) > 0))[1] % T} == {*range(T)}


# One does not divide S, one is longer
@pytest.mark.parametrize("chunk_length", [pytest.param(1, marks=pytest.mark.slow), T, 64])
def test_values_and_gradients_are_those_of_the_other_scan(chunk_length):
    inputs = random_inputs()
    all_close(program(duality, chunk_length)(inputs), program(selective)(inputs))


def assert_alone(run, start, length):
    """Not a bit passes between a sequence and its neighbours."""
    positions = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    positions[:, start:] -= start
    positions[:, start + length :] -= length
    own = np.zeros((B, S), bool)
    own[:, start : start + length] = True
    inputs, others = random_inputs(), random_inputs(seed=3)
    changed = {
        name: values
        if name in ("a", "skip")
        else np.where(own.reshape(B, S, *[1] * (values.ndim - 2)), values, others[name])
        for name, values in inputs.items()
    }
    before, after = (run(one, positions, weights=WEIGHTS * own[..., None]) for one in (inputs, changed))
    np.testing.assert_array_equal(before[0][own], after[0][own])
    assert np.all(before[0][~own] != after[0][~own])
    for name in ("x", "delta", "b", "c"):
        for received in (before[2][name], after[2][name]):
            assert np.all(received[~own] == 0) and np.abs(received[own]).max() > 0
        np.testing.assert_array_equal(before[2][name][own], after[2][name][own])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_sequence_is_alone_wherever_it_starts(length):
    for start in range(1, 2 * T + 1):
        assert_alone(program(duality), start, length)


def test_decays_beyond_the_range_of_exp_have_gradients():
    """Across a start the exponent is positive: its `exp` would be infinite, and 0 times that no number."""
    inputs = random_inputs()
    inputs["delta"] += np.float32(200)
    assert all(np.isfinite(values).all() for values in program(duality)(inputs)[2].values())


@pytest.mark.slow
def test_a_token_that_forgets_all_rounds_nothing_after_it():
    """In a long chunk the sum of log-decays would have few digits left behind such a token."""
    length = 200
    inputs = random_inputs(length=length)
    inputs["delta"] *= 0.02
    inputs["delta"][:, 60] = 1000.0
    positions = np.tile(np.r_[0:130, 0 : length - 130].astype(np.int32), (B, 1))
    weights = np.float32(np.random.default_rng(1).normal(size=(B, length, E)))
    given = inputs, positions, NOTHING, weights
    got, want = program(duality, 256)(*given), program(selective, 32)(*given)
    close(got[0], want[0])
    for name, values in want[2].items():
        close(got[2][name], values)


def test_a_pack_goes_on_where_its_first_position_says_so():
    """With the states handed on, a cut sequence is as if it were whole; the states are data."""
    inputs, cut = random_inputs(), S // 2
    positions = np.stack([np.arange(S), np.r_[0:4, 0 : S - 4]]).astype(np.int32)
    parts = [
        {name: values if name in ("a", "skip") else values[:, side] for name, values in inputs.items()}
        for side in (slice(cut), slice(cut, None))
    ]
    whole = program(selective)(inputs, positions)
    first = program(duality)(parts[0], positions[:, :cut], weights=WEIGHTS[:, :cut])
    given = {"positions": positions[:, cut:], "state": first[1], "weights": WEIGHTS[:, cut:]}
    second = program(duality)(parts[1], **given)
    close(np.concatenate([first[0], second[0]], axis=1), whole[0])
    close(second[1], whole[1])
    all_close(second, program(selective)(parts[1], **given))
    grown = gradient(lambda state: ops.sum(duality(parts[1], positions[:, cut:], state, T)[0]))(
        ops.convert_to_tensor(first[1])
    )
    assert np.all(np.asarray(grown) == 0)


def test_without_positions_a_pack_is_one_sequence():
    """From the states before it."""
    inputs, state = random_inputs(), np.float32(np.random.default_rng(2).normal(size=(B, Z, E)))
    got = compiled(lambda inputs, state: duality(inputs, None, state, T))(inputs, state)
    want = program(selective)(inputs, np.tile(np.arange(1, S + 1, dtype=np.int32), (B, 1)), state)
    close(np.asarray(got[0]), want[0])
    close(np.asarray(got[1]), want[1])


def test_numbers_add_up_in_float32():
    """Of bfloat16 are factors and products of chunks; decays and states are not."""
    inputs = random_inputs()
    narrow = {name: ops.cast(values, "bfloat16") for name, values in inputs.items()}
    got, after = duality({**narrow, "delta": inputs["delta"], "a": inputs["a"]}, POSITIONS, None, T)
    assert {keras.backend.standardize_dtype(one.dtype) for one in (got, after)} == {"float32"}
    want, want_after, _ = program(selective)(inputs)
    close(np.asarray(got), want, 2**-6)
    close(np.asarray(after), want_after, 2**-6)


RECEIVED, OF_WEIGHTS = "neighbors: gradient on their embeddings", "unpacked: gradients of all weights"
FORWARD = {
    *(f"neighbors: change of {name}" for name in ("hidden_states", "logits")),
    *(f"unpacked: {name}" for name in ("hidden_states", "logits", "loss", "lm_loss", "perplexity")),
    *("unpacked: sequence_perplexity", "unpacked: byte_perplexity"),
}
# By what is broken: the checks of the audit that fail
FAULTS = {
    "mask of the chunk": {RECEIVED, OF_WEIGHTS, *FORWARD},
    "state between chunks": {RECEIVED, OF_WEIGHTS, *FORWARD},
    "convolution": {RECEIVED, OF_WEIGHTS, *FORWARD},
    "backward alone": {RECEIVED, OF_WEIGHTS},
}


def plant(monkeypatch, fault):
    """Break one of the walls between the sequences of a pack."""
    own_past, decays, pull_back = (
        getattr(state_space_duality, name) for name in ("own_past", "restarting_decays", "pull_back")
    )

    def one_sequence(logs_CBNT, numbers_CBT):
        return decays(logs_CBNT, ops.zeros_like(numbers_CBT))

    def whole_sums(logs_CBNT, numbers_CBT):
        return ops.zeros_like(logs_CBNT), ops.cumsum(logs_CBNT, axis=-1), *decays(logs_CBNT, numbers_CBT)[2:]

    def unbroken(values, kernel, bias, positions, tail):
        return conv1d_pack(values, kernel, bias, None, tail)

    def leaking_gradient(function, arguments, gradients):
        state_BZE, *rest = pull_back(function, arguments, gradients)
        return state_BZE + gradients[0], *rest  # past the start of a sequence, too

    module, name, by = {
        "mask of the chunk": (state_space_duality, "own_past", lambda numbers: own_past(0 * numbers)),
        "state between chunks": (state_space_duality, "restarting_decays", one_sequence),
        "sums of decays": (state_space_duality, "restarting_decays", whole_sums),
        "convolution": (mamba2, "conv1d_pack", unbroken),
        "backward alone": (state_space_duality, "pull_back", leaking_gradient),
    }[fault]
    monkeypatch.setattr(module, name, by)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*(name for name in FAULTS if name != "convolution"), "sums of decays"])
def test_faults_are_seen(monkeypatch, fault):
    plant(monkeypatch, fault)
    run = program.__wrapped__(duality)
    with pytest.raises(AssertionError):
        for start in range(1, 2 * T + 1):
            assert_alone(run, start, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_sees_faults(monkeypatch, fault):
    plant(monkeypatch, fault)
    # The second begins in the second chunk and ends in the third
    batch = packed_and_unpacked([[5, 6, 1], [1, 5, 2]])[0]
    engine, rng = make_engine(config=MAMBA2), np.random.default_rng(0)
    for weight in engine.model.weights:  # initial ones mix little
        weight.assign(np.asarray(weight) + rng.normal(size=weight.shape, scale=0.3))
    failed = {check.name for check in contamination.audit(engine, batch) if not check.passed}
    assert failed == FAULTS[fault]
