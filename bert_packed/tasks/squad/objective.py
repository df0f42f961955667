"""Objective of answer spans: first and last token of each sequence's answer.

Legend: B packs per batch, S pack length, K sequences per pack.
"""

from keras import ops

from bert_packed.architectures.registry import QUESTION_ANSWERING
from bert_packed.layers.context import MASKED_SCORE
from bert_packed.objectives.features import SEQUENCES, Feature
from bert_packed.objectives.objective import Objective, count_sequences

ANSWER_SPANS = (  # first and last token
    Feature("start_positions", "K", is_position=True),
    Feature("end_positions", "K", is_position=True),
)


def answers_objective():
    """Start and end of each sequence's answer, as indices into the pack."""
    return Objective(
        head=QUESTION_ANSWERING,
        features=(*SEQUENCES, *ANSWER_SPANS),
        outputs={"start_logits": "S", "end_logits": "S"},
        sums=answer_sums,
        counts=count_sequences,
        losses={"loss": "num_sequences"},
        accuracies={f"{name}_accuracy": (f"{name}_correct", "num_sequences") for name in ("start", "end")},
        skips_empty=True,
    )


def own_logits(logits_BS, sequence_ids_BS, num_slots):
    """Logits of each sequence's own tokens: float32 `[B, K, S]`; softmax and gradient are exactly 0 at the
    dots.

    logits        [5 3 1 4 2 9],  sequence_ids  [1 1 1 2 2 0]
    sequence 1    [5 3 1 . . .]
    sequence 2    [. . . 4 2 .]
    """
    slots_K = ops.arange(1, num_slots + 1, dtype="int32")
    belongs_BKS = ops.equal(ops.cast(sequence_ids_BS, "int32")[:, None, :], slots_K[None, :, None])
    # Not logits * mask: a logit of 0 keeps a share of the softmax, and neighbours would leak in
    return ops.where(belongs_BKS, logits_BS[:, None, :], MASKED_SCORE)


def answer_sums(outputs, batch):
    """Sums of `answers_objective`; positions in `batch` are int32 `[B, K]`, 0 in unused slots."""
    weights_BK = batch["slot_weights"]
    sums, loss = {}, 0.0  # mean of the negative log-likelihoods of start and end, as in google-research/bert
    for name in ("start", "end"):
        logits_BS, positions_BK = outputs[f"{name}_logits"], batch[f"{name}_positions"]
        own_BKS = own_logits(logits_BS, batch["sequence_ids"], weights_BK.shape[1])
        chosen_BK = ops.take_along_axis(logits_BS, positions_BK, axis=1)
        nll_BK = ops.logsumexp(own_BKS, axis=-1) - chosen_BK
        right_BK = chosen_BK >= ops.max(own_BKS, axis=-1)
        # An unused slot has a huge loss, but a finite one: times 0 it is 0, and so is its gradient
        loss = loss + ops.sum(nll_BK * weights_BK) / 2
        sums[f"{name}_correct"] = ops.sum(ops.cast(right_BK, "float32") * weights_BK)
    return {"loss": loss, **sums, **count_sequences(batch)}
