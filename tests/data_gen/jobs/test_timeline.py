"""Phases follow one another without a gap, each with a name and its processors' seconds."""

import importlib.util
import itertools
import json
import os
import time

import pytest
from unpacked_records import make_features, write_features

from bert_packed.core.command_line import run
from data_gen.jobs.steps import Job, Step
from data_gen.jobs.timeline import Timeline, process_age
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.pack_tfrecords import DESCRIPTION, main

PHASES = [
    *("start-up", "check inputs", "read sequences", "before plan", "plan"),
    *("before sort sequences", "sort sequences", "before measure packs", "measure packs"),
    *("before write packs", "write packs", "publish"),
]


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = self.busy = 100.0

    def timeline(self):
        return Timeline(lambda: self.now, lambda: self.busy, age=3.0)

    def advance(self, seconds, busy=0.0):
        self.now += seconds
        self.busy += busy


def test_every_second_belongs_to_one_phase():
    clock = Clock()
    timeline = clock.timeline()
    clock.advance(1, busy=0.5)
    timeline.enter("check")
    clock.advance(2, busy=2)
    with timeline.during("read"):
        clock.advance(4)
        timeline.add_step(101.5)
        timeline.add_step(104.0, worker=7, busy=3.0)
        timeline.add_step(105.0, worker=8, busy=2.0)
        timeline.add_step(106.0, worker=7, busy=3.5)
    clock.advance(8)
    with timeline.during("write"):
        clock.advance(16, busy=1)
        timeline.add_step(116.0, worker=7, busy=5.0)
    clock.advance(32)
    timeline.finish("publish")
    rows = [list(phase.values()) for phase in timeline.to_json()]
    assert rows == [
        # name, begin, end, first step, parent, workers, their number
        ["start-up", 0.0, 4.0, None, 100.5, 0.0, 0],
        ["check", 4.0, 6.0, None, 2.0, 0.0, 0],
        ["read", 6.0, 10.0, 4.5, 0.0, 5.5, 2],
        ["before write", 10.0, 18.0, None, 0.0, 0.0, 0],
        ["write", 18.0, 34.0, 19.0, 1.0, 1.5, 1],
        ["publish", 34.0, 66.0, None, 0.0, 0.0, 0],
    ]
    assert timeline.describe() == (
        "start-up 4.0, check 2.0, read 4.0, before write 8.0, write 16.0, publish 32.0"
    )


def test_a_phase_of_its_own_keeps_its_name():
    timeline = Clock().timeline()
    timeline.enter("check")
    timeline.finish("publish")
    assert [phase.phase for phase in timeline.phases] == ["start-up", "check"]


def name_process(number):
    return os.getpid()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_steps_are_noted_with_who_did_them(tmp_path, num_workers):
    timeline = Timeline()
    steps = [Step(f"step-{number}", name_process, number) for number in range(6)]
    with Job(tmp_path, num_workers, timeline=timeline) as job:
        found = job.run(steps, "do")
        job.run(steps, "again")
    done, again = timeline.phases[1], timeline.phases[3]
    assert (done.phase, again.phase) == ("do", "again")
    assert done.begin <= done.first_step <= done.end
    assert done.num_workers == len(set(found) - {os.getpid()})
    assert (done.workers_cpu == 0) == (num_workers == 1)
    assert (again.first_step, again.num_workers, again.workers_cpu) == (None, 0, 0)


@pytest.mark.skipif(importlib.util.find_spec("apache_beam") is None, reason="needs the extra `beam`")
@pytest.mark.filterwarnings("default")
def test_of_processes_elsewhere_nothing_is_said(tmp_path):
    """`0` would say that packing by Beam takes no processor."""
    timeline = Timeline()
    with Job(tmp_path, runner="DirectRunner", timeline=timeline) as job:
        job.run([Step("step", name_process, 0)], "do")
        job.run([Step("step", name_process, 0)], "again")
    done, again = timeline.phases[1], timeline.phases[3]
    assert (done.phase, done.workers_cpu, done.num_workers, done.first_step) == ("do", None, 0, None)
    assert (again.phase, again.workers_cpu) == ("again", 0.0)  # done before


def test_the_age_of_a_process_grows_with_the_clock():
    before, start = process_age(), time.monotonic()
    time.sleep(0.05)
    assert process_age() - before == pytest.approx(time.monotonic() - start, abs=0.02)


def test_packing_that_nobody_times_does_not_begin_with_the_process(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("data_gen.jobs.timeline.process_age", lambda: 3600.0)
    path = write_features(tmp_path / "a.tfrecord", make_features([5, 8, 2, 7, 8], 8))
    with caplog.at_level("INFO"):
        pack(PackConfig(path, str(tmp_path / "out"), max_seq_length=8))
    assert "packed 5 sequences" in caplog.text and "start-up" not in caplog.text
    with caplog.at_level("INFO"):
        pack(PackConfig(path, str(tmp_path / "again"), max_seq_length=8), Timeline())
    assert "start-up 3600" in caplog.text


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_packing_run_reports_its_phases(tmp_path, capsys, num_workers):
    for name in ("a", "b"):
        write_features(tmp_path / f"{name}.tfrecord", make_features([5, 8, 2, 7, 8], 8))
    flags = {
        "input_file": f"{tmp_path}/*.tfrecord",
        "output_dir": tmp_path / "out",
        "max_seq_length": 8,
        "num_workers": num_workers,
        "json": tmp_path / "report.json",
    }
    argv = ["pack_tfrecords.py", *(f"--{name}={value}" for name, value in flags.items())]
    assert run(main, PackConfig, DESCRIPTION, argv) == 0
    (row,) = json.loads((tmp_path / "report.json").read_text())
    phases = row.pop("phases")
    assert row["sequences"] == 10
    assert [phase["phase"] for phase in phases] == PHASES
    assert phases[0]["begin"] == 0
    for phase, following in itertools.pairwise(phases):
        assert phase["begin"] <= phase["end"] == following["begin"]
    with_steps = {phase["phase"]: phase["num_workers"] for phase in phases if phase["first_step"] is not None}
    assert list(with_steps) == ["read sequences", "plan", "sort sequences", "measure packs", "write packs"]
    assert (max(with_steps.values()) > 0) == (num_workers > 1)
    assert "phases" not in capsys.readouterr().out
    assert "phases" not in (tmp_path / "out" / "manifest.json").read_text()
