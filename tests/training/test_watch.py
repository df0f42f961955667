"""Figures that people watch: by hand, over a resumed interval; operations by a plain count."""

import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG

from bert_packed.config import CLASSIFICATION, PRETRAINING
from bert_packed.models.heads import count_flops
from bert_packed.objectives.objective import count_sequences
from bert_packed.objectives.pretraining import pretraining_counts
from bert_packed.training.watch import (
    STEP_FIGURES,
    TIMED_FIGURES,
    WATCHED,
    Scale,
    Watch,
    describe,
)

SCALE = Scale(positions_per_step=50, model_flops=lambda sums: 6.0 * sums["num_tokens"], peak_flops=1000.0)


def step_of(norm, num_tokens=40.0, ratios=(0.1, 0.2, 0.9)):
    figures = dict(zip(STEP_FIGURES, (norm, *ratios), strict=True))
    return {"mlm_loss": 1.0, "num_tokens": num_tokens, **figures}


def test_a_row_by_hand():
    watched = Watch(SCALE)
    watched.add(step_of(1.0), None, 9.0)  # the first of a process: its clock does not count
    watched.add(step_of(2.0, 30.0, (0.3, 0.4, 1.1)), 4.0, 1.0)
    watched.add(step_of(6.0, 35.0, (0.2, 0.6, 1.0)), 6.0, 1.5)
    assert watched.row() == pytest.approx(
        {
            "gradient_norm": 3.0,
            "trust_ratio_min": 0.2,
            "trust_ratio_median": 0.4,
            "trust_ratio_max": 1.0,
            "packing_efficiency": (40 + 30 + 35) / 150,
            "data_wait_share": 2.5 / 10,
            "model_flop_utilisation": 6 * (30 + 35) / 10 / 1000,
        }
    )
    assert set(watched.row()) == set(WATCHED)


def test_what_is_not_known_has_no_value():
    assert set(Watch().row().values()) == {None}
    watched = Watch(Scale(positions_per_step=50))
    watched.add({"num_tokens": 25.0, "gradient_norm": 2.0}, None, 0.0)  # not LAMB, not timed
    row = watched.row()
    assert {name for name, value in row.items() if value is not None} == {
        "gradient_norm",
        "packing_efficiency",
    }
    watched.add({"num_tokens": 25.0, "gradient_norm": 2.0}, 1.0, 0.5)
    assert watched.row()["data_wait_share"] == 0.5 and watched.row()["model_flop_utilisation"] is None


def test_an_interval_goes_on_after_a_checkpoint():
    steps = [step_of(float(number), 10.0 * number) for number in range(1, 5)]
    whole, first = Watch(SCALE), Watch(SCALE)
    for number, sums in enumerate(steps):
        whole.add(sums, 1.0, 0.0)
        if number < 2:
            first.add(sums, 1.0, 0.0)
    second = Watch(SCALE, dict(first.totals))
    for sums in steps[2:]:
        second.add(sums, 1.0, 0.0)
    exact = [name for name in WATCHED if name not in TIMED_FIGURES]
    assert {name: second.row()[name] for name in exact} == {name: whole.row()[name] for name in exact}


def test_the_bar_shows_what_is_known():
    watched = Watch(SCALE)
    watched.add(step_of(0.5), 10.0, 0.1)
    assert describe(watched.row()) == " |g| 0.5 trust 0.1/0.2/0.9 packed 80.0% wait 1.0% MFU 2.4%"
    assert describe(Watch().row()) == describe({}) == ""


@pytest.mark.both_backends
def test_pairs_of_tokens_of_one_sequence():
    packed, unpacked = packed_and_unpacked()
    lengths = [
        np.count_nonzero(row == sequence)
        for row in packed["sequence_ids"]
        for sequence in range(1, row.max() + 1)
    ]
    assert max(packed["sequence_ids"].max(axis=1)) > 1  # several to a pack
    for batch in (packed, unpacked):  # packing adds none
        assert float(count_sequences(batch)["num_pairs"]) == sum(length**2 for length in lengths)
    batch = {"sequence_ids": np.array([[1, 1, 1, 2, 2, 0]], np.int32), "slot_weights": np.ones((1, 4))}
    assert float(count_sequences(batch)["num_pairs"]) == 9 + 4


def test_model_flops_are_those_of_the_sequences_alone():
    """Product by product, each sequence by itself and unpadded: twice the multiply-adds, three passes."""
    packed, _ = packed_and_unpacked()
    width, wide = CONFIG.hidden_size, CONFIG.intermediate_size
    want_of_blocks, want = 0, 0
    for row in packed["sequence_ids"]:
        for sequence in range(1, row.max() + 1):
            length = np.count_nonzero(row == sequence)
            projections = 4 * (length * width * width)
            attention = (length * length * width) + (length * length * width)
            feed_forward = length * width * wide + length * wide * width
            want_of_blocks += CONFIG.num_hidden_layers * (projections + attention + feed_forward)
            want += width * width + width * 2  # pooler and next sentence
    num_predictions = np.count_nonzero(packed["prediction_sequences"])
    want += want_of_blocks
    want += num_predictions * (width * width + width * CONFIG.vocab_size)
    sums = {name: float(value) for name, value in pretraining_counts(packed).items()}
    assert count_flops(PRETRAINING, CONFIG, sums) == pytest.approx(3 * 2 * want)
    # PaLM's 6 N a token, where attention and heads are left out
    blocks = {**dict.fromkeys(sums, 0.0), "num_tokens": 1.0}
    num_weights = CONFIG.num_hidden_layers * (4 * width**2 + 2 * width * wide)
    assert count_flops(PRETRAINING, CONFIG, blocks) == 6 * num_weights
    assert count_flops(CLASSIFICATION, CONFIG, sums) == pytest.approx(3 * 2 * want_of_blocks)
