"""What attention computes of queries, keys and values, and the forms that XLA's compiler for CPUs makes fast.

Heads come first, so that a product of two matrices is left for each. A forward pass of JAX takes a fifteenth
longer where the product itself has to find the heads in `[B, S, N, H]`.

The gradients of keys and values sum over queries, the rows of scores and probabilities:

    key gradient[t, h]   = sum over s of score gradient[s, t] * query[s, h]
    value gradient[t, h] = sum over s of probability[s, t] * result gradient[s, h]

As TensorFlow writes them, the first factor of these products is transposed inside the product, and they go at
a third of the rate of the others (docs/results.md, "A step by parts"). Here queries, or the
gradient of the results, are transposed beforehand, and the product gives the gradient transposed, `[h, t]`.
The sums are the same. JAX has a form as fast by itself.

In `without_gradients`, softmax's division comes last, of `[B, S, N, H]` in place of `[B, N, S, S]`: one pass
over the scores less. With gradients it stays first, as those of a row of scores must add up to zero.

Legend: B packs per batch, S pack length, N heads, H head width.
"""

import contextlib
import contextvars

import keras
from keras import ops

from bert_packed.models.devices import computes_on_cpus
from bert_packed.models.loops import with_gradient

GRADIENTS = "attention_gradients"  # in a program's text: theirs would have no name of a layer
_TRANSPOSES_FIRST = contextvars.ContextVar("transposes_first", default=False)
_DIVIDES_LAST = contextvars.ContextVar("divides_last", default=False)


@contextlib.contextmanager
def gradients_for_cpus():
    """While the body traces a program that XLA compiles, gradients take the form that is fast on CPUs.

    That form is faster only in a program that XLA compiles whole, so whoever has it compile says so, and has
    no second derivative. This changes nothing under JAX, where a device is no CPU, and where TensorFlow
    computes at once, operation by operation.
    """
    token = _TRANSPOSES_FIRST.set(keras.backend.backend() == "tensorflow" and computes_on_cpus())
    try:
        yield
    finally:
        _TRANSPOSES_FIRST.reset(token)


@contextlib.contextmanager
def without_gradients():
    """While the body traces a program, attention takes the form that is fast on CPUs for results alone.

    Texts' vectors and fine-tuning's predictions are computed so. They differ by float32's rounding. Gradients
    through it would have up to three times the rounding errors. This changes nothing where a device is no
    CPU, nor in other dtypes, which would round once more.
    """
    token = _DIVIDES_LAST.set(computes_on_cpus())
    try:
        yield
    finally:
        _DIVIDES_LAST.reset(token)


def attention_scores(query_BSNH, key_BSNH):
    """How well each query goes with each key: float `[B, N, S, S]`, of two `[B, S, N, H]` of that dtype."""
    product = _transposing_scores if _transposes_first() else _scores
    return product(_heads_first(query_BSNH), _heads_first(key_BSNH))


def attended_values(scores_BNSS, value_BSNH, dropout):
    """The values, summed by the softmax of each query's scores: `[B, S, N, H]` of the values' dtype.

    Args:
        scores_BNSS: float32 `[B, N, S, S]`, a row for each query; what is hidden lies far below the rest.
        value_BSNH: float `[B, S, N, H]`.
        dropout: Function for the probabilities, or for what is in proportion to them: `[B, N, S, S]` of the
            values' dtype.
    """
    if not _DIVIDES_LAST.get() or keras.backend.standardize_dtype(value_BSNH.dtype) != "float32":
        probs_BNSS = ops.cast(ops.softmax(scores_BNSS, axis=-1), value_BSNH.dtype)
        return weighted_values(dropout(probs_BNSS), value_BSNH)
    weights_BNSS = ops.exp(scores_BNSS - ops.max(scores_BNSS, axis=-1, keepdims=True))
    sums_BSN1 = ops.transpose(ops.sum(weights_BNSS, axis=-1, keepdims=True), (0, 2, 1, 3))
    return weighted_values(dropout(weights_BNSS), value_BSNH) / sums_BSN1


def weighted_values(weights_BNSS, value_BSNH):
    """The values summed by the weights of each query: float `[B, S, N, H]`.

    Args:
        weights_BNSS: float `[B, N, S, S]`, a row for each query.
        value_BSNH: float `[B, S, N, H]`, of the same dtype.
    """
    product = _transposing_sums if _transposes_first() else ops.matmul
    return _heads_first(product(weights_BNSS, _heads_first(value_BSNH)))


def _transposes_first():
    if not _TRANSPOSES_FIRST.get():
        return False
    import tensorflow as tf

    return not tf.executing_eagerly()


def _scores(query_BNSH, key_BNSH):
    return ops.matmul(query_BNSH, _transposed(key_BNSH))


def _transposing_scores(query_BNSH, key_BNSH):
    def forward(query_BNSH, key_BNSH):
        return (_scores(query_BNSH, key_BNSH),), (query_BNSH, key_BNSH)

    def backward(kept, gradients):
        (query_BNSH, key_BNSH), (gradient_BNSS,) = kept, gradients
        with keras.name_scope(GRADIENTS):
            return ops.matmul(gradient_BNSS, key_BNSH), _sum_over_rows(gradient_BNSS, query_BNSH)

    return with_gradient(forward, backward)(query_BNSH, key_BNSH)[0]


def _transposing_sums(probs_BNSS, value_BNSH):
    def forward(probs_BNSS, value_BNSH):
        return (ops.matmul(probs_BNSS, value_BNSH),), (probs_BNSS, value_BNSH)

    def backward(kept, gradients):
        (probs_BNSS, value_BNSH), (gradient_BNSH,) = kept, gradients
        with keras.name_scope(GRADIENTS):
            probs_gradient_BNSS = ops.matmul(gradient_BNSH, _transposed(value_BNSH))
            return probs_gradient_BNSS, _sum_over_rows(probs_BNSS, gradient_BNSH)

    return with_gradient(forward, backward)(probs_BNSS, value_BNSH)[0]


def _sum_over_rows(weights_BNSS, rows_BNSH):
    """What the rows add up to, weighted by each column in turn: float `[B, N, S, H]`."""
    sums_BNHS = ops.matmul(_transposed(rows_BNSH), weights_BNSS)
    return _transposed(_kept_apart(sums_BNHS))


def _kept_apart(values):
    """The same values; else XLA would take their transposition into the product, the slow form again."""
    from tensorflow.compiler.tf2xla.python import xla

    return xla.optimization_barrier(values)[0]


def _transposed(values):
    return ops.swapaxes(values, -2, -1)


def _heads_first(values):
    """`[B, S, N, H]` as `[B, N, S, H]`, and back."""
    return ops.transpose(values, (0, 2, 1, 3))
