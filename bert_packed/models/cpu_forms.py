"""Which forms a program's computations have because XLA's compiler for CPUs makes them fast.

Who compiles says what the program is for, by a context around its tracing; layers ask here which form to
take. Each form gives the same sums as the plain one, to rounding. Where a device is no CPU, nothing changes.
"""

import contextlib
import contextvars

import keras

from bert_packed.models.devices import computes_on_cpus

_HAS_GRADIENTS = contextvars.ContextVar("has_gradients", default=False)
_HAS_NONE = contextvars.ContextVar("has_none", default=False)


@contextlib.contextmanager
def gradients_for_cpus():
    """While the body traces a program, gradients take the forms that are fast on CPUs.

    They are faster only in a program that XLA compiles whole, so whoever has it compile says so, or is
    traced into such a program, and has no second derivative.
    """
    token = _HAS_GRADIENTS.set(computes_on_cpus())
    try:
        yield
    finally:
        _HAS_GRADIENTS.reset(token)


@contextlib.contextmanager
def without_gradients():
    """While the body traces a program, computations take the forms that are fast on CPUs for results alone.

    Texts' vectors and fine-tuning's predictions are computed so. Gradients through them would have up to
    three times the rounding errors.
    """
    token = _HAS_NONE.set(computes_on_cpus())
    try:
        yield
    finally:
        _HAS_NONE.reset(token)


def has_gradients_for_cpus():
    """Whether `gradients_for_cpus` holds; not where TensorFlow computes at once, operation by operation."""
    return _HAS_GRADIENTS.get() and is_traced()


def has_no_gradients():
    """Whether `without_gradients` holds."""
    return _HAS_NONE.get()


def is_traced():
    """False where TensorFlow computes at once, operation by operation; else True."""
    if keras.backend.backend() == "jax":
        return True
    import tensorflow as tf

    return not tf.executing_eagerly()


def kept_apart(values):
    """The same values, as XLA must write them: else it would take a transposition into the next product,
    which then is the slow one again.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.optimization_barrier(values)
    from tensorflow.compiler.tf2xla.python import xla

    return xla.optimization_barrier(values)[0]
