"""Linear layers and attention's products: NumPy's gradients in both forms, and the form of compiled steps."""

import dataclasses
import re

import keras
import next_tokens
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import SHALLOW, make_engine

from bert_packed.layers import fast_gradients
from bert_packed.layers.fast_gradients import (
    Linear,
    attention_scores,
    gradients_are_for,
    gradients_for,
    multiply,
    weighted_values,
)
from bert_packed.training import backend
from bert_packed.training.optimization import Lamb
from bert_packed.training.program_text import read_module

pytestmark = pytest.mark.both_backends
IS_JAX = keras.backend.backend() == "jax"
DTYPES = [("float32", 1e-6), ("bfloat16", 2.0**-6)]


def arrays(shapes, dtype):
    rng = np.random.default_rng(0)
    return {
        name: keras.ops.convert_to_tensor(rng.normal(size=shape), dtype) for name, shape in shapes.items()
    }


def as_float64(values):
    return np.asarray(keras.ops.cast(values, "float32"), np.float64)


def assert_gradients(loss, inputs, expected, tolerance, is_compiled=True):
    """Check gradients of a loss by its inputs, of their dtype; returns the shapes inside of barriers."""
    shapes, barrier = [], fast_gradients.barrier

    def note(values):
        shapes.append(tuple(values.shape))
        return barrier(values)

    def traced(inputs):
        with gradients_for("cpu"):
            return loss(inputs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fast_gradients, "barrier", note)
        differentiate = backend.gradient(traced)
        found = (backend.compiled(differentiate) if is_compiled else differentiate)(inputs)
    for name, values in expected.items():
        assert keras.backend.standardize_dtype(found[name].dtype) == inputs[name].dtype
        largest = np.abs(values).max()
        np.testing.assert_allclose(as_float64(found[name]), values, rtol=0, atol=tolerance * largest)
    return shapes


@pytest.mark.parametrize(
    ("dtype", "tolerance", "is_compiled"), [(*DTYPES[0], True), (*DTYPES[0], False), (*DTYPES[1], True)]
)
def test_attentions_gradients_are_those_of_numpy(dtype, tolerance, is_compiled):
    inputs = arrays(dict.fromkeys(("query", "key", "value", "upstream"), (2, 5, 3, 4)), dtype)  # B, S, N, H

    def loss(inputs):
        """Scores without a softmax are the weights: every factor has a different gradient."""
        scores = attention_scores(inputs["query"], inputs["key"])
        found = weighted_values(scores, inputs["value"])
        return keras.ops.sum(keras.ops.cast(found * inputs["upstream"], "float32"))

    query, key, value, upstream = (as_float64(values) for values in inputs.values())
    scores = np.einsum("bsnh,btnh->bnst", query, key)
    score_gradient = np.einsum("bsnh,btnh->bnst", upstream, value)
    expected = {
        "query": np.einsum("bnst,btnh->bsnh", score_gradient, key),
        "key": np.einsum("bnst,bsnh->btnh", score_gradient, query),
        "value": np.einsum("bnst,bsnh->btnh", scores, upstream),
        "upstream": np.einsum("bnst,btnh->bsnh", scores, value),
    }
    shapes = assert_gradients(loss, inputs, expected, tolerance, is_compiled)
    # B, N, H, S: of keys, and of values; TensorFlow has its own gradients where it computes at once
    num_sums = 1 if IS_JAX else 2 * is_compiled
    assert shapes == num_sums * 2 * [(2, 3, 4, 5)]


@pytest.mark.parametrize(("widths", "leading"), [((4, 6), (7,)), ((6, 4), (2, 3)), ((5, 5), (2, 3))])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_a_products_gradients_are_those_of_numpy(widths, dtype, tolerance, leading):
    shapes = {"inputs": (*leading, widths[0]), "kernel": widths, "upstream": (*leading, widths[1])}
    given = arrays(shapes, dtype)

    def loss(given):
        found = multiply(given["inputs"], given["kernel"])
        return keras.ops.sum(keras.ops.cast(found * given["upstream"], "float32"))

    inputs, kernel, upstream = (as_float64(values) for values in given.values())
    expected = {
        "inputs": np.einsum("...y,xy->...x", upstream, kernel),
        "kernel": np.einsum("tx,ty->xy", inputs.reshape(-1, widths[0]), upstream.reshape(-1, widths[1])),
        "upstream": np.einsum("...x,xy->...y", inputs, kernel),
    }
    num_tokens = int(np.prod(leading))
    narrow = [(widths[0], num_tokens)] if widths[0] <= widths[1] else [(widths[1], num_tokens), widths[::-1]]
    assert assert_gradients(loss, given, expected, tolerance) == narrow * IS_JAX


@pytest.mark.parametrize("flags", [{}, {"use_bias": False}, {"activation": "tanh"}])
def test_a_linear_layer_is_keras_dense_layer(tmp_path, flags):
    values = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    inputs = keras.Input((3, 4))
    ours, theirs = (keras.Model(inputs, kind(5, **flags)(inputs)) for kind in (Linear, keras.layers.Dense))
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=weight.shape) for weight in theirs.weights]
    for model in (ours, theirs):
        model.set_weights(weights)
    with gradients_for("cpu"):
        np.testing.assert_allclose(ours(values), theirs(values), rtol=0, atol=1e-6)
    ours.save(tmp_path / "model.keras")
    found = keras.saving.load_model(tmp_path / "model.keras")  # without being named
    assert type(found.layers[-1]) is Linear
    np.testing.assert_array_equal(found(values), ours(values))


def compiled_products(engine, batch, num_axes):
    """The attributes of all products in a compiled step whose result has `num_axes` axes."""
    program = engine.step_program(batch)
    found = [
        one.attributes
        for one in read_module(program.text).instructions
        if one.opcode == "dot" and len(one.shapes[0].sizes) == num_axes
    ]
    assert len(found) >= 6
    return [int(re.search(r"lhs_contracting_dims=\{(\d)\}", attributes)[1]) for attributes in found]


@pytest.mark.parametrize("micro_batch_size", [pytest.param(None, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("devices", "num_within"), [(["cpu:0", "cpu:1"], {"tensorflow": 0, "jax": 1}), (["cpu:0", "gpu:0"], None)]
)
def test_a_step_for_cpus_transposes_heads_first(monkeypatch, devices, num_within, micro_batch_size):
    """Of six products, those for keys and values are transposed on CPUs; under JAX those for keys."""
    monkeypatch.setattr(keras.distribution, "list_devices", lambda *of: devices)
    batch = packed_and_unpacked()[0]
    batch = {name: np.concatenate([values, values]) for name, values in batch.items()}
    engine = make_engine(config=SHALLOW, optimizer=Lamb(0.01), micro_batch_size=micro_batch_size)
    within = num_within[keras.backend.backend()] if num_within else 2
    assert sorted(compiled_products(engine, batch, 4)) == [2] * within + [3] * (6 - within)


def bert_step():
    return make_engine(config=SHALLOW, optimizer=Lamb(0.01)), packed_and_unpacked()[0]


def mamba_step():
    config = dataclasses.replace(next_tokens.CONFIG, num_hidden_layers=1)
    return next_tokens.make_engine(config=config, optimizer=Lamb(0.01)), next_tokens.packed_and_unpacked()[0]


@pytest.mark.skipif(not IS_JAX, reason="it gives nothing under TensorFlow")
@pytest.mark.parametrize(
    ("make_step", "num_linear"),
    [
        (bert_step, 9),  # six of a block, transform, pooler, classifier
        (mamba_step, 4),
    ],
)
def test_a_step_for_cpus_transposes_narrow_factors_first(monkeypatch, make_step, num_linear):
    """Every linear layer does; the table of tokens, which is none, stays."""
    for devices, expected in ((["cpu:0", "gpu:0"], num_linear + 1), (["cpu:0", "cpu:1"], 1)):
        monkeypatch.setattr(keras.distribution, "list_devices", lambda *of, found=devices: found)
        assert compiled_products(*make_step(), 2).count(0) == expected


@pytest.mark.parametrize("is_on", [True, False])
def test_the_switch_is_on_inside_and_in_programs_alone(is_on):
    answers = []

    def traced(values):
        with gradients_for("cpu" if is_on else ""):
            answers.append(gradients_are_for("cpu"))
        answers.append(gradients_are_for("cpu"))
        return values

    backend.compiled(traced)(keras.ops.ones(1))
    assert answers == [is_on, False]
    with gradients_for("cpu" if is_on else ""):  # TensorFlow, operation by operation
        assert gradients_are_for("cpu") is (is_on and IS_JAX)
