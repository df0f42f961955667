"""Runs by their ordinary command: complete, stopped by a signal, gone on with, failed."""

import json
import signal
import time

import pytest
from curve_logs import a_run, write_log

from benchmarks import planned_runs, taken_runs
from benchmarks.curve_runs import make_runs
from benchmarks.kept_runs import is_complete
from benchmarks.learning_curves import CurvesConfig
from benchmarks.taken_runs import take
from bert_packed.core.settings import InputError

GIVEN = {"packed_file": "p", "unpacked_file": "u", "eval_file": "e", "output_dir": "o"}


def test_a_run_is_complete_with_its_last_rows_under_its_flags(tmp_path):
    one, folder = a_run(), tmp_path / "packed-seed1"
    assert not is_complete(one, tmp_path)
    for log in ("metrics.csv", "eval_metrics.csv"):
        write_log(folder / log, [(3, 9, 8.0, 0.1, "")])
    assert not is_complete(one, tmp_path)
    (folder / "run.json").write_text(json.dumps({"flags": dict(one.flags)}))
    assert is_complete(one, tmp_path)
    write_log(folder / "eval_metrics.csv", [(2, 9, 8.0, 0.1, "")])
    assert not is_complete(one, tmp_path)
    write_log(folder / "eval_metrics.csv", [(3, 9, 8.0, 0.1, "")])
    assert is_complete(a_run(more_flags="--keep_checkpoint_max=5"), tmp_path)  # on which nothing depends
    assert not is_complete(a_run(more_flags="--masking=dynamic"), tmp_path)
    # as runs are whose log has other intervals
    (folder / "run.json").write_text(json.dumps({"flags": {**one.flags, "log_steps": 7, "eval_steps": 7}}))
    assert is_complete(one, tmp_path)
    (folder / "run.json").write_text(json.dumps({"flags": {**one.flags, "random_seed": 2}}))
    assert not is_complete(one, tmp_path)
    for damaged in ("[]", '{"flags": []}', "{", "null"):
        (folder / "run.json").write_text(damaged)
        assert not is_complete(one, tmp_path)


def script(monkeypatch, tmp_path, text):
    """Let a Python script stand in for `run_pretraining.py`."""
    (tmp_path / "run_pretraining.py").write_text(text)
    monkeypatch.setattr(planned_runs, "TOP", tmp_path)


def test_what_a_command_says_is_kept_and_its_failure_told(monkeypatch, tmp_path):
    script(monkeypatch, tmp_path, "import sys\nprint('started', sys.argv[-1])\n")
    assert take(a_run(more_flags="--dtype=float32"), tmp_path / "runs") == 0
    assert take(a_run(more_flags="--dtype=float32"), tmp_path / "runs") == 0
    log = tmp_path / "runs" / "packed-seed1.log"
    assert log.read_text() == 2 * "started --dtype=float32\n"
    script(monkeypatch, tmp_path, "import sys\nsys.exit('no such file')\n")
    with pytest.raises(InputError, match=r"status 1 of packed-seed1; .*\.log ends with: no such file"):
        take(a_run(), tmp_path / "runs")
    script(monkeypatch, tmp_path, "import sys\nsys.exit(130)\n")
    assert take(a_run(), tmp_path / "runs") == 130
    script(monkeypatch, tmp_path, "import os\nos.kill(os.getpid(), 15)\n")
    assert take(a_run(), tmp_path / "runs") == 143


def test_a_signal_is_handed_on_and_handlers_come_back(monkeypatch, tmp_path):
    """The stand-in asks for the signal, and says which it got."""
    text = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    script(monkeypatch, tmp_path, text)
    before = signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    assert take(a_run(), tmp_path / "runs") == 143
    assert time.monotonic() - start < 30
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_stops_the_set_though_the_run_came_to_its_end(monkeypatch, tmp_path):
    """The stand-in minds no signal, as a run in its last evaluation."""
    text = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("came", flush=True))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(1)
"""
    script(monkeypatch, tmp_path, text)
    assert take(a_run(), tmp_path / "runs") == 143
    assert (tmp_path / "runs" / "packed-seed1.log").read_text() == "came\n"


def test_a_run_that_has_begun_goes_on_with_its_intervals(monkeypatch, tmp_path):
    """As the command, which refuses others."""
    taken = []
    monkeypatch.setattr(taken_runs, "take", lambda one, folder: taken.append(one.flags) or 1)
    one = make_runs(CurvesConfig(**GIVEN), 2.0)[0]
    assert taken_runs.take_all([one], tmp_path) == 1
    (tmp_path / one.name).mkdir()
    kept = {**one.flags, "log_steps": 3, "eval_steps": 4, "learning_rate": 5.0}
    (tmp_path / one.name / "run.json").write_text(json.dumps({"flags": kept}))
    assert taken_runs.take_all([one], tmp_path) == 1
    assert taken == [one.flags, {**one.flags, "log_steps": 3, "eval_steps": 4}]
