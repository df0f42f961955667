"""Masked-LM and next-sentence losses of packs, as sums that weigh every sequence as if it stood alone.

Nothing here divides by a batch: sums and counts leave, and one division ends the step (`metrics.py`), so
that micro-batches and replicas add up exactly.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, V vocabulary,
C classes.
"""

from keras import ops


def prediction_weights(prediction_sequences_BP, num_slots, mlm_loss):
    """How much each masked-LM prediction counts.

    `per_sequence` is Listing 1 of "Packing: Towards 2x NLP BERT Acceleration": the predictions of one
    sequence share a weight of 1. `per_token` (Section 3.2.3 of "Efficient Sequence Packing",
    google-research/bert, Hugging Face): each prediction weighs 1.

        sequences      [1    1    1    2   0]
        per_sequence   [1/3  1/3  1/3  1   0]
        per_token      [1    1    1    1   0]

    Args:
        prediction_sequences_BP: float `[B, P]`, the prediction's sequence 1..K, 0 is unused.
        num_slots: K.
        mlm_loss: "per_sequence" or "per_token".

    Returns:
        float32 `[B, P]`.
    """
    used_BP = ops.cast(prediction_sequences_BP > 0, "float32")
    if mlm_loss == "per_token":
        return used_BP
    belongs_BPK = _belongs(prediction_sequences_BP, num_slots)
    attempted_BK = ops.sum(belongs_BPK, axis=1)
    attempted_BP = ops.sum(belongs_BPK * attempted_BK[:, None, :], axis=-1)
    return used_BP / ops.maximum(attempted_BP, 1.0)


def pretraining_sums(outputs, batch, mlm_loss, next_sentence=True):
    """Sums of losses, of correct answers and of counts over a batch of packs.

    Args:
        outputs: Dict of `mlm_logits` float32 `[B, P, V]` and `nsp_logits` float32 `[B, K, 2]`.
        batch: Dict with `prediction_ids` `[B, P]`, `prediction_sequences` `[B, P]`, `nsp_labels` `[B, K]`
            and `nsp_weights` `[B, K]`, `sequence_ids` `[B, S]`.
        mlm_loss: "per_sequence" or "per_token".
        next_sentence: False for the ablation without that loss, which is then 0.

    Returns:
        Dict of float32 scalars:
        `mlm_loss` weighted negative log-likelihood, `nsp_loss`, `mlm_correct` predictions that are right,
        `mlm_sequence_accuracy` sum over sequences of their share of right predictions, `nsp_correct`,
        `num_predictions`, `num_predicted_sequences` (sequences with a prediction), `num_sequences`,
        `num_tokens` (padding not counted).
    """
    sequences_BP, nsp_weights_BK = batch["prediction_sequences"], batch["nsp_weights"]
    num_slots = nsp_weights_BK.shape[1]
    nll_BP, right_BP = nll_and_right(outputs["mlm_logits"], batch["prediction_ids"])
    nsp_nll_BK, nsp_right_BK = nll_and_right(outputs["nsp_logits"], batch["nsp_labels"])
    share_BP = prediction_weights(sequences_BP, num_slots, "per_sequence")
    used_BP = prediction_weights(sequences_BP, num_slots, "per_token")
    loss_weights_BP = share_BP if mlm_loss == "per_sequence" else used_BP
    return {
        "mlm_loss": ops.sum(nll_BP * loss_weights_BP),
        # Times 0, not left out: its weights then have a gradient, of 0
        "nsp_loss": ops.sum(nsp_nll_BK * nsp_weights_BK) * float(next_sentence),
        "mlm_correct": ops.sum(right_BP * used_BP),
        "mlm_sequence_accuracy": ops.sum(right_BP * share_BP),
        "nsp_correct": ops.sum(nsp_right_BK * nsp_weights_BK),
        "num_predictions": ops.sum(used_BP),
        "num_predicted_sequences": ops.sum(share_BP),
        "num_sequences": ops.sum(nsp_weights_BK),
        "num_tokens": ops.sum(ops.cast(batch["sequence_ids"] > 0, "float32")),
    }


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


def normalizers(batch, mlm_loss):
    """What a step's summed losses are divided by, from the data alone.

    Known before the first micro-batch, so that gradients need one accumulator under either choice of
    `mlm_loss`; a per-micro-batch division would weigh sequences by the company they keep.

    Args:
        batch: Dict with `prediction_sequences` and `nsp_weights` of the whole step, any leading axes.

    Returns:
        Two float32 scalars, at least 1: masked-LM and next-sentence denominators.
    """
    num_sequences = ops.maximum(ops.sum(batch["nsp_weights"]), 1.0)
    if mlm_loss == "per_sequence":
        return num_sequences, num_sequences
    num_predictions = ops.sum(ops.cast(batch["prediction_sequences"] > 0, "float32"))
    return ops.maximum(num_predictions, 1.0), num_sequences


def _belongs(prediction_sequences_BP, num_slots):
    """float32 `[B, P, K]`: 1 where prediction p is of sequence k + 1."""
    slots_K = ops.arange(1, num_slots + 1, dtype="float32")
    return ops.cast(ops.equal(prediction_sequences_BP[:, :, None], slots_K), "float32")
