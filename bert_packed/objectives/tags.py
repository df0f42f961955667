"""Fine-tuning to tag words: a class for one token of each word, each sequence as if it stood alone.

A word's tag is predicted at its first WordPiece; the words are a batch's predictions, as masked tokens are in
pre-training.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, C classes.
"""

import functools

from keras import ops

from bert_packed.models.heads import build_token_classification_model
from bert_packed.models.layers import gather_tokens
from bert_packed.objectives.features import PREDICTIONS, SEQUENCES
from bert_packed.objectives.likelihood import nll_and_right
from bert_packed.objectives.metrics import count_sequences
from bert_packed.objectives.objective import Objective
from bert_packed.objectives.pretraining import prediction_weights


def tags_objective(num_tags, tag_loss="per_sequence"):
    """One of C tags for every word; steps may end in empty packs.

    Args:
        num_tags: C.
        tag_loss: What the loss is a mean over. "per_sequence": the words of each sequence, and then the
            sequences, so that a long sentence weighs as much as a short one; "per_token": all words of the
            step, as in transformers' run_ner.

    Returns:
        `Objective`; its `accuracy` is a mean over words.
    """
    return Objective(
        build_model=lambda config, seed, **options: build_token_classification_model(
            config, num_tags, seed, **options
        ),
        features=(*SEQUENCES, *PREDICTIONS),
        outputs={"logits": "S"},
        sums=functools.partial(tag_sums, tag_loss=tag_loss),
        counts=tag_counts,
        losses={"loss": "num_sequences" if tag_loss == "per_sequence" else "num_predictions"},
        accuracies={"accuracy": ("correct", "num_predictions")},
        skips_empty=True,
    )


def tag_sums(outputs, batch, tag_loss):
    """Sums over the words of a batch of packs.

    Args:
        outputs: Dict of `logits`, float32 `[B, S, C]`.
        batch: Dict with `prediction_positions`, `prediction_ids` and `prediction_sequences` `[B, P]` (1..K, 0
            is unused), `slot_weights` `[B, K]` and `sequence_ids` `[B, S]`.
        tag_loss: As of `tags_objective`.

    Returns:
        Dict of float32 scalars, as of `tags_objective`.
    """
    sequences_BP, num_slots = batch["prediction_sequences"], batch["slot_weights"].shape[1]
    logits_BPC = gather_tokens(outputs["logits"], batch["prediction_positions"])
    nll_BP, right_BP = nll_and_right(logits_BPC, batch["prediction_ids"])
    return {
        "loss": ops.sum(nll_BP * prediction_weights(sequences_BP, num_slots, tag_loss)),
        "correct": ops.sum(right_BP * prediction_weights(sequences_BP, num_slots, "per_token")),
        **tag_counts(batch),
    }


def tag_counts(batch):
    """What of the sums follows from the data alone: `num_predictions`, the words, and `count_sequences`."""
    used_BP = ops.cast(batch["prediction_sequences"] > 0, "float32")
    return {"num_predictions": ops.sum(used_BP), **count_sequences(batch)}
