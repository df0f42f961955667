"""How a function of arrays is compiled and differentiated under each backend, outside training."""

import keras


def compiled(function):
    """`function` of arrays or dicts of them, compiled by XLA once for each set of input shapes."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
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
