"""Objectives of a label for each sequence: a class, or a number.

Legend: B packs per batch, K sequences per pack, C classes.
"""

from keras import ops

from bert_packed.architectures.registry import CLASSIFICATION
from bert_packed.objectives.features import SEQUENCES, Feature
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right

LABELS = Feature("labels", "K")


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
