"""Figures of a row of the log: by hand, over a resumed interval; operations by a plain count."""

import dataclasses
import math

import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG

from bert_packed.architectures.bert.model import count_flops
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import CLASSIFICATION, FAMILIES, PRETRAINING
from bert_packed.objectives.pretraining import pretraining_counts
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.metrics_log import (
    STEP_FIGURES,
    TIMED_FIGURES,
    WATCHED,
    LogInterval,
    Scale,
    describe,
)

SCALE = Scale(positions_per_step=50, model_flops=lambda sums: 6.0 * sums["num_tokens"], peak_flops=1000.0)


def means(sums):
    return {"loss": sums["mlm_loss"] / sums["num_sequences"]}


def step_of(norm, num_tokens=40.0, ratios=(0.1, 0.2, 0.9)):
    figures = dict(zip(STEP_FIGURES, (norm, *ratios), strict=False))
    return {"mlm_loss": 2.0, "num_sequences": 4.0, "num_tokens": num_tokens, **figures}


def test_a_row_by_hand():
    interval = LogInterval(scale=SCALE)
    interval.add(step_of(1.0), None, 9.0)  # the first of a process: its clock does not count
    interval.add(step_of(2.0, 30.0, (0.3, 0.4, 1.1)), 4.0, 1.0)
    interval.add({**step_of(6.0, 35.0, (0.2, 0.6, 1.0)), "mlm_loss": 5.0}, 6.0, 1.5)
    interval.num_skipped = 1
    row = interval.row(7, means, 0.1)
    assert row == pytest.approx(
        {
            "step": 7,
            "loss": 9.0 / 12,
            "skipped_steps": 1,
            "learning_rate": 0.1,
            "sequences_per_second": 8 / 10,
            "tokens_per_second": (30 + 35) / 10,
            "gradient_norm": 3.0,
            "trust_ratio_min": 0.2,
            "trust_ratio_median": 0.4,
            "trust_ratio_max": 1.0,
            "packing_efficiency": (40 + 30 + 35) / 150,
            "data_wait_share": 2.5 / 10,
            "model_flop_utilisation": 6 * (30 + 35) / 10 / 1000,
        }
    )
    assert set(WATCHED) < set(row)


def test_unknown_figures_have_no_value():
    empty = LogInterval().row(1, means, 0.1)
    assert {name for name, value in empty.items() if value is not None} == {
        "step",
        "skipped_steps",
        "learning_rate",
    }
    interval = LogInterval(scale=Scale(positions_per_step=50))
    interval.add(step_of(2.0, 25.0, ()), None)  # not LAMB, not timed
    row = interval.row(1, means, 0.1)
    assert (row["gradient_norm"], row["packing_efficiency"], row["loss"]) == (2.0, 0.5, 0.5)
    assert {row[name] for name in (*TIMED_FIGURES, *STEP_FIGURES[1:], "tokens_per_second")} == {None}
    interval.add(step_of(2.0, 25.0, ()), 1.0, 0.5)
    row = interval.row(1, means, 0.1)
    assert row["data_wait_share"] == 0.5 and row["model_flop_utilisation"] is None


def test_a_line_has_what_is_known():
    interval = LogInterval(scale=SCALE)
    interval.add(step_of(0.5), 10.0, 0.1)
    row = {**interval.row(1, means, 0.1), "mlm_accuracy": 0.25, "mlm_token_accuracy": 0.5}
    assert describe(row) == "loss 0.5, mlm accuracy 25.0%, 4 tokens/s"
    row["skipped_steps"] = 3
    assert describe(row, 9000.0) == "loss 0.5, mlm accuracy 25.0%, 4 tokens/s, 2.5 h left, 3 skipped"
    assert describe(LogInterval().row(1, means, 0.1)) == "no loss"
    row |= {"loss": 123.456, "mlm_accuracy": 1.0, "tokens_per_second": 12_345_678.0, "skipped_steps": 10}
    line = describe(row, 8.64e6)
    assert line == "loss 123.5, mlm accuracy 100.0%, 12.3M tokens/s, 100 days left, 10 skipped"
    assert len("step 1,000,000/1,000,000: ") + len(line) == 100


def test_model_flops_are_those_of_the_sequences_alone():
    """Product by product, each sequence by itself and unpadded: twice the multiply-adds, three passes."""
    packed, _ = packed_and_unpacked()
    width, wide, num_layers = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_hidden_layers
    of_blocks, of_heads = 0, np.count_nonzero(packed["prediction_sequences"])
    of_heads *= width * width + width * CONFIG.vocab_size
    for row in packed["sequence_ids"]:
        for sequence in range(1, row.max() + 1):
            length = np.count_nonzero(row == sequence)
            attention = 4 * length * width**2 + 2 * length**2 * width
            of_blocks += num_layers * (attention + 2 * length * width * wide)
            of_heads += width * width + width * 2  # pooler and next sentence
    sums = {name: float(value) for name, value in pretraining_counts(packed).items()}
    assert count_flops(PRETRAINING, CONFIG, sums) == pytest.approx(6 * (of_blocks + of_heads))
    assert count_flops(CLASSIFICATION, CONFIG, sums) == pytest.approx(6 * of_blocks)


# A token's states in a block are counted; tests/objectives/test_next_tokens.py has them one by one
STATES = {
    "mamba": lambda config: 21 * config.inner_size * config.state_size,
    "mamba2": lambda config: 16 * config.inner_size * config.state_size,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_block_counts_its_weights_and_pairs(kind):
    """The kernels of a model with one block more are counted, rather than another formula."""
    family = FAMILIES[kind]
    config = dataclasses.replace(next(iter(family.sizes.values())), vocab_size=50)
    head, sums = (
        family.heads[0],
        {"num_tokens": 4.0, "num_pairs": 16.0, "num_predictions": 0.0, "num_sequences": 0.0},
    )
    kernels, flops = [], []
    for num_layers in (config.num_hidden_layers, config.num_hidden_layers + 1):
        one = dataclasses.replace(config, num_hidden_layers=num_layers)
        weights = named_weights(build_model(head, one, 0))
        kernels.append(sum(math.prod(w.shape) for name, w in weights.items() if name.endswith("kernel")))
        flops.append(family.load_models().count_flops(head, one, sums))
    pairs = 0 if config.without_attention else 12 * config.hidden_size * 16
    states = STATES[kind](config) if kind in STATES else 0
    assert flops[1] - flops[0] == 6 * (kernels[1] - kernels[0]) * 4 + pairs + 4 * states
