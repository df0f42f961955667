"""How unlikely the right label was, without an array of the size of the logits more than is needed.

Legend: C classes.
"""

from keras import ops


def nll_and_right(logits, labels):
    """Negative log-likelihood of the labels, and 1 where no logit is larger than the label's.

    Written out for the sake of logits over a vocabulary, the largest array of a step: the label's logit is
    picked by comparison, which XLA fuses into the passes of the softmax, where `argmax`, a gather and its
    gradient would be passes of their own.

        logits [[1 3 2]], label [1]   ->   nll [log(e + e^3 + e^2) - 3], right [1]

    Args:
        logits: float32 `[..., C]`.
        labels: Whole numbers 0..C-1, of any dtype, `[...]`.

    Returns:
        Two float32 `[...]`.
    """
    classes_C = ops.arange(logits.shape[-1], dtype="int32")
    is_label = ops.equal(ops.cast(labels, "int32")[..., None], classes_C)
    label_logits = ops.sum(ops.where(is_label, logits, 0.0), axis=-1)
    largest = ops.stop_gradient(ops.max(logits, axis=-1))
    # The label's distance from the largest first: added to the logarithm, a large logit would round it away
    nll = ops.log(ops.sum(ops.exp(logits - largest[..., None]), axis=-1)) - (label_logits - largest)
    return nll, ops.cast(label_logits >= largest, "float32")
