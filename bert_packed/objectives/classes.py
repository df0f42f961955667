"""Fine-tuning to tell what each sequence is: a class, or a number.

Legend: B packs per batch, S pack length, K sequences per pack, C classes.
"""

from keras import ops

from bert_packed.models.heads import build_classification_model
from bert_packed.objectives.features import SEQUENCES, Feature
from bert_packed.objectives.likelihood import nll_and_right
from bert_packed.objectives.metrics import count_sequences
from bert_packed.objectives.objective import Objective

LABELS = Feature("labels", "K")


def classes_objective(num_classes):
    """One of C classes for every sequence; steps may end in empty packs."""
    return _objective(class_sums, num_classes, {"accuracy": ("correct", "num_sequences")})


def numbers_objective():
    """A number for every sequence, by the square of the error; steps may end in empty packs."""
    return _objective(number_sums, 1, {})


def _objective(sums, num_outputs, accuracies):
    def build_model(config, seed, **options):
        return build_classification_model(config, num_outputs, seed, **options)

    return Objective(
        build_model=build_model,
        features=(*SEQUENCES, LABELS),
        outputs={"logits": "K"},
        sums=sums,
        counts=count_sequences,
        losses={"loss": "num_sequences"},
        accuracies=accuracies,
        skips_empty=True,
    )


def class_sums(outputs, batch):
    """Sums over the sequences of a batch of packs, for classes.

    Args:
        outputs: Dict of `logits`, float32 `[B, K, C]`.
        batch: Dict with `sequence_ids` `[B, S]`, `slot_weights` float32 `[B, K]`, `labels` int32 `[B, K]`.

    Returns:
        Dict of float32 scalars, as of `classes_objective`.
    """
    weights_BK = batch["slot_weights"]
    nll_BK, right_BK = nll_and_right(outputs["logits"], batch["labels"])
    return {
        "loss": ops.sum(nll_BK * weights_BK),
        "correct": ops.sum(right_BK * weights_BK),
        **count_sequences(batch),
    }


def number_sums(outputs, batch):
    """Sums over the sequences of a batch of packs, for a number each: squared errors.

    Args:
        outputs: Dict of `logits`, float32 `[B, K, 1]`.
        batch: As in `class_sums`, with float32 `labels`.

    Returns:
        Dict of float32 scalars, as of `numbers_objective`.
    """
    errors_BK = outputs["logits"][..., 0] - batch["labels"]
    return {"loss": ops.sum(ops.square(errors_BK) * batch["slot_weights"]), **count_sequences(batch)}
