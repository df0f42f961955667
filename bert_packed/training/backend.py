"""Compiled functions, gradients, devices and out-of-memory errors under either backend."""

import contextlib

import keras


def compiled(function, model=None):
    """A function of arrays or dicts of them, compiled by XLA once for each set of input shapes.

    Args:
        function: Reads variables of `model` only, and assigns none.
        model: Keras model. JAX would take the values of its variables for constants of the program, folded
            into it and never read again; so they become its arguments.
    """
    if keras.backend.backend() == "jax":
        return _compiled_by_jax(function, model)
    import tensorflow as tf

    return tf.function(function, jit_compile=True, reduce_retracing=False)


def _compiled_by_jax(function, model):
    import jax

    variables = model.variables if model is not None else []

    @jax.jit
    def program(values, *inputs):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*inputs)

    return lambda *inputs: program([variable.value for variable in variables], *inputs)


def gradient(function):
    """The gradient of `function(inputs)`, a scalar, by its argument."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(function)
    import tensorflow as tf

    def differentiated(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result = function(inputs)
        return tape.gradient(result, inputs, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return differentiated


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


def make_virtual_devices(number):
    """Let the backend see that many CPU devices and no others: to compile for them, not to compute faster.

    Args:
        number: At least 1; more than the machine has, too.

    Raises:
        RuntimeError: the backend has computed something already in this process, and so counted its devices.
    """
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
        return
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
