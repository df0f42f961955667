"""Quiet TensorFlow before any test imports it, and the same random cases in every run."""

import os

from hypothesis import settings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
