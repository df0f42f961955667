"""The comparison of one process with several runs the command, and its figures are those of the command."""

import json
import os
import threading
import types
from pathlib import Path

import pytest
from unpacked_records import make_features, write_features

from benchmarks import packing_processes
from benchmarks.packing_processes import (
    DESCRIPTION,
    ProcessesConfig,
    compare_at_once,
    compare_phases,
    main,
)
from bert_packed.core.command_line import run
from data_gen.pack_config import PackConfig


def report(*phases):
    """What `pack_tfrecords.py --json` writes, of (name, begin, end, parent, workers)."""
    keys = ("phase", "begin", "end", "parent_cpu", "workers_cpu")
    return {"sequences": 7, "phases": [dict(zip(keys, phase, strict=True)) for phase in phases]}


def test_medians_of_phases_are_compared():
    alone = [report(("start-up", 0, 1, 1, 0), ("read", 1, end, 4, 0)) for end in (9, 5, 7)]
    several = [report(("start-up", 0, 2, 1, 0), ("read", 2, end, 1, 5)) for end in (4, 5, 9)]
    rows, num_sequences = compare_phases(alone, several)
    assert num_sequences == 7
    assert [list(row.values()) for row in rows] == [
        ["start-up", 1, 1, 2, 1, 0.5],
        ["read", 6, 4, 3, 6, 2.0],
        ["whole command", 7, 5, 5, 7, 1.4],
    ]


def test_commands_at_once_count_until_the_last_has_ended():
    """Two commands that end after 8 and 10 s take 5 s for the work of one, which alone takes 7."""
    alone = [report(("start-up", 0, 1, 1, 0), ("read", 1, end, 4, 0)) for end in (9, 5, 7)]
    rounds = [
        [report(("start-up", 2, 3, 1, 0), ("read", 3, end, cpu, 0)) for end, cpu in ((10, 3), (12, 7))]
    ] * 3
    rounds[0] = [report(("read", 0, 99, 6, 2))] * 2
    (*_, whole), _ = compare_phases(alone, alone)
    assert list(compare_at_once(whole, rounds).items()) == [
        ("phase", "commands at once"),
        ("one, s", 7),
        ("one, CPU s", 5),
        ("several, s", 5),
        ("several, CPU s", 6),
        ("times", 1.4),
    ]


@pytest.mark.slow
def test_the_command_is_measured(tmp_path, capsys):
    path = write_features(tmp_path / "a.tfrecord", make_features([5, 8, 2, 7, 8], 8))
    flags = {"input_file": path, "max_seq_length": 8, "repeats": 1, "work_dir": tmp_path}
    argv = ["x", *(f"--{name}={value}" for name, value in flags.items()), f"--json={tmp_path}/found.json"]
    assert run(main, ProcessesConfig, DESCRIPTION, argv) == 0
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [rows[place]["phase"] for place in (0, -3, -2, -1)] == [
        "start-up",
        "publish",
        "whole command",
        "commands at once",
    ]
    assert rows[-2]["one, s"] == pytest.approx(sum(row["one, s"] for row in rows[:-2]))
    assert "5 sequences" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tfrecord", "found.json"]


def test_the_command_packs_as_it_is_told(tmp_path, monkeypatch, capsys):
    """Every flag comes to `pack_tfrecords.py`, whose own reader reads the child's command."""
    configs = []
    at_once = threading.Barrier(3)

    def packing(command, **_):
        assert command[1].endswith("data_gen/pack_tfrecords.py")
        found = []
        assert run(found.append, PackConfig, "", command[1:]) == 0
        (config,) = found
        configs.append(config)
        os.mkdir(config.output_dir)
        seconds = {1: 6, 3: 2}[config.num_workers]
        if Path(config.output_dir).parents[1] != tmp_path:
            at_once.wait(timeout=60)  # all three run before one of them ends
            seconds = 9
        Path(config.json).write_text(json.dumps([report(("read", 0, seconds, 1, 0))]))
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(packing_processes.subprocess, "run", packing)
    monkeypatch.setattr(packing_processes, "num_cores", lambda: 77)
    config = ProcessesConfig(
        input_file="a,b", num_workers=3, max_seq_length=48, repeats=2, work_dir=str(tmp_path)
    )
    main(config)
    assert [config.num_workers for config in configs] == 2 * [1, 3, 1, 1, 1]
    assert {(config.input_file, config.max_seq_length) for config in configs} == {("a,b", 48)}
    assert len({config.output_dir for config in configs}) == 1 + 2 * 3
    assert all(Path(config.output_dir).is_relative_to(tmp_path) for config in configs)
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    assert ", 77 cores; 7 sequences" in printed
    assert printed.splitlines()[-2].split() == ["whole", "command", "6", "1", "2", "1", "3"]
    assert printed.splitlines()[-1].split() == ["commands", "at", "once", "6", "1", "3", "1", "2"]


def test_mistakes_of_the_command_are_its_own(tmp_path, capsys):
    for value in ("", f"{tmp_path}/none.tfrecord"):
        assert run(main, ProcessesConfig, DESCRIPTION, ["x", f"--input_file={value}"]) == 2
        assert capsys.readouterr().err.startswith("x: error: `input_file` must ")
