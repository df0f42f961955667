"""Every table and figure of the packing papers has a row in evidence/paper.md, with a command that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/evidence/paper.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| Efficient"))
]
# The last table and figure of each paper have these numbers in print
LAST = {"Efficient": {"Table": 6, "Figure": 14}, "Packing": {"Table": 5, "Figure": 12}}


def named(cell):
    """Set of (kind, number) that a cell names: `Figures 1, 9, Section E` -> Figure 1, Figure 9."""
    found, kind = set(), ""
    for word in re.findall(r"[A-Za-z.]*\d+|[A-Z]\b|[A-Za-z]+", cell):
        if word.isdecimal():
            found.add((kind, int(word)))
        elif not word[-1].isdecimal():
            kind = word.removesuffix("s")
    return found


def test_tables_and_figures_are_parsed_from_a_cell():
    assert named("Figures 5, 6, Section E") == {("Figure", 5), ("Figure", 6)}
    assert named("Table 6, Figure 12") == {("Table", 6), ("Figure", 12)}
    assert named("Section F.5") == set()
    assert named("") == set()


@pytest.mark.parametrize("column", [0, 1])
def test_every_table_and_figure_has_a_row(column):
    paper = list(LAST)[column]
    there = set().union(*(named(row[column]) for row in ROWS))
    assert there == {(kind, n) for kind, last in LAST[paper].items() for n in range(1, last + 1)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}"[:60])
def test_the_command_of_a_row_exists(row):
    assert len(row) == 7
    if not row[3]:
        is_removed = re.search(rf"^{row[6]}\. (.(?!\n\d\.))*since\s+removed", PAGE, re.MULTILINE | re.DOTALL)
        assert row[5] in ("not drawn", "nothing measured") or is_removed
        return
    command, *flags = re.fullmatch(r"`([^`]+)`", row[3])[1].split()
    tree = ast.parse((ROOT / "benchmarks" / f"{command}.py").read_text())
    fields = {
        statement.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    assert any("__main__" in ast.dump(node) for node in tree.body)
    assert {flag.removeprefix("--").partition("=")[0] for flag in flags} <= fields
