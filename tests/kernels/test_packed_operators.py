"""Convolution and scans of packs against plain loops: outputs, what is handed on, gradients, and starts.

Each operator has a form for all devices, and kernels of Pallas, which run in its interpreter. The fault that
this file alone finds: an implementation whose numbers differ from the definition, or that passes a start.

Legend: B packs per batch, S pack length, E inner width, W taps, X = W - 1 tokens before a pack, Z states of a
channel, N heads, G groups of heads, T tokens of a chunk, C rows of what is carried.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import keras
import next_tokens
import numpy as np
import pytest
from keras import ops

from bert_packed.training.backend import compiled, gradient

IS_JAX = keras.backend.backend() == "jax"
pytestmark = pytest.mark.both_backends


def positions_of(lengths):
    return np.array([np.concatenate([np.arange(n) for n in of_pack]) for of_pack in lengths], np.int32)


def plain_convolution(inputs, positions, tail_BXE):
    """Tap by tap, as far back as the position goes; then SiLU. All functions take leading axes before B."""
    x_BSE, kernel_WE, bias_E = inputs["x"], inputs["kernel"], inputs["bias"]
    num_taps, length = kernel_WE.shape[-2], x_BSE.shape[-2]
    before = np.broadcast_to(tail_BXE, (*x_BSE.shape[:-2], *tail_BXE.shape[-2:]))
    known = np.concatenate([before, x_BSE], axis=-2)
    found = []
    for token in range(length):
        total_BE = bias_E[..., None, :]
        for back in range(num_taps):
            is_own_B1 = positions[:, token, None] >= back
            tap_BE = kernel_WE[..., None, num_taps - 1 - back, :] * known[..., num_taps - 1 + token - back, :]
            total_BE = total_BE + is_own_B1 * tap_BE
        found.append(total_BE / (1 + np.exp(-total_BE)))
    return np.stack(found, axis=-2), known[..., length:, :]


def scan_tokens(u_BSE, delta_BSE, a_ZE, b_BSEZ, c_BSEZ, positions, state_BZE):
    """The recurrence of Section 3 of "Mamba", token by token."""
    state_BEZ, found = np.swapaxes(state_BZE, -1, -2), []
    for token in range(u_BSE.shape[-2]):
        size_BE1 = delta_BSE[..., token, :, None]
        is_inside = (positions[:, token] > 0)[:, None, None]
        decayed_BEZ = is_inside * np.exp(size_BE1 * np.swapaxes(a_ZE, -1, -2)[..., None, :, :]) * state_BEZ
        state_BEZ = decayed_BEZ + size_BE1 * u_BSE[..., token, :, None] * b_BSEZ[..., token, :, :]
        found.append(np.sum(state_BEZ * c_BSEZ[..., token, :, :], axis=-1))
    return np.stack(found, axis=-2), np.swapaxes(state_BEZ, -1, -2)


def plain_scan(inputs, positions, state_BZE):
    b_BSEZ, c_BSEZ = (inputs[name][..., None, :] for name in "bc")
    return scan_tokens(inputs["u"], inputs["delta"], inputs["a"], b_BSEZ, c_BSEZ, positions, state_BZE)


def plain_duality(inputs, positions, state_BZE):
    """The same recurrence with one decay and step a head, and one B and C a group of heads."""
    x_BSE = inputs["x"]

    def by_channel(values, axis=-1):
        return np.repeat(values, x_BSE.shape[-1] // values.shape[axis], axis=axis)

    a_ZE = by_channel(inputs["a"])[..., None, :]
    b_BSEZ, c_BSEZ = (by_channel(inputs[name], -2) for name in "bc")
    y_BSE, after = scan_tokens(x_BSE, by_channel(inputs["delta"]), a_ZE, b_BSEZ, c_BSEZ, positions, state_BZE)
    return y_BSE + x_BSE * by_channel(inputs["skip"])[..., None, None, :], after


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator by its definition."""

    plain: Callable  # of a dict of inputs, positions and what is carried in
    axes: dict  # letters of each input's axes
    positions: np.ndarray  # int32 `[B, S]`; at every place of the second chunk a sequence begins
    chunk_length: int
    function: str  # its name in the modules that implement it
    option: str  # its name among the options of a model
    infinite: tuple  # inputs that may be infinite in neighbours before and after
    tolerance: float  # of outputs in bfloat16, relative to the largest


# There are single tokens, as padding is, and sequences over three chunks
IN_CHUNKS_OF_4 = positions_of([[4, 5, 2], [3, 2, 4, 2], [1, 5, 3, 1, 1], [7, 1, 3]])
IN_CHUNKS_OF_8 = positions_of([[8, 4, 10], [9, 4, 1, 8], [10, 4, 6, 1, 1], [11, 4, 2, 5]])
CONVOLVED = {"x": "BSE", "kernel": "WE", "bias": "E"}
SCANNED = {"u": "BSE", "delta": "BSE", "a": "ZE", "b": "BSZ", "c": "BSZ"}
IN_HEADS = {"x": "BSE", "delta": "BSN", "a": "N", "b": "BSGZ", "c": "BSGZ", "skip": "N"}
BOTH = {"x": np.inf}, {"x": -np.inf}
PAST, FUTURE = {"u": np.inf}, {"b": -np.inf, "c": np.inf}
OPERATORS = {
    "convolution": Operator(
        plain_convolution, CONVOLVED, IN_CHUNKS_OF_8, 8, "conv1d_pack", "convolve", BOTH, 2**-8
    ),
    "scan": Operator(plain_scan, SCANNED, IN_CHUNKS_OF_4, 4, "ssm_pack", "scan", (PAST, FUTURE), 1e-5),
    # Its products are of whole chunks, where neighbours are multiplied by 0
    "duality": Operator(plain_duality, IN_HEADS, IN_CHUNKS_OF_4, 4, "ssd_pack", "duality", ({}, {}), 2**-6),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """An implementation in the sizes of a test."""

    operator: str
    module: str
    width: int  # E
    states: int  # W or Z
    chunk_length: int | None = None  # None for an implementation without chunks
    sizes: tuple = ()  # constants of the module, smaller than on a device

    @property
    def definition(self):
        return OPERATORS[self.operator]

    def load(self):
        module = importlib.import_module(f"bert_packed.{self.module}")
        function = getattr(module, self.definition.function)
        return functools.partial(function, chunk_length=self.chunk_length) if self.chunk_length else function

    def __str__(self):
        return "-".join(map(str, (self.module, self.width, self.states, self.chunk_length)))


CONVOLVE = (("PIECE", 4), ("LANES", 2), ("ROWS", 2), ("BLOCK", 4))
TPU_SCAN, GPU_SCAN = (("LANES", 2), ("ROWS", 2)), (("WIDTH", 2),)


def tpu_duality(lanes, block):
    return Form("duality", "kernels.tpu.duality", 8, 3, 4, (("LANES", lanes), ("BLOCK", block)))


PLAIN_FORMS = [
    Form("convolution", "architectures.mamba.operators", 3, 2),
    Form("convolution", "architectures.mamba.operators", 3, 4),
    # Chunks have one token, do not divide S, or are longer than S
    Form("scan", "architectures.mamba.operators", 4, 4, 1),
    Form("scan", "architectures.mamba.operators", 3, 2, 4),
    Form("scan", "architectures.mamba.operators", 3, 2, 32),
    Form("duality", "architectures.mamba2.state_space_duality", 8, 3, 4),
    Form("duality", "architectures.mamba2.state_space_duality", 8, 3, 64),
]
KERNELS = [
    # Widths are padded, some blocks a vector after padding, some two vectors
    Form("convolution", "kernels.tpu.convolution", 1, 7, 8, CONVOLVE),
    Form("convolution", "kernels.tpu.convolution", 5, 4, 8, CONVOLVE),
    Form("convolution", "kernels.tpu.convolution", 8, 2, 64, CONVOLVE),
    Form("scan", "kernels.tpu.selective_scan", 1, 3, 1, TPU_SCAN),
    Form("scan", "kernels.tpu.selective_scan", 5, 3, 4, TPU_SCAN),
    Form("scan", "kernels.tpu.selective_scan", 12, 3, 32, TPU_SCAN),
    Form("scan", "kernels.gpu.selective_scan", 1, 3, 1, GPU_SCAN),
    Form("scan", "kernels.gpu.selective_scan", 5, 3, 4, GPU_SCAN),
    Form("scan", "kernels.gpu.selective_scan", 12, 3, 32, GPU_SCAN),
    # Four heads have two channels: two heads share a vector; each has another block; two groups of one head
    # share a block; a head is zeros; a channel is zeros
    *(tpu_duality(*sizes) for sizes in ((4, 4), (2, 2), (2, 4), (6, 6), (3, 4))),
]
COMPILED = PLAIN_FORMS[5]
OWN_PLACES = [PLAIN_FORMS[1], PLAIN_FORMS[3], COMPILED, KERNELS[1], KERNELS[4], KERNELS[7], KERNELS[9]]


def each(forms):
    """Parametrise by forms, of which kernels are for JAX alone."""
    skip = pytest.mark.skipif(not IS_JAX, reason="needs KERAS_BACKEND=jax")
    return pytest.mark.parametrize(
        "form", [pytest.param(form, marks=skip if form.sizes else ()) for form in forms], ids=str
    )


@pytest.fixture(autouse=True)
def small_sizes_in_the_interpreter(request, monkeypatch):
    form = request.node.callspec.params.get("form") if hasattr(request.node, "callspec") else None
    if form is not None and form.sizes:
        set_sizes(monkeypatch, form.module, form.sizes)


def set_sizes(monkeypatch, module, sizes):
    from jax.experimental import pallas

    for name, value in sizes:
        monkeypatch.setattr(importlib.import_module(f"bert_packed.{module}"), name, value)
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


def draw(form, seed=0, positions=None):
    """Random inputs, weights of the outputs, and what is carried in, in float32."""
    rng = np.random.default_rng(seed)
    packs, length = (form.definition.positions if positions is None else positions).shape
    sizes = {"B": packs, "S": length, "E": form.width, "W": form.states, "Z": form.states, "N": 4, "G": 2}
    sizes["C"] = form.states - (form.operator == "convolution")

    def normal(axes):
        return np.float32(rng.normal(size=[sizes[axis] for axis in axes]))

    inputs = {name: normal(axes) for name, axes in form.definition.axes.items()}
    if form.operator != "convolution":
        inputs["delta"], inputs["a"] = np.exp(inputs["delta"] - 1), -np.exp(inputs["a"])
    return inputs, normal("BSE"), normal("BCE")


@functools.cache
def program(form):
    """A function to outputs, what is handed on, and gradients by inputs and by what is carried in.

    The gradients are of `sum(weights * outputs)` and of all that is handed on, which is data: it has none.
    """
    implementation = form.load()

    def run(inputs, weights, positions, carried):
        def outputs(given):
            *inputs, carried = given
            return implementation(*inputs, positions, carried)

        def target(given):
            found, after = outputs(given)
            return ops.sum(weights * ops.cast(found, "float32")) + ops.sum(ops.cast(after, "float32"))

        given = [ops.convert_to_tensor(values) for values in (*inputs, carried)]
        return outputs(given), gradient(target)(given)

    # TensorFlow compiles for longer than the rest of this file runs
    return compiled(run) if IS_JAX or form == COMPILED else run


def run(form, inputs, *arguments):
    """The same as arrays of NumPy, with a dict of the gradients by the inputs."""
    (outputs, after), (*gradients, by_carried) = program(form)([*inputs.values()], *arguments)
    assert not to_numpy(by_carried).any()
    gradients = {name: to_numpy(of) for name, of in zip(inputs, gradients, strict=True)}
    return to_numpy(outputs), to_numpy(after), gradients


def to_numpy(values):
    return np.asarray(ops.convert_to_numpy(ops.cast(values, "float32")))


def run_plainly(form, inputs, weights, positions, carried):
    """The same by the loop in float64; its gradients are central differences of all numbers at once."""
    plain, step, gradients = form.definition.plain, 1e-5, {}
    inputs = {name: np.asarray(of, np.float64) for name, of in inputs.items()}
    for name, values in inputs.items():
        moves = step * np.eye(values.size).reshape(values.size, *values.shape)
        above, below = (
            np.sum(weights * plain({**inputs, name: values + sign * moves}, positions, carried)[0], (1, 2, 3))
            for sign in (1, -1)
        )
        gradients[name] = ((above - below) / (2 * step)).reshape(values.shape)
    return *plain(inputs, positions, carried), gradients


def close(got, want, tolerance=1e-5):
    assert got.shape == want.shape and np.abs(want).max() > 0
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def all_close(got, want, tolerance=1e-5):
    close(got[0], want[0], tolerance)
    close(got[1], want[1], tolerance)
    for name, values in want[2].items():
        close(got[2][name], values, tolerance)


@each([*PLAIN_FORMS, *KERNELS])
def test_outputs_and_gradients_are_those_of_a_plain_loop(form):
    """Sequences that began before go on from what the pack before has handed on."""
    inputs, weights, carried = draw(form)
    starts = form.definition.positions
    going_on = starts + form.states * (np.cumsum(starts == 0, axis=1) == 1)
    for positions, before in ((starts, 0 * carried), (going_on, carried)):
        given = form, inputs, weights, positions, before
        all_close(run(*given), run_plainly(*given))


@each(OWN_PLACES)
def test_without_positions_a_pack_is_one_sequence(monkeypatch, form):
    """Nothing is selected by a start then, which is what the cost of starts is compared with."""
    inputs, weights, carried = draw(form)
    if form.module == "architectures.mamba.operators":
        monkeypatch.setattr(ops, "where", None)
    positions = np.tile(np.arange(weights.shape[1]) + form.states, (len(weights), 1))
    got = run(form, inputs, weights, None, carried)
    all_close(got, run_plainly(form, inputs, weights, positions, carried))


@each(OWN_PLACES)
def test_nothing_passes_a_start(form):
    """Sequences begin anywhere in a chunk: no bit of them or of their gradients changes with neighbours."""
    (inputs, weights, carried), (others, _, _) = draw(form), draw(form, 3)
    positions, chunk = form.definition.positions, form.definition.chunk_length
    packs, length = positions.shape
    of_tokens = [name for name, values in inputs.items() if values.shape[:2] == (packs, length)]
    for place in range(chunk):
        pack, start = place % packs, chunk + place
        assert positions[pack, start] == 0
        end = start + 1 + np.flatnonzero(np.r_[positions[pack, start + 1 :], 0] == 0)[0]
        mine, before, after = (pack, slice(start, end)), (pack, slice(start)), (pack, slice(end, length))
        is_mine = np.zeros((packs, length), bool)
        is_mine[mine] = True
        changed = {name: values.copy() for name, values in inputs.items()}
        for name in of_tokens:
            changed[name][~is_mine] = others[name][~is_mine]
        for where, infinite in zip((before, after), form.definition.infinite, strict=True):
            for name, value in infinite.items():
                changed[name][where] = value
        mine_alone = weights * is_mine[..., None], positions, 0 * carried
        found = [run(form, of, *mine_alone) for of in (inputs, changed)]
        np.testing.assert_array_equal(*(of[0][mine] for of in found))
        assert np.all(found[0][0][~is_mine] != found[1][0][~is_mine])
        for name in of_tokens:
            assert np.all(found[0][2][name][~is_mine] == 0) and np.all(found[0][2][name][mine] != 0), name
            np.testing.assert_array_equal(*(of[2][name][mine] for of in found), err_msg=name)


@each(OWN_PLACES)
def test_numbers_of_bfloat16_add_up_in_float32(form):
    """The inputs are widened before the first product, and gradients are rounded once."""
    inputs, weights, carried = draw(form)
    positions = form.definition.positions
    # Decays and skips are float32 in every model
    narrow = {
        name: of if name in ("delta", "a", "skip") else ops.cast(of, "bfloat16")
        for name, of in inputs.items()
    }
    rounded = {name: to_numpy(of) for name, of in narrow.items()}
    (outputs, after), gradients = program(form)([*narrow.values()], weights, positions, carried)
    want = run_plainly(form, rounded, weights, positions, carried)
    assert dtype_of(outputs) == ("bfloat16" if form.operator == "convolution" else "float32")
    # The convolution for all devices adds up its taps in bfloat16
    tolerance = 2**-6 if form == PLAIN_FORMS[1] else form.definition.tolerance
    close(to_numpy(outputs), want[0], tolerance)
    close(to_numpy(after), want[1], tolerance)
    for (name, values), found in zip(want[2].items(), gradients, strict=False):
        assert dtype_of(found) == dtype_of(narrow[name])
        close(to_numpy(found), values, 2**-6)


def dtype_of(values):
    return keras.backend.standardize_dtype(values.dtype)


@each([COMPILED, KERNELS[9]])
def test_decays_beyond_the_range_of_exp_have_gradients(form):
    """Across a start the exponent is positive: its `exp` would be infinite, and 0 times that no number."""
    inputs, weights, carried = draw(form)
    inputs["delta"] += np.float32(200)
    found = run(form, inputs, weights, form.definition.positions, carried)
    assert all(np.isfinite(values).all() for values in found[2].values())


@pytest.mark.slow
def test_a_token_that_forgets_all_rounds_nothing_after_it():
    """The sum of log-decays in a long chunk would have few digits left behind such a token."""
    form = dataclasses.replace(COMPILED, chunk_length=256)
    positions = positions_of([[130, 70]] * 2)
    inputs, weights, carried = draw(form, 0, positions)
    inputs["delta"] *= 0.02
    inputs["delta"][:, 60] = 1000.0
    got = run(form, inputs, weights, positions, 0 * carried)
    wide = {name: np.float64(of) for name, of in inputs.items()}
    close(got[0], plain_duality(wide, positions, 0 * carried)[0])


@each([KERNELS[1], KERNELS[4], KERNELS[7], KERNELS[9]])
def test_a_model_learns_with_a_kernel_what_it_learns_without(monkeypatch, form):
    """Packs have three chunks; with rows, the second call goes on from what the first has left."""
    whole_vectors = {"kernels.gpu.selective_scan": ["WIDTH"], "kernels.tpu.selective_scan": ["LANES"]}.get(
        form.module, ["LANES", "BLOCK"]
    )
    set_sizes(monkeypatch, form.module, [(name, 16) for name in whole_vectors])
    build = {"num_rows": 5} if form in (KERNELS[1], KERNELS[7]) else {"remat": True}
    config = next_tokens.MAMBA2 if form.operator == "duality" else next_tokens.CONFIG
    config = dataclasses.replace(config, num_hidden_layers=1)
    batch, _ = next_tokens.packed_and_unpacked()
    assert (batch["sequence_ids"].max(axis=1) > 1).sum() == 3
    later = {**batch, "position_ids": batch["position_ids"] + bool(build.get("num_rows"))}
    found = []
    for options in ({}, {form.definition.option: dataclasses.replace(form, chunk_length=4).load()}):
        engine = next_tokens.make_engine(config=config, build={**build, **options})
        engine.gradients(batch, training=True)
        found.append(engine.gradients(later, training=True)[0])
    for one, other in zip(*found, strict=True):
        assert np.abs(one).max() > 0 and np.abs(one - other).max() <= 1e-5 * np.abs(one).max()


@each([PLAIN_FORMS[1], KERNELS[1]])
@pytest.mark.parametrize("length", [1, 3])
def test_a_short_pack_hands_on_inputs_from_before_it(form, length):
    inputs, weights, carried = draw(form)
    inputs["x"], positions = inputs["x"][:, :length], form.definition.positions[:, :length] + 2
    given = form, inputs, weights[:, :length], positions, carried
    all_close(run(*given), run_plainly(*given))
