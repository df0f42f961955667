"""The outer loop around a recorded engine, which notes all that is called."""

import dataclasses
import math
import os
import signal

from bert_packed.training import loop
from bert_packed.training.metrics_log import TIMED_FIGURES, Scale
from bert_packed.training.nonfinite import NotFiniteError

SECONDS = ("sequences_per_second", "tokens_per_second", *TIMED_FIGURES)


@dataclasses.dataclass(frozen=True)
class Steps:
    num_train_steps: int = 7
    log_steps: int = 3
    save_checkpoints_steps: int = 4
    eval_steps: int = 2
    export_every: int = 2
    max_skipped_steps: int = 3


class Numbers:
    """Batches as from a `ReadAhead`: the numbers of their steps."""

    def __init__(self, first_step):
        self.sources, self.is_closed = first_step, False

    def __next__(self):
        self.sources += 1
        return self.sources

    def is_ready(self):
        return True

    def close(self):
        self.is_closed = True


class Recorder:
    """Engine and hooks in one: the sums of a step tell which batch it was; everything called is noted.

    Attributes:
        read_at: The last step that was started, by the step that was read then.
    """

    def __init__(self, fails_at=(), signal_at=None, fails_evaluation=None):
        self.calls, self.read_at = [], {}
        self._started = self._written_back = None
        self.saved = {}
        self.kept = []  # steps of checkpoints; one is kept where older ones may go
        self._fails_at, self._signal_at = fails_at, signal_at
        self._fails_evaluation = fails_evaluation

    def start_step(self, batch, wants_stop):
        self.calls.append(("train", batch))
        self._started = batch
        if batch == self._signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = math.nan if batch in self._fails_at else float(batch)
        return {
            "a_loss": loss,
            "is_skipped": float(math.isnan(loss)),
            "num_sequences": 2.0,
            "num_tokens": 20.0,
            "gradient_norm": 2.0 * batch,
        }

    def read(self, sums):
        self.read_at[int(sums["gradient_norm"] / 2)] = self._started
        return dict(sums)

    def write_back(self):
        self._written_back = self._started

    def _needs_weights(self, step):
        assert self._started == self._written_back and self._started in (step, None)

    def batches(self, first_step):
        self.calls.append(("batches", first_step))
        self.numbers = Numbers(first_step)
        return self.numbers

    def save(self, step, state):
        self._needs_weights(step)
        self.calls.append(("save", step))
        self.saved[step] = state
        self.kept.append(step)

    def export(self, step):
        self._needs_weights(step)
        self.calls.append(("export", step))

    def evaluate(self, step):
        self._needs_weights(step)
        self.calls.append(("evaluate", step))
        if step == self._fails_evaluation:
            raise NotFiniteError("inf in evaluation")

    def prune(self):
        self.kept = self.kept[-1:]

    def hooks(self):
        return loop.Hooks(
            batches=self.batches,
            log=lambda row: self.calls.append(("log", row)),
            evaluate=self.evaluate,
            save=self.save,
            export=self.export,
            prune=self.prune,
            learning_rate=lambda step: step / 10,
            means=lambda sums: {"loss": sums["a_loss"] / sums["num_sequences"]},
            tell_skipped=lambda step, why, batch: self.calls.append(("skip", f"{step}: {why} of {batch}")),
            scale=Scale(positions_per_step=25),
        )

    def names(self):
        """The calls in order, as `train 1`; a row by its step."""
        return [f"{name} {value['step'] if name == 'log' else value}" for name, value in self.calls]

    def rows(self):
        return [value for name, value in self.calls if name == "log"]


def train(recorder, first_step=0, state=None, hooks=None, **steps):
    """`loop.train` by a recorder; `hooks` replace some of its own."""
    hooks = dataclasses.replace(recorder.hooks(), **(hooks or {}))
    return loop.train(recorder, Steps(**steps), hooks, first_step, state)


def without_times(rows):
    """Rows without times and without columns that have no value."""
    return [{n: value for n, value in row.items() if n not in SECONDS and value is not None} for row in rows]
