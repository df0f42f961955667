"""Reports on speed: the cost formula against a plain count, and the comparison's arithmetic."""

import pytest

from bert_packed.config import ModelConfig
from bert_packed.runs.packed_vs_unpacked import Contender, compare
from bert_packed.runs.step_cost import describe, estimate_step_seconds, matmul_flops
from data_gen.schema import PackSpec


def test_flops_of_a_step():
    config = ModelConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    spec = PackSpec(16, 3, 5)
    # multiply-adds of one pack, layer by layer
    per_block = [16 * 8 * 8] * 4 + [16 * 16 * 8] * 2 + [16 * 8 * 32] * 2
    head = [5 * 8 * 8, 5 * 8 * 11]
    assert matmul_flops(config, spec, batch_size=4) == 3 * 2 * 4 * (2 * sum(per_block) + sum(head))
    assert estimate_step_seconds(config, spec, 4) > 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.034, "0.034 s"), (3.21, "3.2 s"), (150, "2.5 min"), (18000, "5 h"), (4e6, "46 days")],
)
def test_durations_for_people(seconds, text):
    assert describe(seconds) == text


def test_comparison_reports_the_ratio_of_sequences_per_second():
    calls = []

    def contender(name, factor):
        def take(batch):
            calls.append((name, batch))
            return {"num_sequences": 1.0}

        return Contender(name, take, [0, 1], 4 * factor, factor)

    rows = compare([contender("unpacked", 1.0), contender("packed", 2.0)], num_repeats=3)
    assert [row["data"] for row in rows] == ["unpacked", "packed"]
    # one step each to compile, then in turns
    names, turns = ["unpacked", "packed"], [(0, 1), (0, 1), (1, -1), (0, 1)]
    assert calls == [(name, batch) for batch, order in turns for name in names[::order]]
    for row in rows:
        expected = 4 * row["packing_factor"] / row["seconds_per_step"]
        assert row["sequences_per_second"] == pytest.approx(expected)
    expected = rows[1]["sequences_per_second"] / rows[0]["sequences_per_second"]
    assert (rows[0]["speed_up"], rows[1]["speed_up"]) == (1, pytest.approx(expected))
