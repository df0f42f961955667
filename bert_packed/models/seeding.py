"""Initial weights from a seed, without a trace in anybody's random numbers."""

import contextlib
import random


@contextlib.contextmanager
def seeded(seed):
    """Run with Python's `random` seeded, and put its state back afterwards.

    Keras draws the seeds of initializers and of dropout there where none is given, and nowhere else. Not
    `keras.utils.set_random_seed`: it sets the states of Python, NumPy and TensorFlow for good, so that a
    program that loads a model would draw the same numbers after it, whatever it did before.

    Args:
        seed: Whole number.
    """
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
