"""The attention report compares programs that differ in the mask alone, and its table can be read."""

import json

import numpy as np
from tiny import CONFIG

from bert_packed.reports.attention_cost import DESCRIPTION, CostConfig, main, make_inputs, make_programs
from data_gen.cli.command_line import run


def test_the_programs_differ_in_the_mask_alone():
    hidden, ids = make_inputs(CONFIG, 2, 24)
    assert [sorted(set(row)) for row in ids.tolist()] == [[0, 1, 2, 3]] * 2
    programs = make_programs(CONFIG, hidden, ids)
    for name in ("forward", "both"):
        assert np.abs(programs[name, True]() - programs[name, False]()).max() > 1e-3
    # One sequence a row: the mask hides nothing
    programs = make_programs(CONFIG, hidden, np.ones_like(ids))
    for name in ("forward", "both"):
        np.testing.assert_allclose(programs[name, True](), programs[name, False](), atol=1e-5)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "cost.json"
    flags = ["--models=bert-tiny", "--batch_size=1", "--max_seq_length=16", "--repeats=2", f"--json={path}"]
    assert run(main, CostConfig, DESCRIPTION, ["attention_cost", *flags]) == 0
    rows = json.loads(path.read_text())
    assert [(row["model"], row["pass"]) for row in rows] == [("bert-tiny", "forward"), ("bert-tiny", "both")]
    assert all(row["with_mask_ms"] > 0 and row["without_ms"] > 0 for row in rows)
    assert run(main, CostConfig, DESCRIPTION, ["attention_cost", "--models=bert-huge"]) == 2
    assert "`models` must be of bert-tiny" in capsys.readouterr().err
