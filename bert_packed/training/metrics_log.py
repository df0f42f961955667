"""Metrics logs of a run: means and rates since the last row, rows of CSV, and TensorBoard events."""

import csv
import dataclasses
import io
import shutil
import socket
import time
from pathlib import Path

# Only the messages are imported: TensorBoard's writer imports TensorFlow, under JAX too
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT

from bert_packed.core import storage
from bert_packed.core.progress import describe_duration
from bert_packed.core.settings import InputError
from bert_packed.objectives.objective import add_sums
from bert_packed.records.tfrecords import frame_records

TRAIN_FILE, EVAL_FILE = "metrics.csv", "eval_metrics.csv"
MOST_DIGITS = 18  # of a step: of an int64, and Python refuses thousands
SPEED = ("skipped_steps", "learning_rate", "sequences_per_second", "tokens_per_second")
# Figures of a step beside its sums; a row has the mean over its steps
STEP_FIGURES = ("gradient_norm", "trust_ratio_min", "trust_ratio_median", "trust_ratio_max")
TIMED_FIGURES = ("data_wait_share", "model_flop_utilisation")  # by the clock: no two runs have the same
WATCHED = (*STEP_FIGURES, "packing_efficiency", *TIMED_FIGURES)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Denominators of relative figures; a figure whose denominator is None has no value.

    Attributes:
        positions_per_step: Packs per step times pack length.
        model_flops: Function from sums over steps to the model's floating-point operations for them.
        peak_flops: Operations per second of all devices of the run together, in matrix products.
    """

    positions_per_step: int | None = None
    model_flops: object = None
    peak_flops: float | None = None


@dataclasses.dataclass
class LogInterval:
    """Sums over the steps since the last row of the log; checkpoints save the first three.

    Attributes:
        sums: Sums over the steps that were not skipped.
        num_skipped: Number of skipped steps.
        watched: Sums of `STEP_FIGURES`, steps and tokens.
        timed: Sums over the steps that this process timed.
        seconds, waiting: Time of these steps, and the part spent waiting for a batch.
    """

    sums: dict = dataclasses.field(default_factory=dict)
    num_skipped: int = 0
    watched: dict = dataclasses.field(default_factory=dict)
    scale: Scale = dataclasses.field(default_factory=Scale)
    timed: dict = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    waiting: float = 0.0

    @classmethod
    def from_state(cls, state, scale):
        """Restore the interval in which a checkpoint was saved."""
        # Older versions saved less, hence `get`
        return cls(
            dict(state["interval"]), state.get("num_skipped", 0), dict(state.get("watched", {})), scale
        )

    def state(self):
        """The interval as entries of a checkpoint's state, for `from_state`."""
        return {"interval": self.sums, "num_skipped": self.num_skipped, "watched": dict(self.watched)}

    def add(self, sums, seconds, waiting=0.0):
        """Add a step that was not skipped.

        Args:
            sums: Dict of finite floats, the engine's.
            seconds: Duration, waiting included; None for the first step of a process, which compiles.
            waiting: Seconds of these until there was a batch.
        """
        figures = {name: sums[name] for name in STEP_FIGURES if name in sums}
        self.watched = add_sums(self.watched, {**figures, "num_steps": 1.0, "num_tokens": sums["num_tokens"]})
        self.sums = add_sums(self.sums, {name: sums[name] for name in sums if name not in STEP_FIGURES})
        if seconds is not None:
            self.seconds += seconds
            self.waiting += waiting
            self.timed = add_sums(self.timed, sums)

    def row(self, step, means, learning_rate):
        """The row of the log that ends the interval at `step`: dict, None for unknown figures."""
        figures = means(self.sums) if self.sums else {}  # none where every step was left out
        return {
            "step": step,
            **figures,
            "skipped_steps": self.num_skipped,
            "learning_rate": learning_rate,
            "sequences_per_second": self._per_second("num_sequences"),
            "tokens_per_second": self._per_second("num_tokens"),
            **self._watched_figures(),
        }

    def _per_second(self, name):
        return self.timed[name] / self.seconds if self.seconds > 0 else None

    def _watched_figures(self):
        watched, scale = self.watched, self.scale
        num_steps = watched.get("num_steps", 0.0)
        positions = (scale.positions_per_step or 0) * num_steps
        is_timed = self.seconds > 0
        utilisation = None
        if is_timed and scale.model_flops and scale.peak_flops:
            utilisation = scale.model_flops(self.timed) / self.seconds / scale.peak_flops
        return {
            **{name: watched[name] / num_steps if name in watched else None for name in STEP_FIGURES},
            "packing_efficiency": watched["num_tokens"] / positions if positions else None,
            "data_wait_share": self.waiting / self.seconds if is_timed else None,
            "model_flop_utilisation": utilisation,
        }


def describe(row, seconds_left=None):
    """A row as at most 75 columns of a line: "loss 2.345, mlm accuracy 51.2%, 12,345 tokens/s, 1.2 h left".

    It has the first accuracy of the objective, and how many steps were left out, if any were.
    """
    parts = [f"loss {row['loss']:.4g}" if "loss" in row else "no loss"]
    accuracies = [name for name in row if name.endswith("accuracy")]
    parts += [f"{name.replace('_', ' ')} {row[name]:.1%}" for name in accuracies[:1]]
    if rate := row["tokens_per_second"]:
        parts.append(f"{rate:,.0f} tokens/s" if rate < 1e6 else f"{rate / 1e6:.3g}M tokens/s")
    if seconds_left:
        parts.append(f"{describe_duration(seconds_left)} left")
    if row["skipped_steps"]:
        parts.append(f"{row['skipped_steps']} skipped")
    return ", ".join(parts)


def train_columns(objective):
    """Columns of the training log, those of `LogInterval.row`."""
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
            due = due_steps(every, config, last_step)
            kept.append(rows_to_keep(path, last_step, due, config.accept_lost_rows))

    processes.first_decides(read)
    opened = zip(logs, kept or [None] * len(logs), strict=True)
    return [open_log(path, columns, rows, processes) for (path, columns, *_), rows in opened]


def open_log(path, columns, rows, processes):
    """The `MetricsLog` of the first process, the `NoLog` of another."""
    return MetricsLog(path, columns, rows) if processes.is_first else NoLog()


def is_due(step, every, config):
    """True after every `every` steps (0 for never), and after the last step always."""
    return step == config.num_train_steps or (every > 0 and step % every == 0)


def due_steps(every, config, last_step):
    """The steps from 1 to `last_step` for which `is_due` holds: list of int."""
    return [step for step in range(1, last_step + 1) if is_due(step, every, config)]


def rows_to_keep(path, last_step, due_steps, accepts_lost=False):
    """The rows of a log with which a run continues: list of dicts, by ascending step. Changes no file.

    Args:
        path: The CSV file.
        last_step: Step past which rows are left out, since their steps are taken again.
        due_steps: Steps up to `last_step` of which the run has written a row.
        accepts_lost: True to replace missing rows by rows without figures.

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


def last_figures(folder, names):
    """The last rows of a run's logs, for a table: list of dicts `data`, `step` and the figures of names."""
    rows = []
    for data, log in (("train", TRAIN_FILE), ("eval", EVAL_FILE)):
        # A row of steps that were all left out has no figures
        logged = [row for row in read_rows(folder / log) if row["loss"]]
        if logged:
            figures = {name: float(logged[-1][name]) for name in names}
            rows.append({"data": data, "step": int(logged[-1]["step"]), **figures})
    return rows
