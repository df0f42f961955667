"""Sizes of folders stay within `budget.toml`, and no file is longer than a reader takes at once."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGET = tomllib.loads((ROOT / "budget.toml").read_text())
TOPS = {"product": ("bert_packed", "data_gen"), "benchmarks": ("benchmarks",), "tests": ("tests",)}
LONGEST = 400
# Records and pages that programs write are no prose to read
NOT_COUNTED = ("docs/notebook", "docs/reference/flags.md")


def lines(path):
    return len(path.read_text().splitlines())


def folder_of(path):
    """The row of a file: its folder, one level below the top at most."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


def sizes(kind):
    """Lines by row of the budget: dict."""
    files = [path for top in TOPS[kind] for path in (ROOT / top).rglob("*.py")]
    if kind == "product":
        files += [*ROOT.glob("run_*.py"), ROOT / "setup.py"]
    found = {}
    for path in files:
        row = folder_of(path) or "top"
        found[row] = found.get(row, 0) + lines(path)
    return found


@pytest.mark.parametrize("kind", TOPS)
def test_folders_keep_their_budget(kind):
    assert sizes(kind).keys() == BUDGET[kind].keys()
    over = {row: number for row, number in sizes(kind).items() if number > BUDGET[kind][row]}
    assert not over, f"more lines than budget.toml has: {over}"


def test_pages_keep_their_budget():
    pages = [path for path in (ROOT / "docs").rglob("*.md")]
    pages = [path for path in pages if not str(path.relative_to(ROOT)).startswith(NOT_COUNTED)]
    assert sum(map(lines, pages)) <= BUDGET["docs"]["pages"]


def test_files_are_short():
    files = [path for tops in TOPS.values() for top in tops for path in (ROOT / top).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): number for path in files if (number := lines(path)) > LONGEST}
    assert not found.keys() - BUDGET["longer_files"].keys(), found
    assert all(number <= BUDGET["longer_files"].get(name, 0) for name, number in found.items())
