"""The attention report: programs that differ in the mask alone, times by a clock that is told, the table."""

import json

import numpy as np
import pytest
from clock import Clock
from tiny import CONFIG

from benchmarks import attention_cost
from benchmarks.attention_cost import DESCRIPTION, CostConfig, main, make_inputs, make_programs
from bert_packed.config import MODEL_SIZES
from bert_packed.core.command_line import run
from bert_packed.training.engines import functional


@pytest.fixture
def uncompiled(monkeypatch):
    """Tiny programs compile for longer than they run."""
    monkeypatch.setattr(functional, "compiled", lambda function, _: function)


def test_inputs_are_three_sequences_and_padding():
    hidden, ids = make_inputs(CONFIG, 2, 20)
    assert hidden.shape == (2, 20, 16) and hidden.dtype == np.float32
    assert ids.tolist() == [[1] * 10 + [2] * 6 + [3] * 3 + [0]] * 2


def test_the_programs_differ_in_the_mask_alone(uncompiled):
    """What a sequence gets changes with its neighbours where there is no mask; with it, not by a bit."""
    hidden, ids = make_inputs(CONFIG, 2, 24)
    others = np.where((ids == 1)[..., None], hidden, hidden[::-1, ::-1])
    before, after = (make_programs(CONFIG, values, ids) for values in (hidden, others))
    for name in ("forward", "both"):
        for has_mask in (True, False):
            moved = np.abs(before[name, has_mask]() - after[name, has_mask]())[ids == 1].max()
            assert moved == 0 if has_mask else moved > 1e-2, (name, has_mask)
    # One sequence a row: the mask hides nothing
    programs = make_programs(CONFIG, hidden, np.ones_like(ids))
    for name in ("forward", "both"):
        np.testing.assert_allclose(programs[name, True](), programs[name, False](), atol=1e-5)


def test_both_goes_backward(uncompiled):
    """Along a direction the gradient is how the weighted sum of what `forward` gives changes."""
    hidden, ids = make_inputs(CONFIG, 1, 12)
    weights = np.random.default_rng(1).normal(size=hidden.shape).astype(np.float32)
    direction = np.random.default_rng(2).normal(size=hidden.shape).astype(np.float32)
    step = 1e-2
    sums = [
        (make_programs(CONFIG, hidden + sign * step * direction, ids)["forward", True]() * weights).sum()
        for sign in (1, -1)
    ]
    found = (make_programs(CONFIG, hidden, ids)["both", True]() * direction).sum()
    assert found == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-2)


def test_times_become_medians_in_milliseconds(monkeypatch):
    clock = Clock()
    # the first call compiles
    seconds = {
        ("forward", True): [100, 0.004, 0.009, 0.005],
        ("both", True): [100, 0.012, 0.016, 0.012],
        ("forward", False): [100, 0.002, 0.004, 0.004],
        ("both", False): [100, 0.010, 0.010, 0.020],
    }
    monkeypatch.setattr(attention_cost, "time", clock)
    monkeypatch.setattr(
        attention_cost, "make_programs", lambda *_: {name: clock.taking(s) for name, s in seconds.items()}
    )
    forward, both = attention_cost.measure(CONFIG, 1, 8, repeats=3)
    assert forward == {
        "pass": "forward",
        "with_mask_ms": pytest.approx(5),
        "without_ms": pytest.approx(4),
        # differences 2, 5 and 1 ms
        "mask_ms": pytest.approx(2),
        "mask_percent": pytest.approx(50),
    }
    assert both == {
        "pass": "both",
        "with_mask_ms": pytest.approx(12),
        "without_ms": pytest.approx(10),
        "mask_ms": pytest.approx(2),
        "mask_percent": pytest.approx(20),
    }


def test_the_command(monkeypatch, tmp_path, capsys):
    path, asked = tmp_path / "cost.json", []

    def measure(*arguments):
        asked.append(arguments)
        return [{"pass": "forward", "mask_ms": 1.0 * len(asked)}]

    monkeypatch.setattr(attention_cost, "measure", measure)
    flags = ["--models=bert-tiny,bert-mini", "--batch_size=3", "--max_seq_length=16", "--repeats=2"]
    assert run(main, CostConfig, DESCRIPTION, ["attention_cost", *flags, f"--json={path}"]) == 0
    assert asked == [(MODEL_SIZES[name], 3, 16, 2) for name in ("bert-tiny", "bert-mini")]
    rows = json.loads(path.read_text())
    assert [(row["model"], row["mask_ms"]) for row in rows] == [("bert-tiny", 1.0), ("bert-mini", 2.0)]
    assert run(main, CostConfig, DESCRIPTION, ["attention_cost", "--models=bert-huge"]) == 2
    assert "`models` must be of bert-tiny" in capsys.readouterr().err
