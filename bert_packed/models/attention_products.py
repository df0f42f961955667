"""What attention computes of queries, keys and values, and the forms that XLA's compiler for CPUs makes fast.

Heads come first, so that a product of two matrices is left for each. A forward pass of JAX takes a fifteenth
longer where the product itself has to find the heads in `[B, S, N, H]`.

The gradients of keys and values sum over queries, the rows of scores and probabilities:

    key gradient[t, h]   = sum over s of score gradient[s, t] * query[s, h]
    value gradient[t, h] = sum over s of probability[s, t] * result gradient[s, h]

As the backends write them, the first factor of these products is transposed inside the product, and they go
at a third of the rate of the others (docs/results.md, "A step by parts"). Here queries, or the gradient of
the results, are transposed beforehand, and the product gives the gradient transposed, `[h, t]`. The sums are
the same. For values JAX has a form as fast by itself.

In `cpu_forms.without_gradients`, softmax's division comes last, of `[B, S, N, H]` in place of
`[B, N, S, S]`: one pass over the scores less, in float32; other dtypes would round once more. With gradients
it stays first, as those of a row of scores must add up to zero.

Legend: B packs per batch, S pack length, N heads, H head width.
"""

import keras
from keras import ops

from bert_packed.models.cpu_forms import has_gradients_for_cpus, has_no_gradients, kept_apart
from bert_packed.models.loops import with_gradient

GRADIENTS = "attention_gradients"  # in a program's text: theirs would have no name of a layer


def attention_scores(query_BSNH, key_BSNH):
    """How well each query goes with each key: float `[B, N, S, S]`, of two `[B, S, N, H]` of that dtype."""
    product = _transposing_scores if has_gradients_for_cpus() else _scores
    return product(_heads_first(query_BSNH), _heads_first(key_BSNH))


def attended_values(scores_BNSS, value_BSNH, dropout):
    """The values, summed by the softmax of each query's scores: `[B, S, N, H]` of the values' dtype.

    Args:
        scores_BNSS: float32 `[B, N, S, S]`, a row for each query; what is hidden lies far below the rest.
        value_BSNH: float `[B, S, N, H]`.
        dropout: Function for the probabilities, or for what is in proportion to them: `[B, N, S, S]` of the
            values' dtype.
    """
    if not has_no_gradients() or keras.backend.standardize_dtype(value_BSNH.dtype) != "float32":
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
    is_transposing = has_gradients_for_cpus() and keras.backend.backend() == "tensorflow"
    product = _transposing_sums if is_transposing else ops.matmul
    return _heads_first(product(weights_BNSS, _heads_first(value_BSNH)))


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
    sums_BNHS = ops.matmul(kept_apart(_transposed(rows_BNSH)), weights_BNSS)
    return _transposed(kept_apart(sums_BNHS))


def _transposed(values):
    return ops.swapaxes(values, -2, -1)


def _heads_first(values):
    """`[B, S, N, H]` as `[B, N, S, H]`, and back."""
    return ops.transpose(values, (0, 2, 1, 3))
