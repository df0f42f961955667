"""Functions beside the training step are compiled with its options, and without a warning."""

import keras
import numpy as np
import pytest

from bert_packed.parallel.targets import Target
from bert_packed.training import backend

pytestmark = pytest.mark.both_backends
IS_JAX = keras.backend.backend() == "jax"


@pytest.mark.skipif(not IS_JAX, reason="TensorFlow has no such options")
def test_other_functions_get_the_options_of_a_step(monkeypatch):
    """Else a GPU compiles an audit or an encoder for minutes."""
    import jax

    layer, options = keras.layers.Dense(3), {}
    layer.build((None, 4))
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda function, **given: options.update(given) or jit(function))
    monkeypatch.setattr(backend, "devices_here", lambda: Target("gpu"))
    backend.compiled(layer, layer)(np.zeros((2, 4), np.float32))
    assert options == {"compiler_options": {"xla_gpu_enable_triton_gemm": False}}


@pytest.mark.skipif(IS_JAX, reason="the warning is TensorFlow's")
def test_functions_made_one_after_another_are_no_reason_to_warn(caplog):
    """An audit makes a handful."""
    for length in range(1, 8):
        backend.compiled(lambda values: values + 1)(np.zeros(length, np.float32))
    assert not caplog.records
