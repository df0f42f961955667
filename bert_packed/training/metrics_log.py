"""What a run reports as it goes: rows of CSV, and the same figures as TensorBoard events."""

import csv
import io
import shutil
from pathlib import Path

from tensorboard.summary import Writer

from bert_packed.core.settings import InputError
from bert_packed.training.watch import WATCHED

SPEED = ("skipped_steps", "learning_rate", "sequences_per_second", "tokens_per_second")


def train_columns(objective):
    """Columns of the log of training: what `loop.LogInterval.row` holds."""
    return ("step", *objective.figures, *SPEED, *WATCHED)


def eval_columns(objective):
    """Columns of the log of evaluations."""
    return ("step", *objective.figures, "num_sequences")


class MetricsLog:
    """Appends rows to `metrics.csv` or `eval_metrics.csv` and mirrors them in TensorBoard.

    Rows that are there may be of another version, with other columns: what they lack stays empty, what they
    alone have is kept behind the columns of today.

    Args:
        path: The CSV file; TensorBoard events go to the folder of the same stem beside it.
        columns: Column names; the first is `step`.
        last_step: Rows past this step are removed, their events too: the steps will be taken again.

    Raises:
        InputError: the file holds rows that are no log's.
    """

    def __init__(self, path, columns, last_step):
        self._path = Path(path)
        rows = [row for row in read_rows(self._path) if int(row["step"]) <= last_step]
        self._columns = columns = tuple(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        events = self._path.parent / "tensorboard" / self._path.stem
        shutil.rmtree(events, ignore_errors=True)
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(self._format([dict(zip(columns, columns, strict=True)), *rows]))
        partial.replace(self._path)
        self._writer = Writer(str(events))
        for row in rows:
            self._add_events(row)
        self._writer.flush()

    def write(self, row):
        """Append one row, a dict by column; a field that is None or missing stays empty."""
        with self._path.open("a", newline="") as file:
            file.write(self._format([row]))
        self._add_events(row)
        self._writer.flush()

    def _add_events(self, row):
        for name in self._columns[1:]:
            if row.get(name) not in (None, ""):
                self._writer.add_scalar(name, float(row[name]), int(row["step"]))

    def _format(self, rows):
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()


class NoLog:
    """In the place of a `MetricsLog` in a process that writes none; takes the same arguments."""

    def __init__(self, path, columns, last_step):
        pass

    def write(self, row):
        """Leave it to the first process, which has the same row."""


def read_rows(path):
    """The complete rows of a log: list of dicts of text; [] where there is no such file.

    Raises:
        InputError: a row has no step.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        # A row cut short by a kill has no value in the last column
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    for row in rows:
        if not row.get("step", "").isdecimal():
            raise InputError(
                f"{path}: every row must begin with a step. Received: {next(iter(row.values()))!r}."
            )
    return rows
