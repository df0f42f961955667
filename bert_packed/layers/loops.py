"""Loops inside a program and functions with a custom gradient, on both backends.

Legend: T steps of a loop.
"""

import keras
from keras import ops


def scan(step, carry, inputs, reverse=False):
    """Run a step on each of T slices in order, as one loop of the program.

        step (c, x) -> (c + x, 10 * c), carry 0, inputs [1 2 3]   ->   6, [0 10 30]
        the same in reverse                                       ->   6, [50 30 0]

    Carry, inputs `[T, ...]` and outputs are tuples of tensors. T is static; the carry keeps its dtypes.
    No gradient passes through it: use it inside `with_gradient`.
    """
    # `keras.ops.scan` does not compile in every shape under TensorFlow (Keras 3.15)
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.scan(step, carry, inputs, reverse=reverse)
    import tensorflow as tf

    num_steps = inputs[0].shape[0]
    places = tf.range(num_steps - 1, -1, -1) if reverse else tf.range(num_steps)
    # The step is traced once to learn the shapes of the outputs; the program drops what is not used
    _, sample = step(carry, tuple(values[0] for values in inputs))
    arrays = tuple(tf.TensorArray(one.dtype, size=num_steps, element_shape=one.shape) for one in sample)

    def body(index, carry, arrays):
        place = places[index]
        carry, outputs = step(carry, tuple(values[place] for values in inputs))
        return index + 1, carry, tuple(a.write(place, one) for a, one in zip(arrays, outputs, strict=True))

    _, carry, arrays = tf.while_loop(
        lambda index, *_: index < num_steps, body, (0, tuple(carry), arrays), maximum_iterations=num_steps
    )
    return carry, tuple(array.stack() for array in arrays)


def with_gradient(forward, backward):
    """A function of tensors to a tuple of outputs, with a custom gradient.

    Args:
        forward: Function of tensors to (tuple of outputs, residuals: any nest of tensors for `backward`).
        backward: Function (residuals, gradients of the outputs) to gradients, one for each tensor.
    """
    if keras.backend.backend() == "jax":
        import jax

        function = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
        function.defvjp(forward, backward)
        return function
    import tensorflow as tf

    @tf.custom_gradient
    def function(*arguments):
        outputs, kept = forward(*arguments)
        return outputs, lambda *gradients: backward(kept, gradients)

    return lambda *arguments: function(*(ops.convert_to_tensor(argument) for argument in arguments))


def pull_back(function, arguments, gradients):
    """Gradients of a function's arguments from those of its outputs: tuple; the function is computed again.

    For the backward part of `with_gradient`, inside the step of a `scan` too.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.vjp(function, *arguments)[1](gradients)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(arguments)
        outputs = function(*arguments)
    return tape.gradient(outputs, arguments, gradients, unconnected_gradients=tf.UnconnectedGradients.ZERO)
