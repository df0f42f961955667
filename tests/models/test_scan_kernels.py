"""The scan's kernels in Pallas's interpreter: values, states and gradients of a plain loop, cut at starts.

Legend: B packs per batch, S pack length, E inner width, Z states of a channel, T tokens of a chunk.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from next_tokens import CONFIG, assert_learns_alike, make_engine, packed_and_unpacked
from test_selective_scan import NAMES, close, gradients_of_loop, plain_scan, random_inputs

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
from jax import numpy as jnp  # noqa: E402
from jax.experimental import pallas  # noqa: E402

from bert_packed.architectures.mamba import selective_scan  # noqa: E402
from bert_packed.evaluation import contamination  # noqa: E402
from bert_packed.kernels.gpu import selective_scan as gpu_scan  # noqa: E402
from bert_packed.kernels.tpu import selective_scan as tpu_scan  # noqa: E402

pytestmark = [
    pytest.mark.both_backends,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
]
T, S, Z = 4, 11, 3
# In each pack another place of the second chunk begins a sequence; single tokens; padding after the last
POSITIONS = np.array(
    [
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1],
        [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1],
        [0, 0, 1, 2, 3, 4, 0, 1, 2, 0, 0],
        [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2],
    ],
    np.int32,
)
B = len(POSITIONS)
# E: padded; three blocks after padding; for TPUs three blocks of two rows
WIDTHS = [1, 5, 12]


@pytest.fixture(autouse=True)
def small_vectors_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(tpu_scan, "LANES", 2)
    monkeypatch.setattr(tpu_scan, "ROWS", 2)
    monkeypatch.setattr(gpu_scan, "WIDTH", 2)
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


@pytest.fixture(params=[tpu_scan, gpu_scan], ids=["tpu", "gpu"])
def kernel(request):
    return request.param


def inputs_of(width, seed=0):
    return random_inputs(seed, (B, S, width, Z))


def scan(kernel, inputs, positions=POSITIONS, state=None, chunk_length=T):
    arrays = (jnp.asarray(inputs[name], jnp.float32) for name in NAMES)
    positions, state = (None if of is None else jnp.asarray(of) for of in (positions, state))
    return kernel.ssm_pack(*arrays, positions, state, chunk_length=chunk_length)


def gradients_of_scan(kernel, inputs, weights, *arguments, **options):
    def target(inputs):
        return (jnp.float32(weights) * scan(kernel, inputs, *arguments, **options)[0]).sum()

    gradients = jax.grad(target)({name: jnp.float32(values) for name, values in inputs.items()})
    return {name: np.asarray(values) for name, values in gradients.items()}


def weights_of(inputs):
    return np.random.default_rng(1).normal(size=inputs["u"].shape)


def test_every_place_of_a_chunk_begins_a_sequence():
    assert set(np.nonzero(POSITIONS == 0)[1] % T) == set(range(T)) and S % T
    assert all(row[T + place] == 0 for place, row in enumerate(POSITIONS))


@pytest.mark.parametrize("chunk_length", [1, T, 32])
@pytest.mark.parametrize("width", WIDTHS)
def test_values_and_states_are_those_of_a_plain_loop(kernel, width, chunk_length):
    inputs = inputs_of(width)
    state = np.random.default_rng(2).normal(size=(B, Z, width)).astype(np.float32)
    whole = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    going_on = POSITIONS + (np.cumsum(POSITIONS == 0, axis=1) == 1)  # the first sequence began before
    cases = [(POSITIONS, None, POSITIONS), (going_on, state, going_on), (None, state, whole + 1)]
    for given, before, positions in cases:
        got = scan(kernel, inputs, given, before, chunk_length)
        for one, other in zip(got, plain_scan(**inputs, positions=positions, state=before), strict=True):
            close(one, other)


def test_gradients_are_those_of_a_plain_loop(kernel):
    inputs = inputs_of(5)
    want = gradients_of_loop(inputs, weights_of(inputs), POSITIONS)
    got = gradients_of_scan(kernel, inputs, weights_of(inputs))
    for name in NAMES:
        close(got[name], want[name])


@pytest.mark.parametrize("width", WIDTHS[::2])
def test_gradients_are_those_of_the_loop_for_cpus(kernel, width):
    """After states that are carried in."""
    inputs = inputs_of(width)
    state = np.random.default_rng(2).normal(size=(B, Z, width)).astype(np.float32)
    for positions in (POSITIONS, None):
        want, got = (
            gradients_of_scan(module, inputs, weights_of(inputs), positions, state)
            for module in (selective_scan, kernel)
        )
        for name in NAMES:
            close(got[name], want[name])


def test_states_are_data(kernel):
    inputs = inputs_of(5)
    state = jnp.ones((B, Z, 5))
    assert np.all(jax.grad(lambda state: scan(kernel, inputs, None, state)[0].sum())(state) == 0)
    by_states = jax.grad(lambda u: scan(kernel, {**inputs, "u": u}, None)[1].sum())(jnp.float32(inputs["u"]))
    assert np.all(by_states == 0)


@pytest.mark.parametrize("place", range(T))
def test_nothing_passes_a_start(kernel, place):
    """A neighbour may be infinite: not a bit of what follows changes, nor does its gradient see it."""
    inputs, weights = inputs_of(5), np.zeros((B, S, 5))
    start = T + place
    end = start + 1 + np.flatnonzero(POSITIONS[place, start + 1 :] == 0)[0]
    mine, before, after = (place, slice(start, end)), (place, slice(start)), (place, slice(end, S))
    weights[mine] = 1
    kept = gradients_of_scan(kernel, inputs, weights)
    outside = np.ones((B, S), bool)
    outside[mine] = False
    for name in ("u", "delta", "b", "c"):
        assert np.all(kept[name][outside] == 0) and np.all(kept[name][mine] != 0)
    changed = {name: values.copy() for name, values in inputs.items()}
    changed["u"][before] = np.inf
    changed["b"][after] = -np.inf
    changed["c"][after] = np.inf
    one, other = (np.asarray(scan(kernel, of)[0])[mine] for of in (inputs, changed))
    np.testing.assert_array_equal(one, other)
    found = gradients_of_scan(kernel, changed, weights)
    for name in ("u", "delta", "b", "c"):
        np.testing.assert_array_equal(found[name][mine], kept[name][mine])


def test_numbers_add_up_in_float32(kernel):
    """Inputs of bfloat16 are read as they are, and widened before the first product."""
    inputs = inputs_of(5)
    narrow = {name: jnp.asarray(values, jnp.bfloat16) for name, values in inputs.items()}
    rounded = {name: np.asarray(values, np.float64) for name, values in narrow.items()}
    positions = jnp.asarray(POSITIONS)
    got, _ = kernel.ssm_pack(*(narrow[name] for name in NAMES), positions, chunk_length=T)
    assert got.dtype == jnp.float32
    close(got, plain_scan(**rounded, positions=POSITIONS)[0])

    def target(narrow):
        return kernel.ssm_pack(*(narrow[name] for name in NAMES), positions, chunk_length=T)[0].sum()

    want = gradients_of_scan(kernel, rounded, np.ones(rounded["u"].shape))
    for name, values in jax.grad(target)(narrow).items():
        assert values.dtype == jnp.bfloat16
        close(values.astype("float32"), want[name], 2**-7)


@pytest.mark.parametrize("build", [{}, {"remat": True}, {"num_rows": 5}])
def test_a_model_learns_what_it_learns_with_the_loop(monkeypatch, kernel, build):
    monkeypatch.setattr(tpu_scan, "LANES", 16)
    monkeypatch.setattr(gpu_scan, "WIDTH", 32)
    assert_learns_alike(CONFIG, build, {"scan": functools.partial(kernel.ssm_pack, chunk_length=T)})


@pytest.mark.parametrize("kernel", [tpu_scan], ids=["tpu"])  # the other differs in nothing that it reads
def test_the_audit_sees_a_scan_that_takes_a_pack_for_one_sequence(kernel):
    batch = packed_and_unpacked([[4, 1, 2], [1, 5], [8]], max_seq_length=8)[0]
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)

    def leaking(u, delta, a, b, c, position_ids, state=None):
        return sound(u, delta, a, b, c, None, state)

    sound = functools.partial(kernel.ssm_pack, chunk_length=T)
    for scan, is_sound in ((sound, True), (leaking, False)):
        checks = contamination.audit(make_engine(config=config, build={"scan": scan}), batch)
        assert len(checks) > 10 and all(check.passed for check in checks) == is_sound
