"""Objectives of labels of sequences: one class of several, several labels at once, a number.

Legend: B packs per batch, K sequences per pack, C labels.
"""

import dataclasses
import functools

from keras import ops

from bert_packed.architectures.registry import CLASSIFICATION
from bert_packed.objectives.features import SEQUENCES, Feature
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right

LABELS = Feature("labels", "K")


def classes_objective(num_classes, weights=None):
    """One of C classes for each sequence; `weights` float32 `[C]` of the classes, None for 1.

    The loss is the mean over sequences, with weights the weighted mean, as torch's CrossEntropyLoss has it.
    """
    plain = _labels_objective(class_sums, num_classes, {"accuracy": ("correct", "num_sequences")})
    if weights is None:
        return plain
    return dataclasses.replace(
        plain,
        sums=functools.partial(class_sums, weights=weights),
        counts=functools.partial(_weighted_counts, weights=weights),
        losses={"loss": "num_weighted"},
    )


def several_objective(num_labels):
    """Any of C labels for each sequence; the loss is the mean over sequences and labels of log losses."""
    return _labels_objective(several_sums, num_labels, {"accuracy": ("correct", "num_sequences")})


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


def class_sums(outputs, batch, weights=None):
    """Sums of `classes_objective`: `loss`, `correct`, and counts."""
    used_BK = batch["slot_weights"]
    nll_BK, right_BK = nll_and_right(outputs["logits"], batch["labels"])
    counts = count_sequences(batch)
    if weights is not None:
        nll_BK, counts = nll_BK * _weights(batch, weights), _weighted_counts(batch, weights)
    return {"loss": ops.sum(nll_BK * used_BK), "correct": ops.sum(right_BK * used_BK), **counts}


def _weights(batch, weights):
    return ops.take(ops.convert_to_tensor(weights), ops.cast(batch["labels"], "int32"))


def _weighted_counts(batch, weights):
    """`num_weighted`, the sum of the weights of all sequences, and `count_sequences`."""
    total = ops.sum(_weights(batch, weights) * batch["slot_weights"])
    return {"num_weighted": total, **count_sequences(batch)}


def several_sums(outputs, batch):
    """Sums of `several_objective`, from float32 `logits`, `labels` `[B, K, C]`; `correct` has all right."""
    used_BK, logits_BKC, labels_BKC = batch["slot_weights"], outputs["logits"], batch["labels"]
    # log(1 + e^x) - x y, without the power of a large number
    nll_BKC = ops.maximum(logits_BKC, 0) - logits_BKC * labels_BKC + ops.log1p(ops.exp(-ops.abs(logits_BKC)))
    right_BK = ops.cast(ops.all(ops.equal(logits_BKC > 0, labels_BKC > 0.5), axis=-1), "float32")
    return {
        "loss": ops.sum(ops.mean(nll_BKC, axis=-1) * used_BK),
        "correct": ops.sum(right_BK * used_BK),
        **count_sequences(batch),
    }


def number_sums(outputs, batch):
    """Sums of `numbers_objective`, from `logits` `[B, K, 1]` and float32 `labels` `[B, K]`."""
    errors_BK = outputs["logits"][..., 0] - batch["labels"]
    return {"loss": ops.sum(ops.square(errors_BK) * batch["slot_weights"]), **count_sequences(batch)}
