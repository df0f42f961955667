"""The log: rows as written, rows past a checkpoint removed, half-written rows dropped, events mirrored."""

from bert_packed.metrics_log import EVAL_COLUMNS, TRAIN_COLUMNS, MetricsLog, read_rows


def row(step):
    return {name: float(step) for name in EVAL_COLUMNS} | {"step": step}


def test_first_columns():
    assert TRAIN_COLUMNS[:2] == EVAL_COLUMNS[:2] == ("step", "loss")


def test_rows_past_the_checkpoint_are_removed(tmp_path):
    path = tmp_path / "eval_metrics.csv"
    log = MetricsLog(path, EVAL_COLUMNS, 0)
    for step in (10, 20, 30):
        log.write(row(step))
    log.close()
    text = path.read_text()
    path.write_text(text + "40,0.5")  # killed while writing
    assert [r["step"] for r in read_rows(path)] == ["10", "20", "30"]
    log = MetricsLog(path, EVAL_COLUMNS, 20)
    assert path.read_text() == "".join(text.splitlines(keepends=True)[:3])
    log.write(row(30))
    log.close()
    assert path.read_text() == text


def test_events_are_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.csv", TRAIN_COLUMNS, 0)
    log.write({name: 1.0 for name in TRAIN_COLUMNS} | {"step": 5, "tokens_per_second": None})
    log.close()
    assert read_rows(tmp_path / "metrics.csv")[0]["tokens_per_second"] == ""
    events = list((tmp_path / "tensorboard" / "metrics").iterdir())
    assert len(events) == 1 and events[0].stat().st_size > 100
