"""Layers and products in the forms whose gradients XLA compiles fast, for CPUs and for GPUs.

The gradients of a matrix of weights, of keys and of values sum over rows, tokens or queries:

    weight gradient[x, y] = sum over t of input[t, x] * result gradient[t, y]
    key gradient[t, h]    = sum over s of score gradient[s, t] * query[s, h]
    value gradient[t, h]  = sum over s of probability[s, t] * result gradient[s, h]

The backends transpose the first factor inside the product, at a third of the rate of other products
(docs/notebook/2026-11.md, "A step by parts"). Here the narrower factor is transposed beforehand; where that
is the second, the product gives the gradient transposed. JAX has the fast form for values by itself,
TensorFlow for weights.
On GPUs the forms differ in what is written out between two products.

Legend: B packs per batch, S pack length, N heads, H head width; T tokens, X and Y widths of input and result.
"""

import contextlib
import contextvars
import functools

import keras
from keras import ops

from bert_packed.layers.loops import with_gradient

GRADIENTS = "attention_gradients"  # in a program's text: theirs would have no name of a layer
_PLATFORM = contextvars.ContextVar("platform_of_gradients", default="")


@contextlib.contextmanager
def gradients_for(platform):
    """Context manager: programs traced inside have the fast gradients of "cpu" or, under JAX, "gpu".

    They are faster only in a program that XLA compiles whole, and have no second derivative.
    """
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def gradients_are_for(platform):
    """True inside `gradients_for(platform)`; never where TensorFlow runs operation by operation."""
    if keras.backend.backend() == "jax":
        return _PLATFORM.get() == platform
    import tensorflow as tf

    return _PLATFORM.get() == platform == "cpu" and not tf.executing_eagerly()


@keras.saving.register_keras_serializable(package="bert_packed")
class Linear(keras.layers.Dense):
    """`keras.layers.Dense`, float `[..., X]` to `[..., Y]`, with the fast gradient of its weights."""

    scale = None  # a power of 2 that multiplies weights inside `gradients_for("gpu")`, and results elsewhere

    def call(self, inputs, training=None):
        kernel, bias = ops.convert_to_tensor(self.kernel), self.bias
        if self.scale and gradients_are_for("gpu"):
            # XLA would scale results and their gradients in passes over all tokens. This rounds nothing
            kernel, bias = kernel * self.scale, None if bias is None else bias * self.scale
        outputs = multiply(inputs, kernel)
        if bias is not None:
            outputs = ops.add(outputs, bias)
        return outputs if self.activation is None else self.activation(outputs)


def multiply(inputs, kernel_XY):
    """Float `[..., X]` times `[X, Y]` of the same dtype."""
    if not _is_fast_on("jax"):
        return ops.matmul(inputs, kernel_XY)

    def forward(inputs, kernel_XY):
        return (ops.matmul(inputs, kernel_XY),), (inputs, kernel_XY)

    def backward(kept, gradients):
        (inputs, kernel_XY), (gradient,) = kept, gradients
        width, result_width = kernel_XY.shape
        inputs_TX, gradient_TY = ops.reshape(inputs, (-1, width)), ops.reshape(gradient, (-1, result_width))
        if width <= result_width:
            kernel_gradient_XY = ops.matmul(barrier(_transposed(inputs_TX)), gradient_TY)
        else:
            products_YX = ops.matmul(barrier(_transposed(gradient_TY)), inputs_TX)
            kernel_gradient_XY = _transposed(barrier(products_YX))
        return ops.matmul(gradient, _transposed(kernel_XY)), kernel_gradient_XY

    return with_gradient(forward, backward)(inputs, kernel_XY)[0]


def attention_scores(query_BSNH, key_BSNH):
    """Products of all queries and keys of each head: float `[B, N, S, S]`."""

    def product(query_BNSH, key_BNSH):
        return ops.matmul(query_BNSH, _transposed(key_BNSH))

    def forward(query_BNSH, key_BNSH):
        return (product(query_BNSH, key_BNSH),), (query_BNSH, key_BNSH)

    def backward(kept, gradients):
        (query_BNSH, key_BNSH), (gradient_BNSS,) = kept, gradients
        with keras.name_scope(GRADIENTS):
            return ops.matmul(gradient_BNSS, key_BNSH), _sum_over_rows(gradient_BNSS, query_BNSH)

    # Heads come first: JAX's forward pass takes a fifteenth longer where the product has to find them
    factors_BNSH = _heads_first(query_BSNH), _heads_first(key_BSNH)
    if not _is_fast_on("tensorflow", "jax"):
        return product(*factors_BNSH)
    return with_gradient(forward, backward)(*factors_BNSH)[0]


def weighted_values(weights_BNSS, value_BSNH):
    """Sums of the values by the weights of each query: float `[B, S, N, H]`, all of one dtype."""

    def forward(weights_BNSS, value_BNSH):
        return (ops.matmul(weights_BNSS, value_BNSH),), (weights_BNSS, value_BNSH)

    def backward(kept, gradients):
        (weights_BNSS, value_BNSH), (gradient_BNSH,) = kept, gradients
        with keras.name_scope(GRADIENTS):
            weights_gradient_BNSS = ops.matmul(gradient_BNSH, _transposed(value_BNSH))
            return weights_gradient_BNSS, _sum_over_rows(weights_BNSS, gradient_BNSH)

    value_BNSH = _heads_first(value_BSNH)
    if not _is_fast_on("tensorflow"):
        return _heads_first(ops.matmul(weights_BNSS, value_BNSH))
    return _heads_first(with_gradient(forward, backward)(weights_BNSS, value_BNSH)[0])


def copies(inputs, number):
    """The same tensor for several products and last a sum; on GPUs their gradients add up in the products."""
    if not gradients_are_for("gpu"):
        return (inputs,) * number

    def backward(_, gradients):
        # Only a sum's first operand is the product that XLA adds the other inside of
        return (functools.reduce(lambda total, gradient: gradient + total, gradients[::-1]),)

    return with_gradient(lambda inputs: ((inputs,) * number, None), backward)(inputs)


def by_argument(function, inputs):
    """`function(inputs)`; on GPUs nothing but the inputs is kept for its gradient."""
    if not gradients_are_for("gpu"):
        return function(inputs)
    import jax

    return jax.checkpoint(function)(inputs)


def _is_fast_on(*backends):
    return keras.backend.backend() in backends and gradients_are_for("cpu")


def _sum_over_rows(weights_BNSS, rows_BNSH):
    """Sum of the rows by the weights of each column: float `[B, N, S, H]`."""
    return _transposed(barrier(ops.matmul(barrier(_transposed(rows_BNSH)), weights_BNSS)))


def _transposed(values):
    return ops.swapaxes(values, -2, -1)


def _heads_first(values):
    return ops.transpose(values, (0, 2, 1, 3))


def barrier(values):
    # XLA writes the values out: it would take a transposition into the next product again
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.optimization_barrier(values)
    import tensorflow as tf

    # TensorFlow has no function for this operation of XLA's; a graph can add any by name
    attribute = tf.compat.v1.AttrValue()
    attribute.list.type.append(values.dtype.as_datatype_enum)
    graph = tf.compat.v1.get_default_graph()
    operation = graph.create_op("XlaOptimizationBarrier", [values], [values.dtype], attrs={"T": attribute})
    return operation.outputs[0]
