"""Profiler traces of a range of training steps, for TensorBoard."""

import contextlib

import keras


class Profile:
    """Context manager that traces the steps of a range; leaving it early writes the trace so far.

        with Profile("run/tensorboard/profile", range(10, 21)) as profile:
            for step in ...:
                with profile.step(step):
                    ...

    Args:
        folder: Receives the trace as `plugins/profile/TIME/HOST.xplane.pb`.
        steps: Range of steps; empty for none.
    """

    def __init__(self, folder="", steps=range(0)):
        self._folder = str(folder)
        self._steps = steps
        self._is_tracing = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stop()

    @contextlib.contextmanager
    def step(self, number):
        """Trace the body if `number` is one of the steps."""
        if number not in self._steps:
            yield
            return
        if not self._is_tracing:
            _start(self._folder)
            self._is_tracing = True
        with _marked(number):
            yield
        if number == self._steps[-1]:
            self._stop()

    def _stop(self):
        if self._is_tracing:
            self._is_tracing = False
            _end()


def _start(folder):
    if keras.backend.backend() == "jax":
        import jax

        jax.profiler.start_trace(folder)
    else:
        import tensorflow as tf

        tf.profiler.experimental.start(folder)


def _end():
    if keras.backend.backend() == "jax":
        import jax

        jax.profiler.stop_trace()
    else:
        import tensorflow as tf

        tf.profiler.experimental.stop()


def _marked(number):
    """Context manager whose body the trace shows as a training step."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.profiler.StepTraceAnnotation("train", step_num=number)
    import tensorflow as tf

    # `_r=1`, as in TensorFlow's guide, makes the trace a step of TensorBoard's profile
    return tf.profiler.experimental.Trace("train", step_num=number, _r=1)
