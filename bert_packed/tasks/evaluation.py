"""Scores while a run trains: which are best, when no better ones come, and the weights with the best."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from bert_packed.checkpoints import checkpoint
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, read_json, write_folder, write_json
from bert_packed.runs.run_summary import show_line
from bert_packed.training import metrics_log
from bert_packed.training.engines.engine import named_weights

SCORES_OF_BEST = "scores.json"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores while a run trains."""

    names: tuple[str, ...]  # of the scores; the first decides which are best
    score: Callable  # from a model to a dict of float
    every: int  # steps; 0 for after the last alone
    keeps_best: bool  # whether the weights with the best score stay, in `best_folder`
    source: str  # paths and checksums of what is scored: others' scores do not compare
    files: tuple[str, ...]  # paths of what is scored
    patience: int = 0  # evaluations in a row without a better score that end the run; 0 for no end

    @classmethod
    def of(cls, config, names, score, files):
        """As a `ScoredConfig` says; raises `InputError` where its `best_score` is none of `names`.

        `files` are the paths of what is scored.
        """
        best = config.best_score or names[0]
        if best not in names:
            raise InputError(f"`best_score` must be one of {', '.join(names)}. Received: {best}.")
        source = " ".join(f"{path} {file_sha256(path)}" for path in files)
        names = (best, *(name for name in names if name != best))
        return cls(
            names,
            score,
            config.eval_steps,
            config.keep_best,
            source,
            tuple(files),
            config.early_stopping_patience,
        )


def best_folder(folder):
    """The folder of the weights with the best score."""
    return Path(folder) / "best"


def take_best(config, folder, model):
    """With `keep_best`, give a trained model the weights that scored best."""
    best = best_folder(folder)
    if config.keep_best and best.exists():
        checkpoint.assign_tensors(best, checkpoint.read_weights(best), named_weights(model))


class EvaluationLog:
    """The scores of a run by step, and the weights with the best; the first of its processes has them."""

    def __init__(self, evaluation, folder, model, rows, processes):
        columns = ("step", *evaluation.names)
        self._log = metrics_log.open_log(folder / metrics_log.EVAL_FILE, columns, rows, processes)
        self._evaluation, self._folder, self._model = evaluation, folder, model
        self._processes = processes
        # Rows of another file of scores may have others
        name = evaluation.names[0]
        self._scores = [float(row[name]) for row in rows if row.get(name)]

    def flush_to_disk(self):
        """See `MetricsLog`."""
        self._log.flush_to_disk()

    def is_over(self):
        """True if `patience` evaluations in a row had no better score than one before."""
        patience, scores = self._evaluation.patience, self._scores
        return 0 < patience < len(scores) and not max(scores[-patience:]) > max(scores[:-patience])

    def evaluate(self, step):
        """Score the model and note it; returns `is_over`."""
        scores = self._processes.first_decides(lambda: self._score(step))
        show_line(f"step {step:,}: " + ", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
        self._scores.append(scores[self._evaluation.names[0]])
        if self.is_over():
            show_line(f"no better {self._evaluation.names[0]} in {self._evaluation.patience} evaluations")
        return self.is_over()

    def _score(self, step):
        """Score the model, and write the row and, if they are the best, the weights."""
        found = self._evaluation.score(self._model)
        scores = {name: found[name] for name in self._evaluation.names}
        if self._evaluation.keeps_best and self._is_best(scores):
            with write_folder(best_folder(self._folder)) as partial:
                checkpoint.save_weights(partial, named_weights(self._model), self._model.config)
                write_json(Path(partial) / SCORES_OF_BEST, {"of": self._evaluation.source, **scores})
        self._log.write({"step": step, **scores})
        return scores

    def _is_best(self, scores):
        name = self._evaluation.names[0]
        best = read_json(best_folder(self._folder) / SCORES_OF_BEST, default={})
        # An older run noted the first file alone
        is_same = self._evaluation.source.startswith(best.get("of", "?"))
        if not is_same or math.isnan(best[name]):
            return True
        return scores[name] > best[name]
