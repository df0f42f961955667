"""Convolution and scan in each way, other scans, and what the resets cost: shapes, gradients, told times."""

import numpy as np
import pytest
from clock import Clock
from mamba_batches import WAYS, RecordingEngine
from next_tokens import CONFIG, VOCAB_SIZE

from benchmarks import mamba_operators, reset_cost
from benchmarks.mamba_operators import BOTH, FORWARD, PASSES, operator_inputs, operator_program
from benchmarks.sequence_batches import PACKED, make_batches
from bert_packed.runs import interleaved_timing


def test_an_operator_s_speed_is_of_the_real_tokens_of_its_way(monkeypatch):
    batches = make_batches([(1, 3), (2, 2)], 4, 3, 1, 2, VOCAB_SIZE)
    monkeypatch.setattr(mamba_operators, "time_interleaved", lambda ways, _: {way: [0.5] for way in ways})
    for row in mamba_operators.measure_operators(CONFIG, batches, 3):
        real = sum(int(np.count_nonzero(batch["sequence_ids"])) for batch in batches[row["way"]].batches)
        assert row["real tokens/s"] == 2 * real


@pytest.mark.both_backends
@pytest.mark.slow
def test_operators_run_forward_and_backward_on_the_shapes_of_each_way(monkeypatch):
    batches, seen = make_batches([(1, 3), (2, 2)], 4, 3, 1, 2, VOCAB_SIZE), []

    def uncompiled(function):
        return lambda *of: seen.append((of, function(*of))) or seen[-1][1]

    monkeypatch.setattr(mamba_operators, "compiled", uncompiled)
    monkeypatch.setattr(
        mamba_operators, "time_interleaved", lambda ways, repeats: asked.append(ways) or times
    )
    asked, times = [], {way: [1.0] for way in WAYS}
    rows = mamba_operators.measure_operators(CONFIG, batches, 3)
    kinds = [(operator, which) for operator in ("convolution", "scan") for which in PASSES]
    assert [(row["operator"], row["pass"], row["way"]) for row in rows] == [
        (*kind, way) for kind in kinds for way in WAYS
    ]
    for (operator, which), ways in zip(kinds, asked, strict=True):
        for way, run_way in ways.items():
            seen.clear()
            run_way(0)
            assert len(seen) == len(batches[way].batches)
            for ((inputs, positions, weights), found), batch in zip(
                list(seen), batches[way].batches, strict=True
            ):
                assert (np.asarray(positions) == batch["position_ids"]).all()
                assert len(inputs) == {"convolution": 3, "scan": 5}[operator]
                assert found[-1].shape == inputs[0].shape == (*positions.shape, CONFIG.inner_size)
                if which == FORWARD:
                    assert len(found) == 1
                    continue
                gradients, output = found
                assert [one.shape for one in gradients] == [one.shape for one in inputs]
                # a token alone in its row carries no state, and its decay is of no consequence
                assert (
                    all(np.abs(np.asarray(g)).max() > 0 for g in gradients)
                    or np.asarray(positions).max() == 0
                )
                (forward,) = operator_program(operator, FORWARD)(inputs, positions, weights)
                assert np.allclose(output, forward)


@pytest.mark.both_backends
def test_what_has_no_resets_makes_no_selection(monkeypatch):
    """And what has them is the model and the operators as they are."""
    packs = make_batches([(1, 3), (2, 2)], 4, 3, 2, 2, VOCAB_SIZE)[PACKED].batches
    calls, made = [], []
    make = lambda config: made.append(RecordingEngine(config)) or made[-1]  # noqa: E731
    monkeypatch.setattr(reset_cost, "make_mamba_engine", make)
    monkeypatch.setattr(mamba_operators, "compiled", lambda function: function)
    where = mamba_operators.ops.where
    monkeypatch.setattr(mamba_operators.ops, "where", lambda *of: calls.append(1) or where(*of))
    ways = reset_cost.reset_ways(CONFIG, packs)
    assert list(ways) == ["step", "convolution", "scan"]
    for both in ways.values():
        assert list(both) == ["with", "without"]
    for way in ways["step"].values():
        way(0)
    assert [one.config.ablation_no_position_reset for one in made] == [False, True]
    assert [one.batches for one in made] == [packs, packs]
    for operator in ("convolution", "scan"):
        found = {}
        for way, run_way in ways[operator].items():
            calls.clear()
            run_way(0)
            found[way] = len(calls)
        assert found["with"] >= 3 and found["without"] == 0


def test_the_cost_of_resets_is_told(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleaved_timing, "time", clock)
    with_, without = [5, 2, 4, 3, 2, 2, 2], [5, 1, 2, 2, 2, 2, 1]  # the first of each is not timed
    ways = {"with": clock.taking(with_), "without": clock.taking(without)}
    monkeypatch.setattr(reset_cost, "reset_ways", lambda *of: {"step": ways} if of == (CONFIG, 9) else None)
    assert reset_cost.measure_resets(CONFIG, 9, 6) == [
        {"of": "step", "with, s": 2, "without, s": 2, "cost, %": 75, "from": 0, "to": 100, "asked": 2}
    ]


def test_variants_are_compared_with_the_chosen_one(monkeypatch):
    packs = make_batches([(32,), (30, 2)], 32, 32, 1, 1, VOCAB_SIZE)[PACKED].batches
    seen = []

    def in_turns(ways, repeats):
        seen.append((list(ways), repeats))
        return {way: [len(way[0]) * (1 if way[1] == FORWARD else 3)] * repeats for way in ways}

    monkeypatch.setattr(mamba_operators, "time_interleaved", in_turns)
    monkeypatch.setattr(mamba_operators, "scan_variants", lambda: {"abcd": 1, "abcdef": 2})
    rows = mamba_operators.measure_variants(CONFIG, packs, 6)
    assert seen == [([(name, which) for name in ("abcd", "abcdef") for which in PASSES], 6)]
    forward, both = f"{FORWARD}, us a token", f"{BOTH}, us a token"
    assert rows == [
        {"scan": "abcd", forward: 4e6 / 64, both: 12e6 / 64, "times as long": 1, "from": 1, "to": 1},
        {"scan": "abcdef", forward: 6e6 / 64, both: 18e6 / 64, "times as long": 1.5, "from": 1.5, "to": 1.5},
    ]
    inputs, positions = operator_inputs("scan", CONFIG, packs)
    assert len(inputs) == len(positions) == 2
