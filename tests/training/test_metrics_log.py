"""The log: rows as written, rows past a checkpoint removed, half-written rows dropped, events mirrored."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_packed.core.settings import InputError
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training.metrics_log import MetricsLog, eval_columns, read_rows, train_columns

OBJECTIVE = pretraining_objective("per_token")
TRAIN_COLUMNS, EVAL_COLUMNS = train_columns(OBJECTIVE), eval_columns(OBJECTIVE)


def row(step):
    return {name: float(step) for name in EVAL_COLUMNS} | {"step": step}


def test_first_columns():
    assert TRAIN_COLUMNS[:2] == EVAL_COLUMNS[:2] == ("step", "loss")


def test_rows_past_the_checkpoint_are_removed(tmp_path):
    path = tmp_path / "eval_metrics.csv"
    log = MetricsLog(path, EVAL_COLUMNS, 0)
    for step in (10, 20, 30):
        log.write(row(step))
    text = path.read_text()
    path.write_text(text + "40,0.5")  # killed while writing
    assert [r["step"] for r in read_rows(path)] == ["10", "20", "30"]
    log = MetricsLog(path, EVAL_COLUMNS, 20)
    assert path.read_text() == "".join(text.splitlines(keepends=True)[:3])
    log.write(row(30))
    assert path.read_text() == text
    # the events are those of the rows that are left, and of no step twice
    assert event_steps(tmp_path / "tensorboard" / "eval_metrics") == [10, 20, 30]


def test_rows_that_are_no_logs(tmp_path):
    for content in ("step,loss\nten,1\n", "loss\n1.0\n"):
        (tmp_path / "metrics.csv").write_text(content)
        with pytest.raises(InputError, match="every row must begin with a step"):
            read_rows(tmp_path / "metrics.csv")


def event_steps(folder):
    """Steps of the loss in all event files of a folder."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return [event.step for event in events.Tensors("loss")]


def test_events_are_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.csv", TRAIN_COLUMNS, 0)
    log.write({name: 0.0 for name in TRAIN_COLUMNS} | {"step": 5, "tokens_per_second": None})
    assert read_rows(tmp_path / "metrics.csv")[0]["tokens_per_second"] == ""
    events = list((tmp_path / "tensorboard" / "metrics").iterdir())
    assert len(events) == 1
    assert event_steps(tmp_path / "tensorboard" / "metrics") == [5]  # a loss of 0 is a loss


def test_a_log_of_other_columns_goes_on(tmp_path):
    """A run that an older version began has fewer; a newer one may have had some that are not known here."""
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,tokens_per_second,later\n10,0.5,100.0,7.0\n20,0.25,,8.0\n30,0.1,1.0,9.0\n")
    log = MetricsLog(path, TRAIN_COLUMNS, 20)
    log.write({name: 2.0 for name in TRAIN_COLUMNS} | {"step": 21})
    rows = read_rows(path)
    assert list(rows[0]) == [*TRAIN_COLUMNS, "later"]
    assert [(row["step"], row["loss"], row["later"]) for row in rows] == [
        ("10", "0.5", "7.0"),
        ("20", "0.25", "8.0"),
        ("21", "2.0", ""),
    ]
    assert [row["gradient_norm"] for row in rows] == ["", "", "2.0"]
    assert event_steps(tmp_path / "tensorboard" / "metrics") == [10, 20, 21]
    MetricsLog(path, TRAIN_COLUMNS, 21)
    assert read_rows(path) == rows
