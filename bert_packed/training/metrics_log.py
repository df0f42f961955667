"""Metrics logs of a run: rows of CSV, and the same figures as TensorBoard events."""

import csv
import io
import shutil
import socket
import time
from pathlib import Path

# The messages alone: TensorBoard's writer imports TensorFlow, under JAX too
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.tfrecords import frame_records
from bert_packed.training import loop
from bert_packed.training.training_metrics import WATCHED

TRAIN_FILE, EVAL_FILE = "metrics.csv", "eval_metrics.csv"
MOST_DIGITS = 18  # of a step: of an int64, and Python refuses thousands
SPEED = ("skipped_steps", "learning_rate", "sequences_per_second", "tokens_per_second")


def train_columns(objective):
    """Columns of the training log, those of `training_metrics.LogInterval.row`."""
    return ("step", *objective.figures, *SPEED, *WATCHED)


def eval_columns(objective):
    """Columns of the evaluation log."""
    return ("step", *objective.figures, "num_sequences")


def _scalar(name, value):
    plugin = SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = SummaryMetadata(plugin_data=plugin, data_class=DATA_CLASS_SCALAR)
    tensor = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(), float_val=[float(value)])
    return Summary.Value(tag=name, metadata=metadata, tensor=tensor)


class MetricsLog:
    """Appends rows to a CSV file and mirrors them in TensorBoard.

    Args:
        path: The CSV file; TensorBoard events go to `tensorboard/STEM` beside it.
        columns: Column names; the first is `step`.
        rows: Earlier rows, from `rows_to_keep`; any others in the file are removed, their events too.
            Another version may have written them: missing columns stay empty, unknown ones are kept, last.
    """

    def __init__(self, path, columns, rows=()):
        self._path = Path(path)
        self._columns = columns = tuple(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        events = self._path.parent / "tensorboard" / self._path.stem
        shutil.rmtree(events, ignore_errors=True)
        storage.write_text(self._path, self._format([dict(zip(columns, columns, strict=True)), *rows]))
        events.mkdir(parents=True, exist_ok=True)
        self._events = events / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._append_events([Event(wall_time=time.time(), file_version="brain.Event:2")])
        self._add_events(rows)

    def write(self, row):
        """Append one row, a dict by column; a field that is None or missing stays empty."""
        with storage.naming_file(self._path), self._path.open("a", newline="") as file:
            file.write(self._format([row]))
        self._add_events([row])

    def flush_to_disk(self):
        """Wait until all rows are on the disk, as a checkpoint of these steps will be."""
        storage.flush_to_disk(self._path)

    def _add_events(self, rows):
        events = []
        for row in rows:
            figures = {name: row[name] for name in self._columns[1:] if row.get(name) not in (None, "")}
            summary = Summary(value=[_scalar(name, value) for name, value in figures.items()])
            events.append(Event(wall_time=time.time(), step=int(row["step"]), summary=summary))
        self._append_events(events)

    def _append_events(self, events):
        content = frame_records([event.SerializeToString() for event in events])
        with storage.naming_file(self._events), self._events.open("ab") as file:
            file.write(content)

    def _format(self, rows):
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()


class NoLog:
    """The `MetricsLog` of a process that writes none, since the first process has the same rows."""

    def write(self, row):
        pass

    def flush_to_disk(self):
        pass


def open_logs(folder, config, objective, first_step, evaluation_due, processes):
    """The log of training and, for a config that evaluates, of evaluations: list of `MetricsLog` or `NoLog`.

    `evaluation_due` is true if `first_step` is still to be evaluated. Raises `InputError` where a row of
    either is lost; both are checked before one changes.
    """
    # An evaluation that is due is made again: its row may or may not have been written
    evaluated = first_step - 1 if evaluation_due else first_step
    logs = [(folder / TRAIN_FILE, train_columns(objective), config.log_steps, first_step)]
    if config.evaluates:
        logs.append((folder / EVAL_FILE, eval_columns(objective), config.eval_steps, evaluated))
    kept = []

    def read():
        for path, _, every, last_step in logs:
            due = loop.due_steps(every, config, last_step)
            kept.append(rows_to_keep(path, last_step, due, config.accept_lost_rows))

    processes.first_decides(read)
    if not processes.is_first:
        return [NoLog()] * len(logs)
    return [MetricsLog(path, columns, rows) for (path, columns, *_), rows in zip(logs, kept, strict=True)]


def rows_to_keep(path, last_step, due_steps, accepts_lost=False):
    """The rows of a log with which a run continues: list of dicts, by ascending step. Changes no file.

    Args:
        path: The CSV file.
        last_step: Rows past this step are left out, since their steps are taken again.
        due_steps: Steps up to `last_step` of which the run has written a row.
        accepts_lost: Replace missing rows by rows without figures.

    Raises:
        InputError: a row is missing, or the file is no log.
    """
    rows = {int(row["step"]): row for row in read_rows(path) if int(row["step"]) <= last_step}
    lost = [step for step in due_steps if step not in rows]
    if lost and not accepts_lost:
        steps = "step" if len(lost) == 1 else f"{len(lost)} steps, the first"
        raise InputError(
            f"{path} must have the row of every logged step up to {last_step}. Received: none of {steps} "
            f"{lost[0]}. Put the file back, or continue without these rows by --accept_lost_rows."
        )
    rows |= {step: {"step": step} for step in lost}
    return [rows[step] for step in sorted(rows)]


def read_rows(path):
    """The complete rows of a log: list of dicts of text; [] where there is no such file.

    Raises `InputError`, naming the line, where the file is no log.
    """
    if not path.exists():
        return []
    text = storage.read_text(path)
    # A kill may cut the last row short, at any character
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""), strict=True)
    columns, rows = None, []
    try:
        for fields in filter(None, reader):
            if columns is None:
                columns = fields
                if columns[0] != "step":
                    raise InputError(
                        f"{path}, line {reader.line_num}: the first column must be step. "
                        f"Received: {columns[0]!r}."
                    )
                continue
            last_step, step = int(rows[-1]["step"]) if rows else -1, fields[0]
            if not step.isdecimal() or len(step) > MOST_DIGITS or int(step) <= last_step:
                raise InputError(
                    f"{path}, line {reader.line_num}: every row must begin with a step, past that of the row "
                    f"before. Received: {step!r}."
                )
            if len(fields) != len(columns) or not all(map(_is_number, fields)):
                raise InputError(
                    f"{path}, line {reader.line_num}: a row must have {len(columns)} fields, numbers or "
                    f"nothing. Received: {','.join(fields)}."
                )
            rows.append(dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: it must be CSV. Received: {error}.") from error
    return rows


def _is_number(text):
    try:
        float(text or 0)
    except ValueError:
        return False
    return True
