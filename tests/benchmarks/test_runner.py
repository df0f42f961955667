"""The runner: ratios and intervals, tables as pages have them, the machine, the figures of the page."""

import ast
import importlib
import inspect
import re
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest
from benchmark_command import config_class

from benchmarks import runner
from bert_packed.core.command_line import run
from bert_packed.core.storage import read_json

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("evidence/results.md", "guides/leaks.md"))
TABLE = re.compile(
    r"((?:^\|.*\n)+)\n(.*; (\S+), commit ([\w+]+) \(\[JSON\]\((?:\.\./evidence/)?data/(\w+\.json)\)\)\.)",
    re.MULTILINE,
)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_benchmark_explains_itself(name, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    assert run(module.main, config_class(module), [name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert inspect.getdoc(config_class(module))[:200] in printed and "--json" in printed


def test_the_index_names_every_benchmark():
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks/__init__.py").read_text()))
    assert sorted(line.split()[0] for line in text.splitlines() if line.startswith("    ")) == sorted(
        COMMANDS
    )


def numbers_in(content):
    """All numbers of a JSON."""
    if isinstance(content, dict | list):
        return [
            one
            for part in (content.values() if isinstance(content, dict) else content)
            for one in numbers_in(part)
        ]
    return [content] if isinstance(content, int | float) else []


@pytest.mark.parametrize(("table", "origin", "date", "commit", "file"), TABLE.findall(PAGE))
def test_tables_of_the_page_are_in_their_json(table, origin, date, commit, file):
    content = read_json(str(ROOT / "docs/evidence/data" / file))
    machine = content["machine"]
    assert (date, commit) == (machine["date"], machine["commit"]) and runner.machine_name(machine) in origin
    known = {runner.shown_value(one, digits) for one in numbers_in(content["tables"]) for digits in (4, 6)}
    rows = [line.strip("|\n").split("|") for line in table.splitlines()[2:]]
    shown = [cell.strip() for row in rows for cell in row[1:] if re.fullmatch(r"[-+\d.,e]+", cell.strip())]
    assert shown and not [one for one in shown if one not in known]


def test_the_page_has_a_table_of_every_json():
    files = {path.name for path in (ROOT / "docs/evidence/data").glob("*.json")}
    assert {one[-1] for one in TABLE.findall(PAGE)} == files and len(TABLE.findall(PAGE)) > 25


def test_values_are_in_the_digits_that_count():
    values = [None, "packed", 2, 1234567, 1234.5, 0.123456, 1.5e-7]
    shown = ["", "packed", "2", "1,234,567", "1,234", "0.1235", "1.5e-07"]
    assert [runner.shown_value(one) for one in values] == shown
    assert runner.shown_value(99.74632, 6) == "99.7463"
    assert runner.markdown_table([{"way": "a", "s": 0.5}]).splitlines() == [
        "| way   | s   |",
        "|-------|-----|",
        "| a     | 0.5 |",
    ]


def test_tables_are_printed_and_written(tmp_path, capsys):
    config = runner.Settings(json=str(tmp_path / "a.json"))
    runner.show("name", config, {"one": [{"of": "a", "s": 1.23456789}], "two": []}, ["a note"])
    printed = capsys.readouterr().out
    assert printed.startswith("## one\n\n| of   | s     |") and "\na note\n" in printed
    assert re.search(r"\nMeasured on .*; \d{4}-\d\d-\d\d, commit ", printed)
    written = read_json(tmp_path / "a.json")
    assert written["tables"] == {"one": [{"of": "a", "s": 1.23456789}], "two": []}
    assert written["notes"] == ["a note"] and "python" in written["machine"]["versions"]
    assert written["settings"] == {}  # where it was written to changes no figure


def test_a_cpu_is_known_by_its_own_words(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: One CPU @ 2: GHz\n\nmodel name : two\n")
    assert runner.cpu_name(path) == "One CPU @ 2: GHz"
    path.write_text("cpu family : 25\nmodel name : AMD EPYC\nflags : fpu avx512f\n\ncpu family : 26\n")
    assert runner.cpu_name(path) == "AMD EPYC (Zen 4)"
    assert runner.cpu_name(tmp_path / "none") == "unknown"


def test_the_commit_is_that_of_the_code(tmp_path):
    assert runner.current_commit(tmp_path) == ""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "code.py").write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    commit = git("rev-parse", "HEAD")[:12]
    (tmp_path / "page.md").write_text("2")  # changes no figure
    assert runner.current_commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert runner.current_commit(tmp_path) == commit + "+"


def test_the_first_is_divided_by_the_second():
    assert runner.ratios([3.0, 8.0], [6.0, 2.0]) == [0.5, 4.0]
    row = runner.added_row([3.0, 6.0, 2.0], [2.0, 5.0, 2.0])
    assert row == {"added, %": pytest.approx(20.0), "from": None, "to": None}


# The sign test's tables have these ranks: 2 (1/2)^n times the binomials below the first rank is at most 0.05
@pytest.mark.parametrize(("count", "low", "high"), [(5, None, None), (6, 1, 6), (9, 2, 8), (40, 14, 27)])
def test_an_interval_goes_by_ranks(count, low, high):
    values = np.random.default_rng(0).permutation(np.arange(1, count + 1)).tolist()
    assert runner.median_interval(values) == (low, high)
    assert runner.median_row("x", values) == {"x": statistics.median(values), "from": low, "to": high}
