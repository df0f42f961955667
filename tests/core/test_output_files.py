"""A file that a command writes at its end is asked for at its start."""

import dataclasses

import pytest

from bert_packed.core import command_line
from bert_packed.core.settings import setting


@dataclasses.dataclass(frozen=True)
class Reporting:
    json: str = setting("", "also write the table here")
    picture: str = setting("", "also draw it here")
    markdown: str = setting("", "also write a page here")


def report(path, flag="json"):
    """Run a command with `--json=path`, or another flag: its status, and whether its work was begun."""
    begun = []
    status = command_line.run(begun.append, Reporting, "", ["program.py", f"--{flag}={path}"])
    return status, bool(begun)


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("{}", "a directory"),
        ("{}/file/x.json", "Not a directory in"),
        ("/proc/none/x.json", "/proc"),
        ("{}/" + 250 * "x", "File name too long in"),
        ("gs://bucket/x.json", "a URL"),
        ("/dev/null", "no file"),
        ("{}/new/", "a directory"),
        ("{}/" + 215 * "x", "File name too long in"),  # while it is half-written
    ],
)
@pytest.mark.parametrize("flag", ["json", "picture", "markdown"])
def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys, flag, path, rule):
    (tmp_path / "file").write_text("content")
    assert report(path.format(tmp_path), flag) == (2, False)
    error = capsys.readouterr().err
    assert error.startswith(f"program.py: error: `{flag}` must be a file to write. Received: ")
    assert rule in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_asking_whether_json_can_be_written_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("content")
    for path in ("old.json", f"{tmp_path}/new.json", "missing/folder/x.json", ""):
        assert report(path) == (0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "content"
