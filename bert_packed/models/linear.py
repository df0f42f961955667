"""A linear layer whose weights' gradient has the form that XLA's compiler for CPUs makes fast under JAX.

The gradient of a matrix of weights sums over all tokens:

    weight gradient[x, y] = sum over t of input[t, x] * result gradient[t, y]

JAX writes it as the product's transpose, and XLA makes of that a product whose first factor is transposed
inside it, and the second beforehand, however wide. Here the narrower of the two is transposed beforehand, and
the product takes both as they lie; where that is the result's, it gives the gradient as `[y, x]`, and a last
transposition, kept apart as well, turns it. The sums are the same. Under TensorFlow that gives nothing
(docs/results.md, "A step by parts").

Legend: T tokens, X and Y widths of the input and of the result.
"""

import keras
from keras import ops

from bert_packed.models.cpu_forms import has_gradients_for_cpus, kept_apart
from bert_packed.models.loops import with_gradient


@keras.saving.register_keras_serializable(package="bert_packed")
class Linear(keras.layers.Dense):
    """Float `[..., X]` to `[..., Y]`, as `keras.layers.Dense`, whose arguments it takes."""

    def call(self, inputs, training=None):
        """As of `keras.layers.Dense`."""
        outputs = multiply(inputs, ops.convert_to_tensor(self.kernel))
        if self.bias is not None:
            outputs = ops.add(outputs, self.bias)
        return outputs if self.activation is None else self.activation(outputs)


def multiply(inputs, kernel_XY):
    """Float `[..., X]` times `[X, Y]` of that dtype: `[..., Y]`."""
    if keras.backend.backend() != "jax" or not has_gradients_for_cpus():
        return ops.matmul(inputs, kernel_XY)
    return with_gradient(_forward, _backward)(inputs, kernel_XY)[0]


def _forward(inputs, kernel_XY):
    return (ops.matmul(inputs, kernel_XY),), (inputs, kernel_XY)


def _backward(kept, gradients):
    (inputs, kernel_XY), (gradient,) = kept, gradients
    width, result_width = kernel_XY.shape
    inputs_TX, gradient_TY = ops.reshape(inputs, (-1, width)), ops.reshape(gradient, (-1, result_width))
    if width <= result_width:
        kernel_gradient_XY = ops.matmul(kept_apart(ops.transpose(inputs_TX)), gradient_TY)
    else:
        products_YX = ops.matmul(kept_apart(ops.transpose(gradient_TY)), inputs_TX)
        kernel_gradient_XY = ops.transpose(kept_apart(products_YX))
    return ops.matmul(gradient, ops.transpose(kernel_XY)), kernel_gradient_XY
