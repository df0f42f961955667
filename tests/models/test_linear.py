"""The linear layer: Keras's results, NumPy's gradients in either form, and which form a compiled step has."""

import dataclasses
import re

import keras
import next_tokens
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine

from bert_packed.models import linear
from bert_packed.models.cpu_forms import gradients_for_cpus
from bert_packed.models.linear import Linear, multiply
from bert_packed.training.engines import functional
from bert_packed.training.hlo import read_module
from bert_packed.training.optimization import Lamb

IS_JAX = keras.backend.backend() == "jax"


@pytest.mark.both_backends
@pytest.mark.parametrize("flags", [{}, {"use_bias": False}, {"activation": "tanh"}])
def test_results_are_those_of_keras(flags):
    inputs = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    ours, theirs = Linear(5, **flags), keras.layers.Dense(5, **flags)
    for layer in (ours, theirs):
        layer.build(inputs.shape)
    values = [np.random.default_rng(1).normal(size=weight.shape) for weight in theirs.weights]
    ours.set_weights(values)
    theirs.set_weights(values)
    with gradients_for_cpus():
        found = ours(inputs)
    np.testing.assert_allclose(found, theirs(inputs), rtol=0, atol=1e-6)


@pytest.mark.both_backends
@pytest.mark.parametrize("widths", [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2.0**-6)])
@pytest.mark.parametrize("leading", [(7,), (2, 3)])
def test_gradients_are_those_of_numpy(monkeypatch, widths, dtype, tolerance, leading):
    transposed, kept_apart = [], linear.kept_apart
    monkeypatch.setattr(
        linear, "kept_apart", lambda one: transposed.append(tuple(one.shape)) or kept_apart(one)
    )
    rng = np.random.default_rng(0)
    shapes = {"inputs": (*leading, widths[0]), "kernel": widths, "upstream": (*leading, widths[1])}
    given = {
        name: keras.ops.convert_to_tensor(rng.normal(size=shape), dtype) for name, shape in shapes.items()
    }

    def loss(given):
        with gradients_for_cpus():
            found = multiply(given["inputs"], given["kernel"])
        return keras.ops.sum(keras.ops.cast(found * given["upstream"], "float32"))

    gradients = functional.compiled(functional.gradient(loss))(given)
    inputs, kernel, upstream = (
        np.asarray(keras.ops.cast(given[name], "float32"), np.float64) for name in shapes
    )
    expected = {
        "inputs": np.einsum("...y,xy->...x", upstream, kernel),
        "kernel": np.einsum("tx,ty->xy", inputs.reshape(-1, widths[0]), upstream.reshape(-1, widths[1])),
        "upstream": np.einsum("...x,xy->...y", inputs, kernel),
    }
    for name, values in expected.items():
        assert keras.backend.standardize_dtype(gradients[name].dtype) == dtype
        found = np.asarray(keras.ops.cast(gradients[name], "float32"))
        np.testing.assert_allclose(found, values, rtol=0, atol=tolerance * np.abs(values).max())
    num_tokens = int(np.prod(leading))
    narrow = [(widths[0], num_tokens)] if widths[0] <= widths[1] else [(widths[1], num_tokens), widths[::-1]]
    assert transposed == narrow * IS_JAX


def products_with_a_transposed_factor(engine, batch):
    """How many products of two matrices in a compiled step have their first factor transposed inside."""
    (program,) = engine.step_programs(batch)
    found = [
        one
        for of in read_module(program.text).computations.values()
        for one in of.instructions.values()
        if one.opcode == "dot" and len(one.shapes[0].sizes) == 2
    ]
    assert len(found) >= 3 * 4
    return sum("lhs_contracting_dims={0}" in re.sub(r"\s", "", one.attributes) for one in found)


def bert_step():
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    return make_engine(config=config, optimizer=Lamb(0.01)), packed_and_unpacked()[0]


def mamba_step():
    config = dataclasses.replace(next_tokens.CONFIG, num_hidden_layers=1)
    return next_tokens.make_engine(config=config, optimizer=Lamb(0.01)), next_tokens.packed_and_unpacked()[0]


@pytest.mark.both_backends
@pytest.mark.skipif(not IS_JAX, reason="it gives nothing under TensorFlow")
@pytest.mark.parametrize(
    ("make_step", "num_linear"),
    [
        (bert_step, 9),  # six of a block, transform, pooler, classifier
        (mamba_step, 4),
    ],
)
def test_a_compiled_step_for_cpus_transposes_the_narrower_factor_beforehand(
    monkeypatch, make_step, num_linear
):
    """Of every linear layer; the table of tokens, which is none, stays."""
    for devices, expected in ((["cpu:0", "gpu:0"], num_linear + 1), (["cpu:0", "cpu:1"], 1)):
        monkeypatch.setattr(keras.distribution, "list_devices", lambda *of, found=devices: found)
        assert products_with_a_transposed_factor(*make_step()) == expected


@pytest.mark.both_backends
def test_it_is_read_from_a_file_without_being_named(tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Linear(5)(inputs))
    model.save(tmp_path / "model.keras")
    found = keras.saving.load_model(tmp_path / "model.keras")
    assert type(found.layers[-1]) is Linear
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(found(values), model(values))
