"""Options of compiled functions: products of float32 are in float32 on accelerators, and nothing warns."""

import re

import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import SHALLOW, make_engine

from bert_packed.parallel import targets
from bert_packed.parallel.targets import Target
from bert_packed.training import backend
from bert_packed.training.optimization import Lamb

IS_JAX = keras.backend.backend() == "jax"
pytestmark = pytest.mark.both_backends


@pytest.fixture(autouse=True)
def setting_of_the_process():
    yield
    if not IS_JAX:
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(True)


def products(function, *arguments):
    """The lines of the products in a program that is not compiled yet."""
    if IS_JAX:
        text = function.lower(*arguments).as_text()
        return [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    text = function.experimental_get_compiler_ir(*arguments)(stage="hlo")
    return [line for line in text.splitlines() if re.search(r" dot\(", line)]


def is_exact(line):
    return "precision = [HIGHEST, HIGHEST]" in line or "operand_precision={highest,highest}" in line


@pytest.mark.parametrize(
    ("platform", "dtype", "expected"),
    [
        ("tpu", "float32", True),
        ("gpu", "float32", True),
        ("tpu", "mixed_bfloat16", False),
        ("cpu", "float32", False),
    ],
)
def test_products_of_a_step_and_of_an_evaluation(platform, dtype, expected):
    batch = packed_and_unpacked()[0]
    engine = make_engine(
        config=SHALLOW, optimizer=Lamb(0.01), target=Target(platform), build={"dtype": dtype}
    )
    steps = [(engine.compiled_train_step, 20), (engine.compiled_eval_step, 7)]
    for step, least in steps:
        arguments = engine.abstract_arguments(batch) if IS_JAX else (batch,)
        lines = products(step, *arguments)
        assert len(lines) > least
        assert {is_exact(line) for line in lines} == {expected}


@pytest.mark.parametrize(
    ("platform", "dtype", "expected"),
    [("tpu", "float32", True), ("cpu", "float32", False), ("tpu", "mixed_bfloat16", False)],
)
def test_products_of_other_functions(monkeypatch, platform, dtype, expected):
    monkeypatch.setattr(backend, "devices_here", lambda: Target(platform))
    layer = keras.layers.Dense(3, dtype=dtype)
    layer.build((None, 4))
    asked = []
    if IS_JAX:
        import jax

        precision = jax.default_matmul_precision
        monkeypatch.setattr(
            jax, "default_matmul_precision", lambda name: asked.append(name == "highest") or precision(name)
        )
    backend.compiled(layer, layer)(np.zeros((2, 4), np.float32))
    if not IS_JAX:
        import tensorflow as tf

        asked.append(not tf.config.experimental.tensor_float_32_execution_enabled())
    assert asked in ([expected], [] if platform == "cpu" else [expected])


def test_the_dtype_of_devices():
    found = {platform: Target(platform).dtype for platform in ("cpu", "gpu", "tpu")}
    assert found == {"cpu": "float32", "gpu": "mixed_bfloat16", "tpu": "mixed_bfloat16"}
    assert targets.devices_here().dtype == "float32"


@pytest.mark.skipif(not IS_JAX, reason="TensorFlow has no such options")
def test_other_functions_get_the_options_of_a_step(monkeypatch):
    """A GPU would otherwise compile an audit or an encoder for minutes."""
    import jax

    layer, options = keras.layers.Dense(3), {}
    layer.build((None, 4))
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda function, **given: options.update(given) or jit(function))
    monkeypatch.setattr(backend, "devices_here", lambda: Target("gpu"))
    backend.compiled(layer, layer)(np.zeros((2, 4), np.float32))
    assert options["compiler_options"] and options == {"compiler_options": Target("gpu").compiler_options}


@pytest.mark.skipif(IS_JAX, reason="the warning is TensorFlow's")
def test_functions_made_one_after_another_are_no_reason_to_warn(caplog):
    """An audit makes a handful."""
    for length in range(1, 8):
        backend.compiled(lambda values: values + 1)(np.zeros(length, np.float32))
    assert not caplog.records
