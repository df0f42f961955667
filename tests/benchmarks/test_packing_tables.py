"""The packing tables notice what differs from the papers, and only that."""

import numpy as np
import pytest
from benchmark_command import tables_of

from benchmarks import packing_speed, packing_tables
from benchmarks.packing_figures import GLUE, KNOWN_DIFFERENCES, LPFHP, PRINTED, WIKIPEDIA, Known, Printed
from benchmarks.packing_tables import compare_with_papers, exit_status

QUICK = [
    row for row in PRINTED if row.algorithm in ("none", "spfhp", "lpfhp") and row.histogram != "glue_qqp"
]


def test_all_deterministic_rows_are_reproduced():
    tables, reasons = compare_with_papers(QUICK)
    verdicts = {
        (table, row["algorithm"], row["depth limit"]): row for table, rows in tables.items() for row in rows
    }
    assert exit_status(tables) == 0
    assert verdicts[WIKIPEDIA, "spfhp", "3"]["against the paper"] == "equal (3)"
    assert verdicts[WIKIPEDIA, "none", "1"]["against the paper"] == "equal (4)"
    assert verdicts[WIKIPEDIA, "spfhp", "max"]["against the paper"] == "packs_millions (paper: 8.168) [1]"
    assert verdicts[LPFHP, "lpfhp", "max"]["packs"] == 8_138_483
    assert len(reasons) == 1
    assert sum(row["against the paper"] == "equal (6)" for row in tables[GLUE]) == 6


WNLI = Printed("a table", "glue_wnli", 128, "spfhp", "max", {"packs": "193", "depth": "6"})


@pytest.mark.parametrize(
    "known, verdict",
    [
        (None, "packs: DIFFERS from the paper's 193"),
        (Known("older", "192"), "packs (paper: 193) [1]"),
        (Known("older", "194", within=2), "packs (paper: 193) [1]"),
        (Known("older", "191"), "packs: 192 DIFFERS from the paper's 193 and from ours, 191"),
        (Known("older", "195", within=2), "packs: 192 DIFFERS from the paper's 193 and from ours, 195"),
    ],
)
def test_a_known_difference_explains_one_figure_only(monkeypatch, known, verdict):
    differences = {"packs": known} if known else {}
    monkeypatch.setitem(KNOWN_DIFFERENCES, ("a table", "spfhp", "max", ()), differences)
    tables, _ = compare_with_papers([WNLI])
    assert [row["against the paper"] for row in tables["a table"]] == [verdict]
    right = {"against the paper": "equal (3)"}
    assert exit_status({"before": [right], **tables}) == int("DIFFERS" in verdict)


def test_every_known_difference_belongs_to_a_printed_figure():
    printed = {(r.table, r.algorithm, r.depth, tuple(r.options.items())): r.figures for r in PRINTED}
    for row, reasons in KNOWN_DIFFERENCES.items():
        assert set(reasons) <= set(printed[row]), row


def test_rows_of_column_generation_carry_their_proof(monkeypatch):
    monkeypatch.setattr(packing_tables, "EXTRA", [])
    rows = packing_tables.cghp_rows()
    assert {row["algorithm"] for row in rows} == {"cghp"} and len(rows) == 6
    (row,) = [row for row in rows if row["data"] == "glue_cola"]
    assert row["packs"] == 757 and row["against the paper"] == "at least 757 packs, gap 0.0e+00 (material)"


def test_the_published_formulation_places_every_sequence():
    histogram = np.random.default_rng(0).integers(1, 99, 24)
    mix = packing_speed.mix_by_dense_nnls(histogram, 24, 3)
    slots = np.zeros(24, int)
    for pack, count in mix:
        assert sum(pack) == 24
        for slot in pack:
            slots[slot - 1] += count
    assert (slots >= histogram).all()
    assert packing_speed.articles().sum() == 10**9


def test_a_missed_figure_fails_the_benchmark(monkeypatch, tmp_path):
    """Each figure is met up to the most that is wanted."""
    met, missed = packing_speed._row("a", "s", 2.0, 2.0), packing_speed._row("b", "s", 2.1, 2.0)
    assert (met["met"], missed["met"]) == (True, False)
    for rows, status in (([met, met], 0), ([met, missed], 1)):
        monkeypatch.setattr(packing_speed, "measure", lambda repeats, rows=rows: rows)
        assert tables_of("packing_speed", tmp_path, (status,))["packing"] == rows
