"""Metrics of GLUE: accuracy, F1, Matthews, Pearson and Spearman correlation of two arrays `[n]`.

A correlation with a constant is 0, and so is each metric of empty arrays.
"""

import numpy as np
from scipy.stats import rankdata


def accuracy(predicted, true):
    """Share of equal entries of two int arrays."""
    return float(np.mean(predicted == true)) if len(true) else 0.0


def f1(predicted, true):
    """F1 of class 1; 0 where it is neither predicted nor true."""
    hits = np.sum((predicted == 1) & (true == 1))
    total = np.sum(predicted == 1) + np.sum(true == 1)
    return float(2 * hits / total) if total else 0.0


def matthews(predicted, true):
    """Matthews correlation of classes 0 and 1: Pearson's, for such numbers."""
    return pearson(predicted, true)


def pearson(predicted, true):
    if not len(true):
        return 0.0
    # In float64: a float32 mean of many values loses digits
    one = predicted - np.mean(predicted, dtype=np.float64)
    other = true - np.mean(true, dtype=np.float64)
    scale = np.sqrt(np.sum(one**2) * np.sum(other**2))
    # A constant has no correlation; the quotient would be NaN
    return float(np.sum(one * other) / scale) if scale > 0 else 0.0


def spearman(predicted, true):
    """Pearson correlation of ranks, equal values sharing one."""
    return pearson(rankdata(predicted), rankdata(true))


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def table_of_tasks(scores, num_tasks):
    """Rows of a table of tasks, and GLUE's average: the mean of the means of each task's scores.

    `scores` is a dict from task to a dict of float; `num_tasks` is GLUE's number.
    """
    means = {task: float(np.mean(list(its.values()))) for task, its in scores.items()}
    rows = [
        {
            "task": task,
            "scores": ", ".join(f"{name} {value:.4f}" for name, value in its.items()),
            "mean": mean,
        }
        for (task, its), mean in zip(scores.items(), means.values(), strict=True)
    ]
    average = float(np.mean(list(means.values())))
    rows.append({"task": "average", "scores": f"{len(scores)} of {num_tasks} tasks", "mean": average})
    return rows, average
