"""Fine-tuning objectives: answer spans, a class or number for each sequence, a tag for each word.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, C classes.
"""

import functools

from keras import ops

from bert_packed.architectures.registry import CLASSIFICATION, QUESTION_ANSWERING, TOKEN_CLASSIFICATION
from bert_packed.layers.context import MASKED_SCORE
from bert_packed.layers.transformer import gather_tokens
from bert_packed.objectives.features import PREDICTIONS, SEQUENCES, Feature
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right
from bert_packed.objectives.pretraining import prediction_weights

ANSWER_SPANS = (  # first and last token
    Feature("start_positions", "K", is_position=True),
    Feature("end_positions", "K", is_position=True),
)
LABELS = Feature("labels", "K")


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


def classes_objective(num_classes):
    """One of C classes for each sequence."""
    return _labels_objective(class_sums, num_classes, {"accuracy": ("correct", "num_sequences")})


def numbers_objective():
    """A number for each sequence, with squared error as its loss."""
    return _labels_objective(number_sums, 1, {})


def _labels_objective(sums, num_outputs, accuracies):
    return Objective(
        head=CLASSIFICATION,
        num_outputs=num_outputs,
        features=(*SEQUENCES, LABELS),
        outputs={"logits": "K"},
        sums=sums,
        counts=count_sequences,
        losses={"loss": "num_sequences"},
        accuracies=accuracies,
        skips_empty=True,
    )


def tags_objective(num_tags, tag_loss="per_sequence"):
    """One of C tags for each word, at its first token; words are the batch's predictions.

    `tag_loss` "per_sequence" is the mean over sequences of the mean over their words; "per_token" is the mean
    over all words of the step, as in transformers' run_ner.
    """
    return Objective(
        head=TOKEN_CLASSIFICATION,
        num_outputs=num_tags,
        features=(*SEQUENCES, *PREDICTIONS),
        outputs={"logits": "S"},
        sums=functools.partial(tag_sums, tag_loss=tag_loss),
        counts=tag_counts,
        losses={"loss": "num_sequences" if tag_loss == "per_sequence" else "num_predictions"},
        accuracies={"accuracy": ("correct", "num_predictions")},
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


def class_sums(outputs, batch):
    """Sums of `classes_objective`: `loss`, `correct`, and `count_sequences`."""
    weights_BK = batch["slot_weights"]
    nll_BK, right_BK = nll_and_right(outputs["logits"], batch["labels"])
    return {
        "loss": ops.sum(nll_BK * weights_BK),
        "correct": ops.sum(right_BK * weights_BK),
        **count_sequences(batch),
    }


def number_sums(outputs, batch):
    """Sums of `numbers_objective`, from `logits` `[B, K, 1]` and float32 `labels` `[B, K]`."""
    errors_BK = outputs["logits"][..., 0] - batch["labels"]
    return {"loss": ops.sum(ops.square(errors_BK) * batch["slot_weights"]), **count_sequences(batch)}


def tag_sums(outputs, batch, tag_loss):
    """Sums of `tags_objective`: `loss`, `correct`, and `tag_counts`."""
    sequences_BP, num_slots = batch["prediction_sequences"], batch["slot_weights"].shape[1]
    logits_BPC = gather_tokens(outputs["logits"], batch["prediction_positions"])
    nll_BP, right_BP = nll_and_right(logits_BPC, batch["prediction_ids"])
    return {
        "loss": ops.sum(nll_BP * prediction_weights(sequences_BP, num_slots, tag_loss)),
        "correct": ops.sum(right_BP * prediction_weights(sequences_BP, num_slots, "per_token")),
        **tag_counts(batch),
    }


def tag_counts(batch):
    """Number of words, `num_predictions`, and `count_sequences`."""
    used_BP = ops.cast(batch["prediction_sequences"] > 0, "float32")
    return {"num_predictions": ops.sum(used_BP), **count_sequences(batch)}
