"""Results are printed and written with their machine; every benchmark explains itself."""

import ast
import importlib
import subprocess
from pathlib import Path

import pytest
from benchmark_command import config_class

from benchmarks import results
from bert_packed.core.command_line import run
from bert_packed.core.storage import read_json

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]
COMMANDS.remove("results_page")  # measures nothing


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_explains_itself(name, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    assert run(module.main, config_class(module), [name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert module.DESCRIPTION.strip()[:200] in printed and "--json" in printed


def test_the_index_names_every_benchmark():
    text = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text()))
    assert [line.split()[0] for line in text.splitlines() if line.startswith("    ")] == sorted(
        COMMANDS, key=lambda name: text.index(f"    {name} ")
    )


def test_a_cpu_is_known_by_its_own_words(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: One CPU @ 2: GHz\n\nmodel name : two\n")
    assert results.cpu_name(path) == "One CPU @ 2: GHz"
    path.write_text("cpu family : 25\nmodel name : AMD EPYC\nflags : fpu avx512f\n\ncpu family : 26\n")
    assert results.cpu_name(path) == "AMD EPYC (Zen 4)"
    assert results.cpu_name(tmp_path / "none") == "unknown"


def test_the_commit_is_that_of_the_code(tmp_path):
    assert results.current_commit(tmp_path) == ""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    for name in ("code.py", "page.md"):
        (tmp_path / name).write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    commit = git("rev-parse", "HEAD")[:12]
    (tmp_path / "page.md").write_text("2")  # changes no figure
    assert results.current_commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert results.current_commit(tmp_path) == commit + "+"


def test_tables_are_printed_and_written(tmp_path, capsys):
    config = results.Settings(json=str(tmp_path / "a.json"))
    results.show("name", config, {"one": [{"of": "a", "s": 1.23456789}], "two": []}, ["a note"])
    printed = capsys.readouterr().out
    assert printed.startswith("CPU: ") and "\none\n" in printed and "1.23457" in printed
    assert printed.endswith("\na note\n")
    written = read_json(tmp_path / "a.json")
    assert written["tables"] == {"one": [{"of": "a", "s": 1.23456789}], "two": []}
    assert written["notes"] == ["a note"] and "python" in written["machine"]["versions"]
    assert written["machine"]["date"] and "commit" in written["machine"]
    assert written["settings"] == {}  # where it was written to changes no figure
