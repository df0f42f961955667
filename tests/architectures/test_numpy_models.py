"""Hidden states of packs equal a BERT in NumPy, on one sequence at a time without padding.

tests/checkpoints/test_references.py compares every architecture and head with transformers.

Legend: L tokens of a sequence, D model width.
"""

import dataclasses

import numpy as np
import pytest
from packs import packed_and_unpacked
from scipy.special import erf, softmax
from tiny import CONFIG

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.layers.context import activation
from bert_packed.layers.dropout import keep_mask
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
WIDE = dataclasses.replace(CONFIG, num_attention_heads=8, layer_norm_eps=1e-3)
RATE = 0.4


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


class NumpyBert:
    """BERT for one sequence as in its paper, in float64.

    Args:
        model: Ours, which gets random weights: a bias of 0 or a norm of 1 would hide that it is left out.
    """

    def __init__(self, model):
        rng, self.weights, self.config = np.random.default_rng(0), {}, model.config
        for name, weight in named_weights(model).items():
            middle = 1.0 if name.endswith("gamma") else 0.0
            weight.assign(rng.normal(middle, 0.3, weight.shape))
            self.weights[name] = weight.numpy().astype(np.float64)

    def dense(self, name, x):
        return x @ self.weights[f"{name}/kernel"] + self.weights[f"{name}/bias"]

    def norm(self, name, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.config.layer_norm_eps)
        return scaled * self.weights[f"{name}/LayerNorm/gamma"] + self.weights[f"{name}/LayerNorm/beta"]

    def table(self, name):
        return self.weights[f"bert/embeddings/{name}_embeddings"]

    def attend(self, name, x, drop):
        width = self.config.hidden_size // self.config.num_attention_heads
        query, key, value = (self.dense(f"{name}/{part}", x) for part in ("query", "key", "value"))
        heads = []
        for head in range(self.config.num_attention_heads):
            own = slice(head * width, (head + 1) * width)
            shares = softmax(query[:, own] @ key[:, own].T / np.sqrt(width), axis=-1)
            heads.append(drop(head, shares) @ value[:, own])
        return self.dense(f"{name}/output", np.concatenate(heads, axis=-1))

    def encode(self, tokens, token_types, drop=lambda layer, head, shares: shares):
        """Hidden states `[L, D]`; `drop` makes of a head's shares `[L, L]` those that count."""
        x = self.table("word")[tokens] + self.table("token_type")[token_types]
        x = self.norm("bert/embeddings", x + self.table("position")[: len(tokens)])
        for layer in range(self.config.num_hidden_layers):
            name = f"bert/layer_{layer}"
            attended = self.attend(
                f"{name}/attention", x, lambda *of_head, layer=layer: drop(layer, *of_head)
            )
            x = self.norm(f"{name}/attention", x + attended)
            inner = gelu(self.dense(f"{name}/feed_forward/intermediate", x))
            x = self.norm(f"{name}/feed_forward", x + self.dense(f"{name}/feed_forward/output", inner))
        return x


def assert_near(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(initial=1.0))


def sequences_of(batch):
    """Row, slot from 0, and places of the tokens of each sequence."""
    return [
        (row, slot, np.flatnonzero(batch["sequence_ids"][row] == slot + 1))
        for row, slot in np.argwhere(batch["slot_weights"])
    ]


@pytest.mark.parametrize("config", [CONFIG, WIDE])
def test_states_are_those_of_the_sequence_alone(config):
    batch = packed_and_unpacked()[0]
    model = build_model(PRETRAINING, config, 1)
    plain, hidden = NumpyBert(model), np.asarray(model.encode(batch))
    for row, _, mine in sequences_of(batch):
        want = plain.encode(batch["token_ids"][row, mine], batch["token_type_ids"][row, mine])
        assert_near(hidden[row, mine], want)
    assert len(sequences_of(batch)) == 11


def test_dropped_shares_of_attention_are_not_made_up_for():
    packed, _ = packed_and_unpacked()
    config = dataclasses.replace(CONFIG, attention_probs_dropout_prob=RATE)
    model = build_model(PRETRAINING, config, seed=1)
    plain, masks, length = NumpyBert(model), [], packed["token_ids"].shape[1]
    for number, block in enumerate(model.bert.blocks):
        block.attention.attention_dropout.given_seed = seed = np.array([number, 7], np.uint32)
        shape = len(packed["token_ids"]), CONFIG.num_attention_heads, length, length
        masks.append(np.asarray(keep_mask(shape, RATE, seed)))
    found = np.asarray(model.encode(packed, training=True))
    for row, _, mine in sequences_of(packed):

        def drop(layer, head, shares, row=row, mine=mine):
            return shares * masks[layer][row, head][np.ix_(mine, mine)] / (1 - RATE)

        want = plain.encode(packed["token_ids"][row, mine], packed["token_type_ids"][row, mine], drop)
        assert_near(found[row, mine], want)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu"])
def test_activations(name):
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    expected = {
        "gelu": gelu(x),
        "gelu_new": x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": np.maximum(x, 0),
    }[name]
    np.testing.assert_allclose(activation(name)(x), expected, atol=1e-6)
