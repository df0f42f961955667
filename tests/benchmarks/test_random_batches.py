"""Random batches hold sequences of the lengths asked for, as packed records hold them."""

import dataclasses

import numpy as np
import pytest
from tiny import CONFIG

from benchmarks.random_batches import (
    count_predictions,
    draw_lengths,
    draw_packs,
    random_batch,
    spec_of_plan,
    spec_of_rows,
)
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.schema import PackSpec

PACKS = [(5, 9, 10), (24,), (3, 4)]


def make_batch():
    return random_batch(PACKS, PackSpec(24, 3, 5), 24, CONFIG.vocab_size, np.random.default_rng(0))


def test_sequences_have_their_lengths_places_and_predictions():
    batch = make_batch()
    for row, pack in enumerate(PACKS):
        slots = np.repeat(np.arange(1, len(pack) + 1), pack)
        padding = np.zeros(24 - len(slots), int)
        np.testing.assert_array_equal(batch["sequence_ids"][row], [*slots, *padding])
        positions = np.concatenate([np.arange(length) for length in pack])
        np.testing.assert_array_equal(batch["position_ids"][row], [*positions, *padding])
        owners = batch["prediction_sequences"][row].astype(int)
        used = owners > 0
        expected = count_predictions(pack, 24)
        np.testing.assert_array_equal(np.bincount(owners[used])[1:], expected)
        places = batch["prediction_positions"][row][used]
        np.testing.assert_array_equal(batch["sequence_ids"][row][places], owners[used])
        assert len(set(places.tolist())) == used.sum()
        assert batch["slot_weights"][row].tolist() == [1.0] * len(pack) + [0.0] * (3 - len(pack))
    assert count_predictions([3, 20, 24, 512], 512).tolist() == [1, 3, 4, 76]


def test_ids_fit_the_model_and_it_computes_a_finite_loss():
    batch = make_batch()
    objective = pretraining_objective("per_sequence")
    model = objective.build_model(dataclasses.replace(CONFIG, num_hidden_layers=1), seed=0)
    for values in (batch["token_ids"], batch["prediction_ids"]):
        assert values.max() < CONFIG.vocab_size
    sums = objective.sums(model(batch, training=False), batch)
    assert np.isfinite(float(sums["mlm_loss"])) and float(sums["num_sequences"]) == 6
    assert set(batch) == {feature.name for feature in objective.features}


def test_packs_and_lengths_are_drawn_as_often_as_they_are():
    histogram = np.zeros(24, np.int64)
    histogram[[4, 11, 23]] = 60, 30, 10
    plan = ALGORITHMS["spfhp"](histogram, 24, 3)
    rng = np.random.default_rng(0)
    packs = draw_packs(plan, 4000, rng)
    assert np.mean([len(pack) for pack in packs]) == pytest.approx(plan.packing_factor, rel=0.03)
    assert set(packs) == set(plan.strategies)
    lengths = draw_lengths(histogram, 4000, rng)
    assert np.bincount(lengths)[[5, 12, 24]] / 4000 == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    spec = spec_of_plan(plan)
    random_batch(packs[:50], spec, 24, 31, rng)  # all fit
    assert spec.max_sequences_per_pack == plan.depth == 3
    smaller = dataclasses.replace(spec, max_predictions_per_pack=spec.max_predictions_per_pack - 1)
    with pytest.raises(ValueError):
        random_batch(list(plan.strategies), smaller, 24, 31, rng)


def test_rows_have_room_for_the_predictions_of_every_sequence_that_fits():
    """At 384 tokens the most that data of that length have, 56, are too few for data of length 512."""
    assert spec_of_rows(384, 512) == PackSpec(384, 1, 58) and spec_of_rows(384, 384) == PackSpec(384, 1, 56)
    assert spec_of_rows(np.int64(3), 512) == PackSpec(3, 1, 1)
    rng = np.random.default_rng(0)
    for length in (377, 384):
        batch = random_batch([(length,)], spec_of_rows(384, 512), 512, CONFIG.vocab_size, rng)
        assert (batch["prediction_sequences"] > 0).sum() == round(0.15 * length)
