"""Learning curves are what the logs say, of every run under its own name, and mistakes are one line."""

import json
from pathlib import Path

import pytest

from benchmarks.run_curves import DESCRIPTION, CurvesConfig, draw, main, read_curves
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError


def write_run(folder, trained, evaluated=()):
    folder.mkdir()
    for log, points in (("metrics", trained), ("eval_metrics", evaluated)):
        rows = "".join(f"{step},9.0,{value}\n" for step, value in points)
        if points:
            (folder / f"{log}.csv").write_text(f"step,loss,mlm_loss\n{rows}")
    return folder


@pytest.fixture
def folders(tmp_path):
    first = write_run(tmp_path / "one", [(1, 3.0), (2, 2.5), (3, "")], [(2, 2.75)])
    return [first, write_run(tmp_path / "two", [(1, 4.0), (2, 3.5)])]


def test_curves_are_the_logs_points(folders):
    assert read_curves(folders, "mlm_loss") == {
        ("train", "one"): [(1, 3.0), (2, 2.5)],  # a row of steps that were left out has no value
        ("train", "two"): [(1, 4.0), (2, 3.5)],
        ("eval", "one"): [(2, 2.75)],
    }
    assert read_curves(folders[:1], "loss")["train", "one"] == [(1, 9.0), (2, 9.0), (3, 9.0)]


def test_each_line_has_the_points_and_the_name_of_its_run(folders, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch() or drawn.append(self))
    draw(read_curves(folders, "mlm_loss"), "mlm_loss", tmp_path / "curves.png")
    (figure,) = drawn
    lines = {
        panel.get_title(): {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
        for panel in figure.axes
    }
    assert lines == {
        "training": {"one": [[1, 3], [2, 2.5]], "two": [[1, 4], [2, 3.5]]},
        "held out": {"one": [[2, 2.75]]},
    }


def test_the_command_prints_the_last_points_and_draws(folders, tmp_path, capsys):
    argv = ["curves", f"--run_dirs={','.join(map(str, folders))}", f"--json={tmp_path}/last.json"]
    assert run(main, CurvesConfig, DESCRIPTION, [*argv, f"--picture={tmp_path}/curves.png"]) == 0
    assert json.loads((tmp_path / "last.json").read_text()) == [
        {"run": "one", "data": "train", "step": 2, "mlm_loss": 2.5},
        {"run": "two", "data": "train", "step": 2, "mlm_loss": 3.5},
        {"run": "one", "data": "eval", "step": 2, "mlm_loss": 2.75},
    ]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "one" in capsys.readouterr().out


def test_mistakes_are_told(folders, tmp_path):
    with pytest.raises(
        InputError, match=r"`figure` must be a column of .*step, loss, mlm_loss. Received: f1"
    ):
        read_curves(folders, "f1")
    with pytest.raises(InputError, match=r"must be folders of different names. Received: one, one"):
        read_curves([folders[0], folders[0]], "loss")
    with pytest.raises(InputError, match=r"must hold runs with rows in metrics.csv. Received: .*three"):
        read_curves([tmp_path / "three"], "loss")
    with pytest.raises(InputError, match="`run_dirs` must be given"):
        CurvesConfig()
