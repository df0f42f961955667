"""The log: rows past a checkpoint are removed, lost and damaged ones refused, all mirrored in events."""

import pytest
from full_disk import largest_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_packed.core.settings import InputError
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training.metrics_log import (
    MetricsLog,
    eval_columns,
    read_rows,
    rows_to_keep,
    train_columns,
)

OBJECTIVE = pretraining_objective("per_token")
TRAIN_COLUMNS, EVAL_COLUMNS = train_columns(OBJECTIVE), eval_columns(OBJECTIVE)


def row(step):
    return {name: float(step) for name in EVAL_COLUMNS} | {"step": step}


@pytest.fixture
def path(tmp_path):
    """A log with rows of the steps 10, 20 and 30."""
    log = MetricsLog(tmp_path / "eval_metrics.csv", EVAL_COLUMNS)
    for step in (10, 20, 30):
        log.write(row(step))
    return tmp_path / "eval_metrics.csv"


def event_steps(folder):
    """Steps of the loss in all event files of a folder."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return [event.step for event in events.Tensors("loss")]


def test_rows_past_the_checkpoint_are_removed(path):
    text = path.read_text()
    # the writer was killed within a field, and within the last one
    for torn in ("40,0.5", text.splitlines()[-1].replace("30", "40", 1)[:-1]):
        path.write_text(text + torn)
        assert [r["step"] for r in read_rows(path)] == ["10", "20", "30"]
    log = MetricsLog(path, EVAL_COLUMNS, rows_to_keep(path, 20, [10, 20]))
    assert path.read_text() == "".join(text.splitlines(keepends=True)[:3])
    log.write(row(30))
    assert path.read_text() == text
    # the events are those of the rows that are left, and of no step twice
    assert event_steps(path.parent / "tensorboard" / "eval_metrics") == [10, 20, 30]


@pytest.mark.parametrize(
    ("lines", "received"),
    [
        ([], r"none of 2 steps, the first 10\."),
        ([0], r"none of 2 steps, the first 10\."),
        ([0, 1, 3], r"none of step 20\."),
        ([0, 2], r"none of step 10\."),
    ],
)
def test_a_lost_row_is_refused_unless_accepted(path, lines, received):
    whole = path.read_text().splitlines(keepends=True)
    text = "".join(whole[number] for number in lines)
    path.write_text(text) if lines else path.unlink()
    rule = "must have the row of every logged step up to 29"
    with pytest.raises(InputError, match=f"^{path} {rule}. Received: {received}.*by --accept_lost_rows"):
        rows_to_keep(path, 29, [10, 20])
    assert (path.read_text() if path.exists() else "") == text
    rows = rows_to_keep(path, 29, [10, 20], accepts_lost=True)
    assert [int(one["step"]) for one in rows] == [10, 20]
    MetricsLog(path, EVAL_COLUMNS, rows)
    # the gap stays to be seen, and is not missed again
    kept = {number: whole[number] for number in lines}
    empty = {1: "10", 2: "20"}
    want = [whole[0], *(kept.get(n, empty[n] + "," * (len(EVAL_COLUMNS) - 1) + "\n") for n in (1, 2))]
    assert path.read_text() == "".join(want)
    losses = [one["loss"] for one in rows_to_keep(path, 29, [10, 20])]
    assert losses == [f"{n}0.0" if n in lines else "" for n in (1, 2)]


def test_a_row_cut_at_any_character_is_lost(path):
    text = path.read_text()
    last = text.splitlines(keepends=True)[-1]
    for cut in range(1, len(last) + 1):
        path.write_text(text[:-cut])
        with pytest.raises(InputError, match="none of step 30"):
            rows_to_keep(path, 30, [10, 20, 30])
    path.write_text(text)
    assert len(rows_to_keep(path, 30, [10, 20, 30])) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,loss\nten,1\n", "line 2: every row must begin with a step.*Received: 'ten'"),
        (b"loss\n1.0\n", "line 1: the first column must be step. Received: 'loss'"),
        (b"step,loss\n10,1\n\n10,2\n", "line 4: every row must begin with a step, past.*Received: '10'"),
        (b"step,loss\n10,one\n", "line 2: a row must have 2 fields, numbers or nothing. Received: 10,one"),
        (b"step,loss\n10,1,2\n", "line 2: a row must have 2 fields.* Received: 10,1,2"),
        (b"step,loss\n10,\xff\n", "must be UTF-8. Received: .*0xff"),
        (b'step,loss\n10,"1"2\n', "line 2: it must be CSV"),
        (b"step,loss\n" + 5000 * b"9" + b",1\n", "line 2: every row must begin with a step"),
    ],
)
def test_a_damaged_log_is_one_line_and_stays_as_it_is(tmp_path, content, message):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    for read in (read_rows, lambda path: rows_to_keep(path, 0, [], accepts_lost=True)):
        with pytest.raises(InputError, match=message) as caught:
            read(path)
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("file", "room"), [("metrics.csv", 10), ("events.out", 300)])
def test_a_disk_that_takes_no_more_names_the_file(tmp_path, file, room):
    """A row takes more than 10 bytes in the log, and more than 300 in the events."""
    path = tmp_path / "metrics.csv"
    log = MetricsLog(path, TRAIN_COLUMNS)
    with (
        pytest.raises(OSError, match=f"{file}.*File too large"),
        largest_file(path.stat().st_size + room),
    ):
        log.write({name: 0.0 for name in TRAIN_COLUMNS} | {"step": 5})


def test_a_log_of_other_columns_goes_on(tmp_path):
    """A run that an older version began has fewer; a newer one may have had some that are not known here."""
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,tokens_per_second,later\n10,0.5,100.0,7.0\n20,0.25,,8.0\n30,0.1,1.0,9.0\n")
    log = MetricsLog(path, TRAIN_COLUMNS, rows_to_keep(path, 20, [10, 20]))
    log.write({name: 2.0 for name in TRAIN_COLUMNS} | {"step": 21, "loss": 0.0, "tokens_per_second": None})
    rows = read_rows(path)
    assert list(rows[0]) == [*TRAIN_COLUMNS, "later"]
    assert [(row["step"], row["loss"], row["later"]) for row in rows] == [
        ("10", "0.5", "7.0"),
        ("20", "0.25", "8.0"),
        ("21", "0.0", ""),
    ]
    assert [row["gradient_norm"] for row in rows] == ["", "", "2.0"] and not rows[2]["tokens_per_second"]
    assert event_steps(tmp_path / "tensorboard" / "metrics") == [10, 20, 21]  # a loss of 0 is a loss
    MetricsLog(path, TRAIN_COLUMNS, rows_to_keep(path, 21, [10, 20]))
    assert read_rows(path) == rows
