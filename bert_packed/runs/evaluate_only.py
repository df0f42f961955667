"""`--do_train=false`: the newest checkpoint of a run, or what it would start from, evaluated."""

import contextlib
from pathlib import Path

from bert_packed.architectures.registry import OBJECTIVE_HEADS
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.runs import run_directory
from bert_packed.runs.pretraining import Run
from bert_packed.runs.pretraining_config import PretrainingResult
from bert_packed.runs.pretraining_data import read_eval_data
from bert_packed.training.backend import out_of_memory_names


class Evaluation(Run):
    """The stations of a `Run` for a call that trains nothing; the first is the same."""

    def read_data(self):
        """Station 2: the held-out records and the model's config.

        Checked here: as in a run, but for the bytes of training records; that there are weights to evaluate,
        and they are the model's.
        """
        self.data = read_eval_data(self.config)
        self.fit_model()
        self.latest = next(reversed(checkpoint.list_checkpoints(Path(self.config.output_dir))), None)
        if not self.latest and not self.config.init_checkpoint:
            raise InputError(
                f"`output_dir` must hold a checkpoint with do_train=false and no init_checkpoint. Received: "
                f"{self.config.output_dir}, with none."
            )
        starting_weights.check(self._source, self.model_config, OBJECTIVE_HEADS[self.config.objective])

    @contextlib.contextmanager
    def open_directory(self):
        """Station 3: hold the lock of the output directory, which no other run may hold."""
        with run_directory.locked(self.config.output_dir, self.processes) as self.folder:
            yield

    def start_engine(self):
        """Station 4: the compiled step with the weights; checked here: that no head lacks its own."""
        self.engine = self.build_engine()
        found = self.load_weights(self._source)
        if found.missing:  # their initial values would be evaluated
            raise InputError(
                "`init_checkpoint` must have every head of objective="
                f"{self.config.objective} to be evaluated. Received: {self._source}, which lacks "
                f"{', '.join(found.missing)}."
            )

    def train(self):
        """Station 5: evaluate and report; returns a `PretrainingResult`."""
        step = int(checkpoint.NAME.fullmatch(self.latest.name)[1]) if self.latest else 0
        with out_of_memory_names("the evaluation", "eval_batch_size"):
            metrics = [{"data": "eval", **self.evaluate(step)}]
        if self.processes.is_first:
            self.report(metrics)
        return PretrainingResult(self.config.output_dir, metrics if self.processes.is_first else [], [])

    @property
    def _source(self):
        return str(self.latest or self.config.init_checkpoint)
