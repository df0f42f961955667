"""Quiet TensorFlow before any test imports it."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
