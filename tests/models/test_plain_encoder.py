"""Packed outputs equal BERT as its paper has it, in NumPy, on one sequence at a time: nothing to install."""

import numpy as np
import pytest
from packs import packed_and_unpacked
from scipy.special import erf, softmax
from tiny import CONFIG

from bert_packed.config import PRETRAINING
from bert_packed.models.packed_model import build_model
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
HEADS, WIDTH = CONFIG.num_attention_heads, CONFIG.hidden_size


class PlainBert:
    """Forward passes in float64 from the weights by name; a sequence is `[S]`, nothing is padded."""

    def __init__(self, model):
        rng = np.random.default_rng(0)
        for weight in model.weights:  # those that start at 0 or 1 too
            weight.assign(np.asarray(weight) + rng.normal(size=weight.shape, scale=0.1))
        self.weights = {
            name: np.asarray(value.numpy(), np.float64) for name, value in named_weights(model).items()
        }

    def dense(self, name, x):
        return x @ self.weights[f"{name}/kernel"] + self.weights[f"{name}/bias"]

    def norm(self, name, x):
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + CONFIG.layer_norm_eps)
        return scaled * self.weights[f"{name}/LayerNorm/gamma"] + self.weights[f"{name}/LayerNorm/beta"]

    def attention(self, name, x):
        query, key, value = (
            np.split(self.dense(f"{name}/{which}", x), HEADS, axis=1) for which in ("query", "key", "value")
        )
        scale = np.sqrt(WIDTH // HEADS)
        heads = [softmax(q @ k.T / scale, axis=1) @ v for q, k, v in zip(query, key, value, strict=True)]
        return self.dense(f"{name}/output", np.concatenate(heads, axis=1))

    def encode(self, tokens, token_types):
        tables = [self.weights[f"bert/embeddings/{kind}_embeddings"] for kind in ("word", "token_type")]
        positions = self.weights["bert/embeddings/position_embeddings"][: len(tokens)]
        x = self.norm("bert/embeddings", tables[0][tokens] + tables[1][token_types] + positions)
        for layer in range(CONFIG.num_hidden_layers):
            name = f"bert/layer_{layer}"
            x = self.norm(f"{name}/attention", x + self.attention(f"{name}/attention", x))
            inner = gelu(self.dense(f"{name}/feed_forward/intermediate", x))
            x = self.norm(f"{name}/feed_forward", x + self.dense(f"{name}/feed_forward/output", inner))
        return x

    def predict(self, hidden):
        x = self.norm("predictions", gelu(self.dense("predictions/transform", hidden)))
        return x @ self.weights["bert/embeddings/word_embeddings"].T + self.weights["predictions/output_bias"]

    def next_sentence(self, first):
        return self.dense("next_sentence/classifier", np.tanh(self.dense("next_sentence/pooler", first)))


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def assert_close(got, want):
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_packed_outputs_equal_it():
    packed, unpacked = packed_and_unpacked()
    model = build_model(PRETRAINING, CONFIG, seed=1)
    plain = PlainBert(model)
    hidden = np.asarray(model.encode(packed))
    outputs = {name: np.asarray(values) for name, values in model(packed).items()}
    places = [(row, slot) for row in range(5) for slot in range(int(packed["sequence_ids"][row].max()))]
    assert len(places) == 11
    num_predictions = 0
    for sequence, (row, slot) in enumerate(places):
        length = int(unpacked["sequence_ids"][sequence].sum())
        tokens, token_types = (unpacked[name][sequence, :length] for name in ("token_ids", "token_type_ids"))
        want = plain.encode(tokens, token_types)
        assert_close(hidden[row][packed["sequence_ids"][row] == slot + 1], want)
        assert_close(outputs["nsp_logits"][row, slot], plain.next_sentence(want[0]))
        used = unpacked["prediction_sequences"][sequence] > 0
        if used.any():
            mine = packed["prediction_sequences"][row] == slot + 1
            logits = plain.predict(want[unpacked["prediction_positions"][sequence][used]])
            assert_close(outputs["mlm_logits"][row][mine], logits)
            num_predictions += used.sum()
    assert num_predictions > 11
