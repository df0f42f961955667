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


def decide(problem, found):
    """The prediction of each example from `probabilities`, in the form of `Problem.numbers`."""
    if problem.kind == SINGLE:
        return found.argmax(axis=1)
    return (found > 0.5).astype(np.float32) if problem.kind == SEVERAL else found[:, 0]


def score(problem, found, labels):
    """Scores by `NAMES`: dict of float.

    `f1_macro` and `f1_weighted` are means over the labels that are true or predicted, `average_precision`
    over those that are true somewhere. A correlation with a constant is 0.
    """
    predicted = decide(problem, found)
    if problem.kind == NUMBER:
        return {name: correlation(name, predicted, labels) for name in NAMES[NUMBER]}
    if problem.kind == SEVERAL:
        is_true, is_used = labels.any(axis=0), labels.any(axis=0) | predicted.any(axis=0)
        # A single column would be read as two classes, so a column without labels stands beside it
        wide = [np.pad(bits, ((0, 0), (0, 1))) for bits in (labels, predicted)]
        used = np.flatnonzero(is_used) if is_used.any() else [0]
        f1 = functools.partial(metrics.f1_score, *wide, labels=used, zero_division=0)
        precisions = [
            metrics.average_precision_score(labels[:, place], found[:, place])
            for place in np.flatnonzero(is_true)
        ]
        scores = f1(average="micro"), f1(average="macro"), np.mean(precisions) if precisions else 0.0
    else:
        f1 = functools.partial(metrics.f1_score, labels, predicted, zero_division=0)
        matthews = 0.0
        if len({*labels.tolist(), *predicted.tolist()}) > 1:
            matthews = metrics.matthews_corrcoef(labels, predicted)
        scores = np.mean(labels == predicted), f1(average="macro"), f1(average="weighted"), matthews
    return dict(zip(NAMES[problem.kind], map(float, scores), strict=True))


def correlation(name, predicted, true):
    """The correlation `name`, "pearson" or "spearman", of two arrays `[n]`: float; 0 with a constant."""
    if len(true) < 2 or not np.ptp(predicted) or not np.ptp(true):
        return 0.0
    found = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]
    return float(found(np.asarray(predicted, np.float64), np.asarray(true, np.float64)).statistic)


def confusion(predicted, true, num_classes):
    """How often each class was predicted for each true one: int `[C, C]`, a row for each true class."""
    return metrics.confusion_matrix(true, predicted, labels=range(num_classes))
