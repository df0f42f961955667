"""A soak kills a command that really runs, and sees a file that a second start has spoilt."""

import random

import pytest
from benchmark_command import run_benchmark, tables_of

from benchmarks import soak

WHOLE = "mkdir -p {out}; sleep 0.6; echo whole > {out}/a"
SPOILT = "mkdir -p {out}; echo begun >> {out}/a; sleep 0.6; echo whole >> {out}/a"


@pytest.mark.parametrize(("script", "differs"), [(WHOLE, False), (SPOILT, True)])
def test_what_a_kill_spoils_is_counted(tmp_path, script, differs):
    flags = {"command": f"sh -c '{script}'", "output_dir": tmp_path / "soak", "minutes": 0.05, "seed": 1}
    tables = tables_of("soak", tmp_path, **flags)
    (total,) = tables["soak"]
    assert total["kills"] == sum(row["kills"] for row in tables["rounds"]) > 0
    assert total["rounds that differ"] == (
        sum(row["kills"] > 0 for row in tables["rounds"]) if differs else 0
    )
    assert total["seconds lost per kill"] > 0


def test_an_end_by_itself_is_no_kill(monkeypatch, tmp_path):
    taken = iter([-0.25, -0.5, 0.75])
    monkeypatch.setattr(soak, "run_once", lambda *_: next(taken))
    monkeypatch.setattr(soak, "read_files", lambda *_: {"a": b"begun"})
    config = soak.SoakConfig(command="true", output_dir="soak")
    row = soak.do_round(config, tmp_path, "round-0", random.Random(0), 1.0, {"a": b"whole"})
    assert row == {"round": "round-0", "kills": 2, "seconds": 1.5, "equal": False}


def test_a_command_that_fails_ends_the_soak(tmp_path, capsys):
    assert run_benchmark("soak", command="false", output_dir=tmp_path / "soak") == 2
    assert "`command` must end with status 0. Received: 1; see " in capsys.readouterr().err
