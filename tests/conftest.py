"""Quiet TensorFlow before any test imports it, and the same random cases in every run."""

import os
import tempfile

from hypothesis import settings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if os.environ.get("KERAS_BACKEND") == "jax":
    # Tiny programs compile for longer than they run, the same ones again and again, and outside of one JAX
    # compiles each operation by itself: little optimised, and kept for this run of pytest and its commands
    COMPILED = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
