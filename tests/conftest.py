"""Quiet TensorFlow before any test imports it, and the same random cases in every run."""

import os
import tempfile

from hypothesis import settings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if os.environ.get("KERAS_BACKEND") == "jax":
    # Tests make the same tiny programs again and again, and JAX compiles each operation outside of one by
    # itself: kept for this run of pytest and the commands that it starts
    COMPILED = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
