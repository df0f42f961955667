"""Fine-tuning to find answers: the loss of a span in each sequence, as if it stood alone in its pack.

Legend: B packs per batch, S pack length, K sequences per pack.
"""

from keras import ops

from bert_packed.models.context import MASKED_SCORE
from bert_packed.models.heads import build_question_answering_model
from bert_packed.objectives.features import SEQUENCES, Feature
from bert_packed.objectives.metrics import count_sequences
from bert_packed.objectives.objective import Objective

ANSWER_SPANS = (  # first and last token
    Feature("start_positions", "K", is_position=True),
    Feature("end_positions", "K", is_position=True),
)


def answers_objective():
    """Where the answer to a sequence's question starts and ends; steps may end in empty packs.

    Returns:
        `Objective`.
    """
    return Objective(
        build_model=build_question_answering_model,
        features=(*SEQUENCES, *ANSWER_SPANS),
        outputs={"start_logits": "S", "end_logits": "S"},
        sums=answer_sums,
        counts=count_sequences,
        losses={"loss": "num_sequences"},
        accuracies={f"{name}_accuracy": (f"{name}_correct", "num_sequences") for name in ("start", "end")},
        skips_empty=True,
    )


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
        Dict of float32 scalars, as of `answers_objective`.
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
    return {"loss": loss, **sums, **count_sequences(batch)}
