"""What tests share: a quiet TensorFlow, the same random cases in every run, and cheap programs."""

import contextlib
import ctypes
import gc
import os
import sys
import tempfile

import pytest
from hypothesis import settings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Tiny programs compile for longer than they run, the same ones again and again: little optimised, and kept
# for this run of pytest and its commands
COMPILED = tempfile.TemporaryDirectory()
if os.environ.get("KERAS_BACKEND") == "jax":
    # Outside of a program JAX compiles each operation by itself
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
else:
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("TF_XLA_FLAGS", f"--tf_xla_persistent_cache_directory={COMPILED.name}")

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


@pytest.fixture
def uncompiled():
    """TensorFlow's compiled steps run operation by operation, where a test is not about their compilation.

    A step of a tiny model takes a second so, and ten times that to compile. Nothing is traced meanwhile.
    """
    if os.environ.get("KERAS_BACKEND") == "jax":
        yield
        return
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture(autouse=True, scope="module")
def drop_models():
    """After each file its models and programs go: together they would take several gigabytes."""
    yield
    if "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
