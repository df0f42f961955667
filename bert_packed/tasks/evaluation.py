"""Scores while a run trains: which are best, when no better ones come, and the weights with the best."""

import dataclasses
import functools
import math
from collections.abc import Callable

from bert_packed.checkpoints import checkpoint
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, read_json, write_folder, write_json
from bert_packed.runs.run_summary import show_line
from bert_packed.tasks.config import ScoredConfig
from bert_packed.training import metrics_log
from bert_packed.training.engines.engine import named_weights

BEST_FOLDER, SCORES_OF_BEST = "best", "scores.json"  # of the weights with the best score


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores while a run trains; raises `InputError` where the config's `best_score` is none of them."""

    config: ScoredConfig
    names: tuple[str, ...]  # of the scores
    score: Callable  # from a model to a dict of float
    files: list[str]  # paths of what is scored

    @functools.cached_property
    def source(self):
        """Paths and checksums of what is scored, since scores of other files do not compare."""
        return " ".join(f"{path} {file_sha256(path)}" for path in self.files)

    def __post_init__(self):
        self.source  # noqa: B018  read now: the files may change before the first score
        if self.best_name not in self.names:
            raise InputError(
                f"`best_score` must be one of {', '.join(self.names)}. Received: {self.best_name}."
            )

    @property
    def best_name(self):
        """The score that decides which weights are best."""
        return self.config.best_score or self.names[0]


def take_best(config, folder, model):
    """With `keep_best`, give a trained model the weights that scored best."""
    best = folder / BEST_FOLDER
    if config.keep_best and best.exists():
        checkpoint.assign_tensors(best, checkpoint.read_weights(best), named_weights(model))


class EvaluationLog:
    """The scores of a run by step, and the weights with the best; the first of its processes has them."""

    def __init__(self, evaluation, folder, model, rows, processes):
        self._evaluation, self._model, self._processes = evaluation, model, processes
        self._best_folder, self._best = folder / BEST_FOLDER, evaluation.best_name
        self._names = (self._best, *(name for name in evaluation.names if name != self._best))
        columns = ("step", *self._names)
        self._log = metrics_log.open_log(folder / metrics_log.EVAL_FILE, columns, rows, processes)
        # Rows of another file of scores may have others
        self._scores = [float(row[self._best]) for row in rows if row.get(self._best)]

    def flush_to_disk(self):
        """See `MetricsLog`."""
        self._log.flush_to_disk()

    def is_over(self):
        """True if none of the last `early_stopping_patience` scores is better than all before."""
        patience, scores = self._evaluation.config.early_stopping_patience, self._scores
        return 0 < patience < len(scores) and not max(scores[-patience:]) > max(scores[:-patience])

    def evaluate(self, step):
        """Score the model and note it; returns `is_over`."""
        scores = self._processes.first_decides(lambda: self._score(step))
        show_line(f"step {step:,}: " + ", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
        self._scores.append(scores[self._best])
        if self.is_over():
            patience = self._evaluation.config.early_stopping_patience
            show_line(f"no better {self._best} in {patience} evaluations")
        return self.is_over()

    def _score(self, step):
        """Score the model, and write the row and, if they are the best, the weights."""
        found = self._evaluation.score(self._model)
        scores = {name: found[name] for name in self._names}
        if self._evaluation.config.keep_best and self._is_best(scores[self._best]):
            with write_folder(self._best_folder) as partial:
                checkpoint.save_weights(partial, named_weights(self._model), self._model.config)
                write_json(partial / SCORES_OF_BEST, {"of": self._evaluation.source, **scores})
        self._log.write({"step": step, **scores})
        return scores

    def _is_best(self, score):
        stored = read_json(self._best_folder / SCORES_OF_BEST, default={})
        # An older run noted the first file alone
        is_same = self._evaluation.source.startswith(stored.get("of", "?"))
        return not is_same or math.isnan(stored[self._best]) or score > stored[self._best]
