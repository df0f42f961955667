"""Scores of labels, by scikit-learn and SciPy.

Legend: n examples, C labels.
"""

import functools

import numpy as np
from scipy import special, stats
from sklearn import metrics

from bert_packed.tasks.classify.labels import NUMBER, SEVERAL, SINGLE

NAMES = {
    SINGLE: ("accuracy", "f1_macro", "f1_weighted", "matthews"),
    SEVERAL: ("f1_micro", "f1_macro", "average_precision"),
    NUMBER: ("pearson", "spearman"),
}


def probabilities(problem, logits):
    """Float32 `[n, C]` from logits: softmax for classes, sigmoids for labels and chances, else unchanged."""
    if problem.kind == SINGLE:
        return special.softmax(logits, axis=1)
    return special.expit(logits) if problem.kind == SEVERAL or problem.is_chance else logits


def decide(problem, logits):
    """The prediction of each example, in the form of `Problem.numbers`."""
    if problem.kind == SINGLE:
        return logits.argmax(axis=1)
    return (
        (logits > 0).astype(np.float32) if problem.kind == SEVERAL else probabilities(problem, logits)[:, 0]
    )


def score(problem, logits, labels, names=()):
    """Scores of `METRICS`, by default those of the problem's kind in `NAMES`: dict of float."""
    predicted = decide(problem, logits)
    names = names or NAMES[problem.kind]
    return {name: float(METRICS[name](labels, predicted, logits)) for name in names}


def _f1(average, labels, predicted, logits):
    """A mean over the labels that are true or predicted; "binary" is that of class 1. 0 / 0 is 0."""
    used = None
    if labels.ndim == 2:
        used = np.flatnonzero(labels.any(axis=0) | predicted.any(axis=0))
        used = used if len(used) else [0]
        # A single column would be read as two classes, so a column without labels stands beside it
        labels, predicted = (np.pad(bits, ((0, 0), (0, 1))) for bits in (labels, predicted))
    return metrics.f1_score(labels, predicted, labels=used, average=average, zero_division=0)


def _matthews(labels, predicted, logits):
    # scikit-learn warns of a single class
    is_one = len({*labels.tolist(), *predicted.tolist()}) == 1
    return 0.0 if is_one else metrics.matthews_corrcoef(labels, predicted)


def _average_precision(labels, predicted, logits):
    """The mean over the labels that are true somewhere."""
    places = np.flatnonzero(labels.any(axis=0))
    precisions = [metrics.average_precision_score(labels[:, place], logits[:, place]) for place in places]
    return np.mean(precisions) if precisions else 0.0


def correlation(name, predicted, true):
    """The correlation `name`, "pearson" or "spearman", of two arrays `[n]`: float; 0 with a constant."""
    if len(true) < 2 or not np.ptp(predicted) or not np.ptp(true):
        return 0.0
    found = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]
    return float(found(np.asarray(predicted, np.float64), np.asarray(true, np.float64)).statistic)


# From labels and predictions, in the form of `Problem.numbers`, and logits `[n, C]`
METRICS = {
    "accuracy": lambda labels, predicted, _: np.mean(labels == predicted),
    "f1": functools.partial(_f1, "binary"),
    **{f"f1_{name}": functools.partial(_f1, name) for name in ("micro", "macro", "weighted")},
    "matthews": _matthews,
    "average_precision": _average_precision,
    "pearson": lambda labels, predicted, _: correlation("pearson", predicted, labels),
    "spearman": lambda labels, predicted, _: correlation("spearman", predicted, labels),
}


def confusion(predicted, true, num_classes):
    """How often each class was predicted for each true one: int `[C, C]`, a row for each true class."""
    return metrics.confusion_matrix(true, predicted, labels=range(num_classes))
