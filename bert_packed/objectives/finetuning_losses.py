"""Losses of fine-tuning as sums over sequences, each as if it stood alone in its pack.

Legend: B packs per batch, S pack length, K sequences per pack, C classes.
"""

from keras import ops

from bert_packed.models.layers import MASKED_SCORE
from bert_packed.objectives.losses import nll_and_right

LOSS_NAMES = ("loss",)
COUNT_NAMES = ("num_sequences", "num_tokens")
ANSWER_SUM_NAMES = ("loss", "start_correct", "end_correct", *COUNT_NAMES)
CLASS_SUM_NAMES = ("loss", "correct", *COUNT_NAMES)
NUMBER_SUM_NAMES = ("loss", *COUNT_NAMES)


def own_logits(logits_BS, sequence_ids_BS, num_slots):
    """The logits that compete in each sequence; those of others take no part.

        logits        [5 3 1 4 2 9],  sequence_ids  [1 1 1 2 2 0]
        sequence 1    [5 3 1 . . .]
        sequence 2    [. . . 4 2 .]

    Where `.` stands, the logit is so low that a softmax gives exactly 0, and a gradient of exactly 0. Not
    logits * mask: a logit of 0 keeps a share of the softmax, and neighbours would leak in.

    Args:
        logits_BS: float32 `[B, S]`.
        sequence_ids_BS: int32 `[B, S]`, 1..K, 0 is padding.
        num_slots: K.

    Returns:
        float32 `[B, K, S]`.
    """
    slots_K = ops.arange(1, num_slots + 1, dtype="int32")
    belongs_BKS = ops.equal(ops.cast(sequence_ids_BS, "int32")[:, None, :], slots_K[None, :, None])
    return ops.where(belongs_BKS, logits_BS[:, None, :], MASKED_SCORE)


def answer_sums(outputs, batch):
    """Sums over the sequences of a batch of packs, for answer spans.

    The loss of a sequence is the mean of two negative log-likelihoods, of its start and of its end, as in
    google-research/bert.

    Args:
        outputs: Dict of `start_logits` and `end_logits`, float32 `[B, S]`.
        batch: Dict with `sequence_ids` `[B, S]`, `slot_weights` float32 `[B, K]` (1 = the slot holds a
            sequence), and `start_positions` and `end_positions`, int32 `[B, K]`, indices into the pack;
            unused slots hold 0.

    Returns:
        Dict of float32 scalars, keys `ANSWER_SUM_NAMES`.
    """
    weights_BK = batch["slot_weights"]
    sums, loss = {}, 0.0
    for name in ("start", "end"):
        logits_BS, positions_BK = outputs[f"{name}_logits"], batch[f"{name}_positions"]
        own_BKS = own_logits(logits_BS, batch["sequence_ids"], weights_BK.shape[1])
        chosen_BK = ops.take_along_axis(logits_BS, positions_BK, axis=1)
        nll_BK = ops.logsumexp(own_BKS, axis=-1) - chosen_BK
        right_BK = chosen_BK >= ops.max(own_BKS, axis=-1)
        # An unused slot has a huge loss, but a finite one: times 0 it is 0, and so is its gradient
        loss = loss + ops.sum(nll_BK * weights_BK) / 2
        sums[f"{name}_correct"] = ops.sum(ops.cast(right_BK, "float32") * weights_BK)
    return {"loss": loss, **sums, **_counts(batch)}


def class_sums(outputs, batch):
    """Sums over the sequences of a batch of packs, for classes.

    Args:
        outputs: Dict of `logits`, float32 `[B, K, C]`.
        batch: Dict with `sequence_ids` `[B, S]`, `slot_weights` float32 `[B, K]`, `labels` int32 `[B, K]`.

    Returns:
        Dict of float32 scalars, keys `CLASS_SUM_NAMES`.
    """
    weights_BK = batch["slot_weights"]
    nll_BK, right_BK = nll_and_right(outputs["logits"], batch["labels"])
    return {
        "loss": ops.sum(nll_BK * weights_BK),
        "correct": ops.sum(right_BK * weights_BK),
        **_counts(batch),
    }


def number_sums(outputs, batch):
    """Sums over the sequences of a batch of packs, for a number each: squared errors.

    Args:
        outputs: Dict of `logits`, float32 `[B, K, 1]`.
        batch: As in `class_sums`, with float32 `labels`.

    Returns:
        Dict of float32 scalars, keys `NUMBER_SUM_NAMES`.
    """
    errors_BK = outputs["logits"][..., 0] - batch["labels"]
    return {"loss": ops.sum(ops.square(errors_BK) * batch["slot_weights"]), **_counts(batch)}


def normalizers(batch):
    """What a step's summed loss is divided by: a tuple of one float32 scalar, its number of sequences."""
    return (ops.maximum(ops.sum(batch["slot_weights"]), 1.0),)


def means(sums):
    """The figures that people read.

    Args:
        sums: Dict of floats, summed over any number of batches.

    Returns:
        Dict: `loss`, and for every sum of correct answers a mean `..._accuracy`, or `accuracy`.
    """
    count = max(sums["num_sequences"], 1.0)
    rates = {
        name.replace("correct", "accuracy"): value / count
        for name, value in sums.items()
        if name.endswith("correct")
    }
    return {"loss": sums["loss"] / count, **rates}


def _counts(batch):
    return {
        "num_sequences": ops.sum(batch["slot_weights"]),
        "num_tokens": ops.sum(ops.cast(batch["sequence_ids"] > 0, "float32")),
    }
