"""Objective of a tag for each word, at its first token.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, C tags.
"""

import functools

from keras import ops

from bert_packed.architectures.registry import TOKEN_CLASSIFICATION
from bert_packed.layers.context import gather_tokens
from bert_packed.objectives.features import PREDICTIONS, SEQUENCES
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right
from bert_packed.objectives.pretraining import prediction_weights


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
