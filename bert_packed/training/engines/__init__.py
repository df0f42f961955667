"""Compiled training steps, one file per backend, and the choice of the backend."""

import importlib
import importlib.util
import os
import sys

from bert_packed.core.runtime import ALL_BLOCKS, import_quietly, keep_freed_memory
from bert_packed.core.settings import InputError

# Keras backend -> module and class of its engine
ENGINES = {
    "tensorflow": ("bert_packed.training.engines.tensorflow", "TensorFlowEngine"),
    "jax": ("bert_packed.training.engines.jax", "JaxEngine"),
}


def choose_backend():
    """Import Keras on the backend of `KERAS_BACKEND`, whatever `keras.json` says.

    By default it is TensorFlow, or JAX where TensorFlow is not installed. Returns a key of `ENGINES`. Raises
    `InputError` for any other backend, one that is not installed, or where the program has imported Keras on
    another one.
    """
    imported = sys.modules["keras"].backend.backend() if "keras" in sys.modules else ""
    installed = [name for name in ENGINES if importlib.util.find_spec(name)]
    usual = (installed or ["tensorflow"])[0]
    backend = os.environ.setdefault("KERAS_BACKEND", imported or usual)
    if backend not in ENGINES:
        raise InputError(f"KERAS_BACKEND must be one of {', '.join(ENGINES)}. Received: {backend}.")
    keep_freed_memory(ALL_BLOCKS)
    if backend not in installed:
        how = {"jax": "-e '.[jax]'", "tensorflow": "tensorflow"}[backend]
        raise InputError(
            f"KERAS_BACKEND={backend} needs `pip install {how}`. Received: no package {backend}."
        )
    if imported and backend != imported:
        raise InputError(
            f"KERAS_BACKEND must be {imported}, on which Keras is imported already. Received: {backend}."
        )
    import_quietly("keras")
    return backend


def make_engine(*arguments, **keywords):
    """The engine of the backend in use; arguments as in `Engine`."""
    import keras  # not above: a command chooses the backend first

    module, name = ENGINES[keras.backend.backend()]
    return getattr(importlib.import_module(module), name)(*arguments, **keywords)
