"""Outputs of the models against a BERT in NumPy, one sequence after the other; every dropout layer drops.

Legend: L tokens of a sequence, D model width, N heads.
"""

import dataclasses
import functools

import numpy as np
import pytest
from packs import packed_and_unpacked
from scipy.special import erf, softmax
from tiny import CONFIG

from bert_packed.config import CLASSIFICATION, PRETRAINING, QUESTION_ANSWERING
from bert_packed.models.dropout import Dropout, keep_mask
from bert_packed.models.packed_model import build_model
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
BUILDERS = {
    "pretraining": functools.partial(build_model, PRETRAINING),
    "answers": functools.partial(build_model, QUESTION_ANSWERING),
    "classes": functools.partial(build_model, CLASSIFICATION, num_outputs=3),
}

# Of what is pooled: the head's name and its output's
HEADS = {"pretraining": ("next_sentence", "nsp_logits"), "classes": ("classification", "logits")}


def random_weights(model):
    """Give every weight random values, biases and norms too; returns them as float64."""
    rng = np.random.default_rng(0)
    for name, weight in named_weights(model).items():
        # Too small to matter in a sum, a bias could be left out unseen
        weight.assign(rng.normal(1.0 if name.endswith("gamma") else 0.0, 0.3, weight.shape))
    return {name: weight.numpy().astype(np.float64) for name, weight in named_weights(model).items()}


def linear(weights, name, x):
    return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]


def norm(weights, name, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + CONFIG.layer_norm_eps)
    return scaled * weights[f"{name}/LayerNorm/gamma"] + weights[f"{name}/LayerNorm/beta"]


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def numpy_bert(weights, tokens, token_types, drop=lambda layer, head, shares: shares):
    """Hidden states `[L, D]` of one sequence; `drop` makes of a head's shares `[L, L]` those that count."""
    tables = {
        name: weights[f"bert/embeddings/{name}"]
        for name in ("word_embeddings", "token_type_embeddings", "position_embeddings")
    }
    x = tables["word_embeddings"][tokens] + tables["token_type_embeddings"][token_types]
    x = norm(weights, "bert/embeddings", x + tables["position_embeddings"][: len(tokens)])
    width = CONFIG.hidden_size // CONFIG.num_attention_heads
    for layer in range(CONFIG.num_hidden_layers):
        name = f"bert/layer_{layer}"
        query, key, value = (
            linear(weights, f"{name}/attention/{part}", x) for part in ("query", "key", "value")
        )
        heads = []
        for head in range(CONFIG.num_attention_heads):
            own = slice(head * width, (head + 1) * width)
            shares = softmax(query[:, own] @ key[:, own].T / np.sqrt(width), axis=-1)
            heads.append(drop(layer, head, shares) @ value[:, own])
        attended = linear(weights, f"{name}/attention/output", np.concatenate(heads, axis=-1))
        x = norm(weights, f"{name}/attention", x + attended)
        inner = gelu(linear(weights, f"{name}/feed_forward/intermediate", x))
        x = norm(weights, f"{name}/feed_forward", x + linear(weights, f"{name}/feed_forward/output", inner))
    return x


def assert_near(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(initial=1.0))


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_output_is_that_of_the_sequence_alone_in_numpy(kind):
    packed, _ = packed_and_unpacked()
    model = BUILDERS[kind](CONFIG, seed=1)
    weights = random_weights(model)
    outputs = {name: np.asarray(values) for name, values in model(packed).items()}
    num_predictions = 0
    for row, slot in np.argwhere(packed["slot_weights"] > 0):
        mine = np.flatnonzero(packed["sequence_ids"][row] == slot + 1)
        hidden = numpy_bert(weights, packed["token_ids"][row, mine], packed["token_type_ids"][row, mine])
        if kind == "answers":
            want = linear(weights, "question_answering/output", hidden)
            assert_near(outputs["start_logits"][row, mine], want[:, 0])
            assert_near(outputs["end_logits"][row, mine], want[:, 1])
            continue
        head, output = HEADS[kind]
        pooled = np.tanh(linear(weights, f"{head}/pooler", hidden[0]))
        assert_near(outputs[output][row, slot], linear(weights, f"{head}/classifier", pooled))
        if kind == "pretraining":
            chosen = np.flatnonzero(packed["prediction_sequences"][row] == slot + 1)
            places = packed["prediction_positions"][row, chosen] - mine[0]
            x = norm(weights, "predictions", gelu(linear(weights, "predictions/transform", hidden[places])))
            want = x @ weights["bert/embeddings/word_embeddings"].T + weights["predictions/output_bias"]
            assert_near(outputs["mlm_logits"][row, chosen], want)
            num_predictions += len(chosen)
    assert kind != "pretraining" or num_predictions == np.count_nonzero(packed["prediction_sequences"]) > 11


def test_shares_of_attention_are_dropped_and_the_others_not_divided_anew():
    packed, _ = packed_and_unpacked()
    rate, length = 0.4, packed["token_ids"].shape[1]
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=rate)
    model = build_model(PRETRAINING, config, seed=1)
    weights, masks = random_weights(model), []
    for number, block in enumerate(model.bert.blocks):
        block.attention.attention_dropout.given_seed = seed = np.array([number, 7], np.uint32)
        shape = len(packed["token_ids"]), CONFIG.num_attention_heads, length, length
        masks.append(np.asarray(keep_mask(shape, rate, seed)))
    found = np.asarray(model.encode(packed, training=True))
    for row, slot in np.argwhere(packed["slot_weights"] > 0):
        mine = np.flatnonzero(packed["sequence_ids"][row] == slot + 1)

        def drop(layer, head, shares, row=row, mine=mine):
            return shares * masks[layer][row, head][np.ix_(mine, mine)] / (1 - rate)

        tokens, types = packed["token_ids"][row, mine], packed["token_type_ids"][row, mine]
        assert_near(found[row, mine], numpy_bert(weights, tokens, types, drop))


@pytest.mark.parametrize(("kind", "num_heads"), [("pretraining", 0), ("classes", 1)])
def test_every_dropout_layer_drops_in_training_and_in_training_alone(kind, num_heads):
    packed, _ = packed_and_unpacked()
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.4, attention_probs_dropout_prob=0.4)
    model = BUILDERS[kind](config, seed=1)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, Dropout) and layer.rate > 0]
    assert len(layers) == 1 + 3 * config.num_hidden_layers + num_heads

    def run(training):
        return np.concatenate([np.ravel(values) for values in model(packed, training=training).values()])

    sound = run(training=False)
    for layer in layers:
        layer.rate = 0.0
    np.testing.assert_array_equal(run(training=True), sound)
    for layer in layers:
        layer.rate = 0.4
        first, second = run(training=True), run(training=True)
        assert np.abs(first - sound).max() > 1e-3 and np.abs(first - second).max() > 1e-3, layer.path
        layer.rate = 0.0
