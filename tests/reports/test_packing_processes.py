"""The comparison of one process with several runs the command, and its figures are those of the command."""

import json

import pytest
from unpacked_records import make_features, write_features

from bert_packed.reports.packing_processes import DESCRIPTION, ProcessesConfig, compare_phases, main
from data_gen.cli.command_line import run


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


@pytest.mark.slow
def test_the_command_is_measured(tmp_path, capsys):
    path = write_features(tmp_path / "a.tfrecord", make_features([5, 8, 2, 7, 8], 8))
    flags = {"input_file": path, "max_seq_length": 8, "repeats": 1, "work_dir": tmp_path}
    argv = ["x", *(f"--{name}={value}" for name, value in flags.items()), f"--json={tmp_path}/found.json"]
    assert run(main, ProcessesConfig, DESCRIPTION, argv) == 0
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [rows[0]["phase"], rows[-2]["phase"], rows[-1]["phase"]] == [
        "start-up",
        "publish",
        "whole command",
    ]
    assert rows[-1]["one, s"] == pytest.approx(sum(row["one, s"] for row in rows[:-1]))
    assert "5 sequences" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tfrecord", "found.json"]


def test_mistakes_of_the_command_are_its_own(tmp_path, capsys):
    for value in ("", f"{tmp_path}/none.tfrecord"):
        assert run(main, ProcessesConfig, DESCRIPTION, ["x", f"--input_file={value}"]) == 2
        assert capsys.readouterr().err.startswith("x: error: `input_file` must ")
