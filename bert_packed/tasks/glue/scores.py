"""Predictions for the dev and test files of a GLUE task, and its metrics of two arrays `[n]`.

A correlation with a constant is 0, and so is an F1 of nothing.

Legend: n sequences, C classes.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
from sklearn import metrics

from bert_packed.core.progress import count_of
from bert_packed.core.storage import write_text
from bert_packed.records.sequences import concatenate
from bert_packed.tasks import run
from bert_packed.tasks.classify.scores import correlation
from bert_packed.tasks.glue.files import SCORE_RANGE, read_glue, read_glue_test, shown_label

# The order of the two arrays makes no difference
METRICS = {
    "accuracy": metrics.accuracy_score,
    "f1": functools.partial(metrics.f1_score, zero_division=0),
    "matthews": metrics.matthews_corrcoef,
    "pearson": functools.partial(correlation, "pearson"),
    "spearman": functools.partial(correlation, "spearman"),
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
