"""How a function of arrays is compiled and differentiated under each backend, outside training."""

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


def _compiled_by_jax(function, model):
    import jax

    variables = model.variables if model is not None else []

    @jax.jit
    def program(values, *inputs):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*inputs)

    return lambda *inputs: program([variable.value for variable in variables], *inputs)
