"""How good predictions of GLUE tasks are: accuracy, F1, Matthews, Pearson and Spearman correlation.

A correlation with what does not vary is 0.
"""

import numpy as np
from scipy.stats import rankdata


def accuracy(predicted, true):
    """Share of equal entries of two int arrays `[n]`."""
    return float(np.mean(predicted == true))


def f1(predicted, true):
    """F1 of class 1; 0 where it is neither predicted nor true."""
    hits = np.sum((predicted == 1) & (true == 1))
    total = np.sum(predicted == 1) + np.sum(true == 1)
    return float(2 * hits / total) if total else 0.0


def matthews(predicted, true):
    """Matthews correlation of two arrays of classes 0 and 1: Pearson's, for such numbers."""
    return pearson(predicted, true)


def pearson(predicted, true):
    """Pearson correlation of two arrays `[n]`."""
    one = predicted - np.mean(predicted, dtype=np.float64)
    other = true - np.mean(true, dtype=np.float64)
    scale = np.sqrt(np.sum(one**2) * np.sum(other**2))
    return float(np.sum(one * other) / scale) if scale > 0 else 0.0


def spearman(predicted, true):
    """Spearman correlation of two arrays `[n]`: Pearson's of their ranks, equal values sharing one."""
    return pearson(rankdata(predicted), rankdata(true))


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
