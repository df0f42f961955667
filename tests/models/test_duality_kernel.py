"""The kernels of a Mamba-2's scan in Pallas's interpreter: what the scan of a Mamba-1 gives, cut at starts.

Legend: B packs per batch, S pack length, T tokens of a chunk, E inner width, Z states of a channel.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from next_tokens import MAMBA2, assert_learns_alike, make_engine, packed_and_unpacked
from test_state_space_duality import (
    NAMES,
    POSITIONS,
    B,
    E,
    S,
    T,
    Z,
    all_close,
    assert_alone,
    close,
    program,
    random_inputs,
    selective,
)

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
from jax import numpy as jnp  # noqa: E402
from jax.experimental import pallas  # noqa: E402

from bert_packed.evaluation import contamination  # noqa: E402
from bert_packed.kernels.tpu import duality as tpu_duality  # noqa: E402

pytestmark = [
    pytest.mark.both_backends,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
]
# Lanes of a vector and channels of a block at most, for two heads of two channels: both heads in a vector;
# each in another block; two groups of one head in a block; a head of zeros; a channel of zeros
SIZES = [(4, 4), (2, 2), (2, 4), (6, 6), (3, 4)]


@pytest.fixture(autouse=True)
def small_vectors_in_the_interpreter(monkeypatch):
    set_sizes(monkeypatch, 4, 4)
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


def set_sizes(monkeypatch, lanes, block):
    monkeypatch.setattr(tpu_duality, "LANES", lanes)
    monkeypatch.setattr(tpu_duality, "BLOCK", block)


def kernel(inputs, positions, state, chunk_length):
    arrays = (jnp.asarray(inputs[name]) for name in NAMES)
    return tpu_duality.ssd_pack(*arrays, positions, state, chunk_length=chunk_length)


def new_program(chunk_length=T):
    """As `program`, compiled again."""
    return program.__wrapped__(kernel, chunk_length)


@pytest.mark.parametrize("sizes", SIZES)
def test_values_states_and_gradients_are_those_of_the_other_scan(monkeypatch, sizes):
    set_sizes(monkeypatch, *sizes)
    inputs, run = random_inputs(), new_program()
    all_close(run(inputs), program(selective)(inputs))
    going_on = POSITIONS + (np.cumsum(POSITIONS == 0, axis=1) == 1)  # the first sequence began before
    state = np.random.default_rng(2).normal(size=(B, Z, E)).astype(np.float32)
    all_close(run(inputs, going_on, state), program(selective)(inputs, going_on, state))


@pytest.mark.parametrize("chunk_length", [1, 64])
def test_chunks_may_have_any_length(chunk_length):
    inputs = random_inputs()
    all_close(new_program(chunk_length)(inputs), program(selective)(inputs))


def test_without_positions_a_pack_is_one_sequence():
    inputs, state = random_inputs(), np.float32(np.random.default_rng(2).normal(size=(B, Z, E)))
    got = kernel(inputs, None, state, T)
    want = program(selective)(inputs, np.tile(np.arange(1, S + 1, dtype=np.int32), (B, 1)), state)
    close(np.asarray(got[0]), want[0])
    close(np.asarray(got[1]), want[1])


def test_states_are_data():
    inputs, state = random_inputs(), jnp.ones((B, Z, E))
    assert np.all(jax.grad(lambda state: kernel(inputs, None, state, T)[0].sum())(state) == 0)
    by_states = jax.grad(lambda x: kernel({**inputs, "x": x}, None, state, T)[1].sum())
    assert np.all(by_states(jnp.asarray(inputs["x"])) == 0)


def test_a_sequence_is_alone_wherever_it_starts():
    run = new_program()
    for start in range(1, 2 * T + 1):
        for length in (1, 2, 3):
            assert_alone(run, start, length)


@pytest.mark.parametrize("which", ["mask of the chunk", "backward alone"])
def test_faults_are_seen(monkeypatch, which):
    plant(monkeypatch, which)
    run = new_program()
    with pytest.raises(AssertionError):
        for start in range(1, 2 * T + 1):
            assert_alone(run, start, 2)


def plant(monkeypatch, fault):
    """Let something pass between the sequences of a pack."""
    over_chunks, backward = tpu_duality.over_chunks, tpu_duality._backward_kernel

    def whole_chunk(*tensors):
        return over_chunks(*tensors[:-1], 0 * tensors[-1])

    def leaking_gradient(*refs, sizes):
        with monkeypatch.context() as planted:
            # Past the start of a sequence, too
            planted.setattr(tpu_duality._Chunk, "kept", lambda self, group: jnp.ones((1, sizes.lanes)))
            backward(*refs, sizes=sizes)

    name, by = {
        "mask of the chunk": ("over_chunks", whole_chunk),
        "backward alone": ("_backward_kernel", leaking_gradient),
    }[fault]
    monkeypatch.setattr(tpu_duality, name, by)


def test_numbers_add_up_in_float32():
    """Of bfloat16 are the factors of products; the products, decays and states are not."""
    inputs = random_inputs()
    narrow = {name: jnp.asarray(inputs[name], "bfloat16") for name in ("x", "b", "c")}
    rounded = inputs | {name: np.asarray(values, np.float32) for name, values in narrow.items()}
    got = new_program()(inputs | narrow)
    want = program(selective)(rounded)
    assert got[0].dtype == got[1].dtype == np.float32
    close(got[0], want[0], 2**-7)
    close(got[1], want[1], 2**-7)
    for name, values in got[2].items():
        assert values.dtype == (inputs | narrow)[name].dtype
        close(values.astype(np.float32), want[2][name], 2**-6)


@pytest.mark.parametrize("build", [{"remat": True}, {"num_rows": 5}])
def test_a_model_learns_what_it_learns_without(monkeypatch, build):
    set_sizes(monkeypatch, 16, 16)
    duality = functools.partial(tpu_duality.ssd_pack, chunk_length=T)
    assert_learns_alike(MAMBA2, build, {"duality": duality})


@pytest.mark.slow
def test_the_audit_sees_a_kernel_that_takes_a_chunk_for_one_sequence(monkeypatch):
    set_sizes(monkeypatch, 16, 16)
    batch = packed_and_unpacked([[4, 1, 2], [1, 5], [8]], max_seq_length=8)[0]
    config = dataclasses.replace(MAMBA2, num_hidden_layers=1)
    for is_sound in (True, False):
        if not is_sound:
            plant(monkeypatch, "mask of the chunk")
        build = {"duality": functools.partial(tpu_duality.ssd_pack, chunk_length=T)}
        checks = contamination.audit(make_engine(config=config, build=build), batch)
        assert len(checks) > 10 and all(check.passed for check in checks) == is_sound
