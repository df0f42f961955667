"""Steps that run operation by operation under TensorFlow, where a test is not about compiling."""

import contextlib
import os

import pytest


class Uncompiled:
    """A function in the place of its compiled one, which counts the shapes that it would be traced for."""

    def __init__(self, function):
        self._function = function
        self._shapes = set()

    def __call__(self, *arguments):
        import tensorflow as tf

        leaves = tf.nest.flatten(arguments)
        self._shapes.add(tuple(getattr(values, "shape", None) for values in leaves))
        return self._function(*tf.nest.map_structure(tf.convert_to_tensor, arguments))

    def experimental_get_tracing_count(self):
        return len(self._shapes)


@contextlib.contextmanager
def run_uncompiled():
    with pytest.MonkeyPatch.context() as monkeypatch:
        if os.environ.get("KERAS_BACKEND") != "jax":
            import tensorflow as tf

            compile_function = tf.function

            def function(python_function=None, jit_compile=None, **options):
                if python_function is not None and jit_compile:
                    return Uncompiled(python_function)
                return compile_function(python_function, jit_compile=jit_compile, **options)

            monkeypatch.setattr(tf, "function", function)
        yield
