"""Compiled training steps, one file per backend, and the one place that chooses between them."""

import importlib
import importlib.util
import os

from bert_packed.core.freed_memory import ALL_BLOCKS, keep_freed_memory
from bert_packed.core.quiet_import import import_quietly
from bert_packed.core.settings import InputError

# Keras backend -> module and class of its engine; they are built, called and saved alike
ENGINES = {
    "tensorflow": ("bert_packed.training.engines.tensorflow", "TensorFlowEngine"),
    "jax": ("bert_packed.training.engines.jax", "JaxEngine"),
}


def choose_backend():
    """Settle the backend, whatever `keras.json` says, and import Keras on it without start-up lines.

    `KERAS_BACKEND` decides; without it, TensorFlow. Under JAX, TensorFlow only reads records: it is kept off
    the GPU, whose memory it would reserve at its first operation.

    Returns:
        A key of `ENGINES`.

    Raises:
        InputError: `KERAS_BACKEND` is another one, or JAX is not installed.
    """
    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if backend not in ENGINES:
        raise InputError(f"KERAS_BACKEND must be one of {', '.join(ENGINES)}. Received: {backend}.")
    keep_freed_memory(ALL_BLOCKS)
    if backend == "jax":
        if importlib.util.find_spec("jax") is None:
            raise InputError("KERAS_BACKEND=jax needs `pip install -e '.[jax]'`. Received: no package jax.")
        import_quietly("tensorflow").config.set_visible_devices([], "GPU")
    import_quietly("keras")
    return backend


def make_engine(*arguments, **keywords):
    """The running backend's engine; arguments as of `TensorFlowEngine`."""
    import keras  # not above: a command chooses the backend first

    module, name = ENGINES[keras.backend.backend()]
    return getattr(importlib.import_module(module), name)(*arguments, **keywords)
