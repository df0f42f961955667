"""Gradients of layers: custom ones, in loops, in a form that is fast on CPUs, and of recomputed blocks.

The gradients of a matrix of weights, of keys and of values sum over rows, tokens or queries:

    weight gradient[x, y] = sum over t of input[t, x] * result gradient[t, y]
    key gradient[t, h]    = sum over s of score gradient[s, t] * query[s, h]
    value gradient[t, h]  = sum over s of probability[s, t] * result gradient[s, h]

XLA for CPUs transposes the first factor inside the product, at a third of the rate of other products
(docs/notebook/2026-11.md, "A step by parts"). Under `gradients_for_cpus` the narrower factor is transposed
beforehand; where that is the second, the product gives the gradient transposed. JAX has the fast form for
values by itself, TensorFlow for weights.

Legend: B packs per batch, S pack length, D model width, N heads, H head width; T tokens or steps of a loop,
X and Y widths of input and result.
"""

import contextlib
import contextvars

import keras
from keras import ops

from bert_packed.layers.dropout import Dropout

GRADIENTS = "attention_gradients"  # in a program's text: theirs would have no name of a layer
_SWITCH = contextvars.ContextVar("gradients_for_cpus", default=False)


def scan(step, carry, inputs, reverse=False):
    """Run a step on each of T slices in order, as one loop of the program.

        step (c, x) -> (c + x, 10 * c), carry 0, inputs [1 2 3]   ->   6, [0 10 30]
        the same in reverse                                       ->   6, [50 30 0]

    No gradient passes through it: use it inside `with_gradient`.

    Args:
        step: Function `(carry, slices)` to (carry, outputs); dtypes and shapes of the carry stay.
        carry, inputs: Tuples of tensors; inputs `[T, ...]`, T static.
    """
    # `keras.ops.scan` does not compile in every shape under TensorFlow (Keras 3.15)
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.scan(step, carry, inputs, reverse=reverse)
    import tensorflow as tf

    num_steps = inputs[0].shape[0]
    places = tf.range(num_steps - 1, -1, -1) if reverse else tf.range(num_steps)
    # Traced once to learn the shapes of the outputs; the program drops what is not used
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

    Args:
        function: Function of tensors to a tuple of tensors.
        arguments, gradients: Tuples of tensors, one for each argument and for each output.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.vjp(function, *arguments)[1](gradients)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(arguments)
        outputs = function(*arguments)
    return tape.gradient(outputs, arguments, gradients, unconnected_gradients=tf.UnconnectedGradients.ZERO)


@contextlib.contextmanager
def gradients_for_cpus(is_on=True):
    """Context manager: programs traced inside have the fast gradients where `is_on`.

    They are faster only in a program that XLA compiles whole, and have no second derivative.
    """
    token = _SWITCH.set(is_on)
    try:
        yield
    finally:
        _SWITCH.reset(token)


def has_gradients_for_cpus():
    """True inside `gradients_for_cpus`; never where TensorFlow runs operation by operation."""
    if keras.backend.backend() == "jax":
        return _SWITCH.get()
    import tensorflow as tf

    return _SWITCH.get() and not tf.executing_eagerly()


@keras.saving.register_keras_serializable(package="bert_packed")
class Linear(keras.layers.Dense):
    """`keras.layers.Dense`, float `[..., X]` to `[..., Y]`, with the fast gradient of its weights."""

    def call(self, inputs, training=None):
        outputs = multiply(inputs, ops.convert_to_tensor(self.kernel))
        if self.bias is not None:
            outputs = ops.add(outputs, self.bias)
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
            kernel_gradient_XY = ops.matmul(_barrier(_transposed(inputs_TX)), gradient_TY)
        else:
            products_YX = ops.matmul(_barrier(_transposed(gradient_TY)), inputs_TX)
            kernel_gradient_XY = _transposed(_barrier(products_YX))
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

    # Heads first: JAX's forward pass takes a fifteenth longer where the product has to find them
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


def _is_fast_on(*backends):
    return keras.backend.backend() in backends and has_gradients_for_cpus()


def _sum_over_rows(weights_BNSS, rows_BNSH):
    """Sum of the rows by the weights of each column: float `[B, N, S, H]`."""
    return _transposed(_barrier(ops.matmul(_barrier(_transposed(rows_BNSH)), weights_BNSS)))


def _transposed(values):
    return ops.swapaxes(values, -2, -1)


def _heads_first(values):
    return ops.transpose(values, (0, 2, 1, 3))


def _barrier(values):
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


def run_rematerialised(blocks, hidden_BSD, context, training=None):
    """Call encoder blocks in order, keeping only what passes from one to the next: float `[B, S, D]`.

    Where a block ends in a layer norm, its sum before the norm is kept, and the norm is recomputed with the
    next block. So the block's last product is not recomputed: no gradient needs its value (Section 3.2.3,
    point 3, of "An Efficient 2D Method for Training Super-Large Deep Learning Models").

        blocks       attention, products, + | norm, attention, products, + | norm
        kept                              +                              +

    A block with a `final_norm` that is not None must have `call_up_to_norm`.
    """
    norm = None
    for block in blocks:
        next_norm = getattr(block, "final_norm", None)
        call = block if next_norm is None else block.call_up_to_norm
        hidden_BSD = rematerialised(block, hidden_BSD, context, training, call=_after(norm, call))
        norm = next_norm
    return hidden_BSD if norm is None else norm(hidden_BSD)


def rematerialised(block, hidden_BSD, context, training=None, call=None, **given):
    """The result of a block, whose activations are recomputed for the gradient, with the same dropout.

    Only `Dropout` layers may be random in it. `call` replaces the block; no gradient reaches `given`.
    """
    dropouts = [layer for layer in find_dropouts(block) if training and layer.rate > 0]

    # Drawn here: inside, the generator would advance twice, and on JAX not at all
    seeds = [layer.next_seed() for layer in dropouts]
    before = [layer.given_seed for layer in dropouts]

    # Context and seeds are no arguments: TensorFlow warns of inputs that have no gradient
    def forward(hidden_BSD):
        for layer, seed in zip(dropouts, seeds, strict=True):
            layer.given_seed = seed
        try:
            return (call or block)(hidden_BSD, context=context.apart(), training=training, **given)
        finally:
            for layer, seed in zip(dropouts, before, strict=True):
                layer.given_seed = seed

    return keras.remat(forward)(hidden_BSD)


def _after(norm, call):
    if norm is None:
        return call
    return lambda hidden_BSD, **given: call(norm(hidden_BSD), **given)


def find_dropouts(block):
    """All `Dropout` layers in a built block, in a fixed order; `ValueError` where others hold state."""
    dropouts = [layer for layer in _layers_in(block, {}) if isinstance(layer, Dropout)]
    known = {id(layer.seed_generator.state) for layer in dropouts if layer.rate > 0}
    others = [v.path for v in block.non_trainable_variables if id(v) not in known]
    if others:
        raise ValueError(
            "`remat` must be False for a block with state other than that of `models.dropout.Dropout`. "
            f"Received: {', '.join(others)}."
        )
    return dropouts


def _layers_in(layer, found):
    """A layer and those below it, each once: iterable."""
    # Attributes are searched, lists and dicts too: Keras has public lists of a model's layers alone
    found[id(layer)] = layer
    for value in keras.tree.flatten(vars(layer)):
        if isinstance(value, keras.Layer) and id(value) not in found:
            _layers_in(value, found)
    return found.values()
