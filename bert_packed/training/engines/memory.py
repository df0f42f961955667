"""How it is told that a device has run out of memory: in a line that names the setting to lower."""

import contextlib

import keras


@contextlib.contextmanager
def out_of_memory_names(where, setting):
    """Turn the backend's own error into one for people; results must be waited for inside.

    Args:
        where: What was computed: "a training step".
        setting: Flag that makes it smaller.

    Raises:
        MemoryError: the device had too little memory for what the body computes.
    """
    try:
        yield
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        raise MemoryError(f"out of memory in {where}; lower `{setting}`") from error


def _is_out_of_memory(error):
    if keras.backend.backend() == "jax":
        import jax

        return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    import tensorflow as tf

    return isinstance(error, tf.errors.ResourceExhaustedError)
