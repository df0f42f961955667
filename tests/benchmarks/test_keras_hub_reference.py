"""KerasHub's BERT with our weights computes our loss; every tensor has its place."""

import dataclasses

import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG

from benchmarks import keras_hub_reference, training_ways
from bert_packed.core.settings import InputError
from bert_packed.objectives.pretraining import masked_lm_objective
from bert_packed.training.engines.variables import named_weights


def test_arguments_say_what_is_to_be_predicted_and_what_counts():
    _, batch = packed_and_unpacked()
    inputs, labels, weights = keras_hub_reference.arguments_of(batch)
    np.testing.assert_array_equal(inputs["token_ids"], batch["token_ids"])
    np.testing.assert_array_equal(inputs["segment_ids"], batch["token_type_ids"])
    np.testing.assert_array_equal(inputs["padding_mask"], (batch["token_ids"] > 0).astype(int))
    np.testing.assert_array_equal(inputs["mask_positions"], batch["prediction_positions"])
    np.testing.assert_array_equal(labels, batch["prediction_ids"])
    np.testing.assert_array_equal(weights, (batch["prediction_ids"] > 0).astype(np.float32))
    assert len(inputs) == 4 and 0 < weights.mean() < 1


def test_every_tensor_of_a_block_has_a_name_here():
    names = keras_hub_reference.our_name
    assert names("transformer_layer_1/self_attention_layer/attention_output/kernel") == (
        "bert/layer_1/attention/output/kernel"
    )
    assert names("transformer_layer_0/feedforward_layer_norm/beta") == (
        "bert/layer_0/feed_forward/LayerNorm/beta"
    )
    assert names("position_embedding/embeddings") == "bert/embeddings/position_embeddings"
    assert names("mlm_head/output_bias") == "predictions/output_bias"


@pytest.fixture(scope="module")
def models():
    """Ours, with GELU as theirs and weights that no two tensors share, and KerasHub's copy of it."""
    pytest.importorskip("keras_hub")
    objective = masked_lm_objective("per_token")
    config = dataclasses.replace(CONFIG, hidden_act="gelu_new", hidden_dropout_prob=0.0)
    model = objective.build_model(config, seed=3)
    rng = np.random.default_rng(0)
    for weight in named_weights(model).values():  # biases and norms too
        weight.assign(rng.normal(0.2, 0.4, weight.shape))
    return objective, model, keras_hub_reference.copy_model(config, named_weights(model))


def test_its_encoder_is_ours(models):
    _, model, theirs = models
    _, batch = packed_and_unpacked()
    inputs, _, _ = keras_hub_reference.arguments_of(batch)
    inputs.pop("mask_positions")
    states = np.array(theirs.backbone(inputs)["sequence_output"])
    is_token = batch["sequence_ids"] > 0
    np.testing.assert_allclose(states[is_token], np.array(model.encode(batch))[is_token], atol=1e-4)


def test_its_loss_is_ours_and_a_step_lowers_it(models):
    objective, model, theirs = models
    _, batch = packed_and_unpacked()
    training = keras_hub_reference.KerasHubTraining(theirs, 0.01, 0.0, 1.0)
    found = training.loss(batch)
    training_ways.check_loss("keras-hub", objective, model, batch, found, 1e-3)
    with pytest.raises(InputError, match="`reference`, keras-hub, must compute our loss"):
        training_ways.check_loss("keras-hub", objective, model, batch, 1.01 * found, 1e-3)
    losses = [training.step(batch) for _ in range(8)]
    assert losses[0] == pytest.approx(found, rel=1e-4) and losses[-1] < 0.9 * losses[0]


def test_a_way_steps_through_its_batches(models):
    _, batch = packed_and_unpacked()
    ways = training_ways.keras_hub_ways(CONFIG, {"peer": [batch]})
    losses = [ways["peer"](repeat) for repeat in range(3)]
    assert losses[2] < losses[0] < 2 * np.log(CONFIG.vocab_size)
