"""Outputs of packs equal a BERT and a Mamba in NumPy, on one sequence at a time without padding.

Legend: L tokens of a sequence, D model width, E inner width, V vocabulary, W taps, Z states of a channel.
"""

import dataclasses

import next_tokens
import numpy as np
import pytest
from finetuning_batches import packed_and_unpacked as finetuning_batches
from packs import packed_and_unpacked
from scipy.special import erf, expit, softmax
from tiny import CONFIG

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
)
from bert_packed.layers.context import activation
from bert_packed.layers.dropout import keep_mask
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
WIDE = dataclasses.replace(CONFIG, num_attention_heads=8, layer_norm_eps=1e-3)
RATE = 0.4


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


class NumpyModel:
    """A model for one sequence, in float64.

    Args:
        model: Ours, which gets random weights: a bias of 0 or a norm of 1 would hide that it is left out.
    """

    def __init__(self, model):
        rng, self.weights, self.config = np.random.default_rng(0), {}, model.config
        for name, weight in named_weights(model).items():
            middle = 1.0 if name.endswith(("gamma", "scale", "mixer/D")) else 0.0
            weight.assign(rng.normal(middle, 0.3, weight.shape))
            self.weights[name] = weight.numpy().astype(np.float64)

    def dense(self, name, x):
        return x @ self.weights[f"{name}/kernel"] + self.weights.get(f"{name}/bias", 0.0)


class NumpyBert(NumpyModel):
    """BERT as in its paper."""

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

    def masked_lm(self, hidden):
        x = self.norm("predictions", gelu(self.dense("predictions/transform", hidden)))
        return x @ self.table("word").T + self.weights["predictions/output_bias"]

    def classify(self, head, hidden):
        return self.dense(f"{head}/classifier", np.tanh(self.dense(f"{head}/pooler", hidden[0])))


def silu(x):
    return x * expit(x)


class NumpyMamba(NumpyModel):
    """Section 3 of "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", token by token."""

    def norm(self, name, x):
        return (
            x
            / np.sqrt((x**2).mean() + self.config.layer_norm_epsilon)
            * self.weights[f"{name}/RMSNorm/scale"]
        )

    def mix(self, name, tokens_D):
        """A block's mixer of the tokens of a sequence, one after the other."""
        config, rank = self.config, self.config.step_rank
        taps_WE, bias = self.weights[f"{name}/conv1d_kernel"], self.weights.get(f"{name}/conv1d_bias", 0.0)
        a_EZ = -np.exp(self.weights[f"{name}/A_log"])
        inners_E, state_EZ, mixed_D = [], np.zeros(a_EZ.shape), []
        for token_D in tokens_D:
            inner_E, gate_E = np.split(self.dense(f"{name}/in_proj", token_D), 2)
            inners_E.append(inner_E)
            recent = inners_E[-config.conv_kernel :]
            x_E = silu(
                sum(tap * one for tap, one in zip(taps_WE[-len(recent) :], recent, strict=True)) + bias
            )
            low, b_Z, c_Z = np.split(self.dense(f"{name}/x_proj", x_E), [rank, rank + config.state_size])
            size_E = np.log1p(np.exp(self.dense(f"{name}/dt_proj", low)))
            state_EZ = np.exp(size_E[:, None] * a_EZ) * state_EZ + (size_E * x_E)[:, None] * b_Z
            y_E = state_EZ @ c_Z + self.weights[f"{name}/D"] * x_E
            mixed_D.append(self.dense(f"{name}/out_proj", y_E * silu(gate_E)))
        return mixed_D

    def logits(self, token_ids):
        table_VD = self.weights["backbone/embeddings"]
        hidden = list(table_VD[token_ids])
        for layer in range(self.config.num_hidden_layers):
            name = f"backbone/layers_{layer}"
            mixed = self.mix(f"{name}/mixer", [self.norm(name, token_D) for token_D in hidden])
            hidden = [token_D + change_D for token_D, change_D in zip(hidden, mixed, strict=True)]
        return np.stack([self.norm("backbone", token_D) for token_D in hidden]) @ table_VD.T


def assert_near(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(initial=1.0))


def sequences_of(batch):
    """Row, slot from 0, and places of the tokens of each sequence."""
    return [
        (row, slot, np.flatnonzero(batch["sequence_ids"][row] == slot + 1))
        for row, slot in np.argwhere(batch["slot_weights"])
    ]


@pytest.mark.parametrize(
    ("head", "config"),
    [
        (PRETRAINING, CONFIG),
        (PRETRAINING, WIDE),
        (MASKED_LM, CONFIG),
        (QUESTION_ANSWERING, CONFIG),
        (CLASSIFICATION, CONFIG),
        (TOKEN_CLASSIFICATION, CONFIG),
    ],
)
def test_outputs_are_those_of_the_sequence_alone(head, config):
    batch = (packed_and_unpacked() if head in (PRETRAINING, MASKED_LM) else finetuning_batches())[0]
    model = build_model(head, config, 1, num_outputs=3)
    plain = NumpyBert(model)
    hidden = np.asarray(model.encode(batch))
    outputs = {name: np.asarray(values) for name, values in model(batch).items()}
    num_predictions = 0
    for row, slot, mine in sequences_of(batch):
        want = plain.encode(batch["token_ids"][row, mine], batch["token_type_ids"][row, mine])
        assert_near(hidden[row, mine], want)
        if head in (PRETRAINING, MASKED_LM):
            chosen = np.flatnonzero(batch["prediction_sequences"][row] == slot + 1)
            places = batch["prediction_positions"][row, chosen] - mine[0]
            assert_near(outputs["mlm_logits"][row, chosen], plain.masked_lm(want[places]))
            num_predictions += len(chosen)
        if head == PRETRAINING:
            assert_near(outputs["nsp_logits"][row, slot], plain.classify("next_sentence", want))
        elif head == QUESTION_ANSWERING:
            logits = plain.dense("question_answering/output", want)
            assert_near(outputs["start_logits"][row, mine], logits[:, 0])
            assert_near(outputs["end_logits"][row, mine], logits[:, 1])
        elif head == CLASSIFICATION:
            assert_near(outputs["logits"][row, slot], plain.classify("classification", want))
        elif head == TOKEN_CLASSIFICATION:
            assert_near(outputs["logits"][row, mine], plain.dense("token_classification/classifier", want))
    assert len(sequences_of(batch)) == 11
    assert num_predictions > 11 or head not in (PRETRAINING, MASKED_LM)


@pytest.mark.parametrize(
    "changes", [{}, {"use_bias": True, "layer_norm_epsilon": 0.1}, {"use_conv_bias": False, "conv_kernel": 2}]
)
def test_logits_of_a_mamba_are_those_of_the_sequence_alone(changes):
    batch, _ = next_tokens.packed_and_unpacked()
    model = build_model(CAUSAL_LM, dataclasses.replace(next_tokens.CONFIG, **changes), 1)
    plain, logits = NumpyMamba(model), np.asarray(model(batch)["logits"])
    for row, _, mine in sequences_of(batch):
        assert_near(logits[row, mine], plain.logits(batch["token_ids"][row, mine]))
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
