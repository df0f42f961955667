"""Predictions for the dev and test files of a GLUE task, and its metrics of two arrays `[n]`.

A correlation with a constant is 0, and so is each metric of empty arrays.

Legend: n sequences, C classes.
"""

import dataclasses
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from bert_packed.core.progress import count_of
from bert_packed.core.storage import write_text
from bert_packed.records.sequences import concatenate
from bert_packed.tasks import run
from bert_packed.tasks.glue.files import SCORE_RANGE, read_glue, read_glue_test, shown_label


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
    # The means are float64: a float32 mean of many values loses digits
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


@dataclasses.dataclass(frozen=True)
class AskedFile:
    """A file to predict."""

    path: str
    result: str  # name of the file for its predictions
    ending: str | None  # of its scores: "", "_matched" or "_mismatched"; None for a test file, without labels

    def read(self, task):
        return (read_glue_test if self.ending is None else read_glue)(self.path, task)


def asked_files(config, task):
    """The files that a run of a task predicts: list of `AskedFile`."""
    dev = [
        AskedFile(str(Path(config.data_dir) / f"dev{ending}.tsv"), f"predictions{ending}.tsv", ending)
        for ending in task.endings.values()
    ]
    tests = [
        AskedFile(str(path), f"{name}.tsv", None) for name, path in task.test_files(config.data_dir).items()
    ]
    return dev * config.do_eval + tests * config.do_predict


def predict_files(config, task, model, asked, folder):
    """Predict the examples of files, all packed together, and write each file's predictions.

    The form is that of GLUE's server: a header, then an index and a label a line. `asked` is a list of
    `(AskedFile, GlueTexts, Sequences)`, at least one. Returns the scores of files with labels: dict of float.
    """
    outputs, num_packs = run.predict_packed(
        config, model, concatenate([sequences for _, _, sequences in asked])
    )
    logits = np.stack(outputs["logits"])  # [n, C]
    predicted = logits.argmax(axis=1) if task.classes else logits[:, 0]
    print(f"predicted  {count_of(len(predicted), 'example')} in {count_of(num_packs, 'pack')}")
    scores, start = {}, 0
    for file, examples, sequences in asked:
        own = predicted[start : start + len(sequences)]
        start += len(sequences)
        if file.ending is None:
            # A regression may leave the range of the labels
            shown = own if task.classes else own.clip(*SCORE_RANGE)
            indices = examples.indices
        else:
            shown, indices = own, range(len(own))
            scores |= {f"{name}{file.ending}": METRICS[name](own, examples.labels) for name in task.metrics}
        pairs = zip(indices, shown.tolist(), strict=True)
        lines = [f"{index}\t{shown_label(task, value)}\n" for index, value in pairs]
        write_text(str(folder / file.result), "index\tprediction\n" + "".join(lines))
    return scores
