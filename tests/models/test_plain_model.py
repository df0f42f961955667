"""Every sequence of a pack gets what BERT computes for it alone, written plainly in NumPy, head by head."""

import dataclasses

import numpy as np
import pytest
from finetuning_batches import packed_and_unpacked as finetuning_batches
from packs import packed_and_unpacked
from scipy.special import erf, softmax
from tiny import CONFIG

from bert_packed.config import CLASSIFICATION, PRETRAINING, QUESTION_ANSWERING
from bert_packed.models.packed_model import build_model
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
WIDE = dataclasses.replace(CONFIG, num_attention_heads=8, hidden_act="gelu", layer_norm_eps=1e-3)


class PlainBert:
    """BERT as in its paper, for one sequence without padding, in float64.

    Args:
        model: Ours; its weights are copied.
    """

    def __init__(self, model):
        weights = named_weights(model)
        self._weights = {name: np.asarray(value.numpy(), np.float64) for name, value in weights.items()}
        self._config = model.config

    def dense(self, name, values):
        return values @ self._weights[f"{name}/kernel"] + self._weights[f"{name}/bias"]

    def norm(self, name, values):
        mean, variance = values.mean(axis=-1, keepdims=True), values.var(axis=-1, keepdims=True)
        scaled = (values - mean) / np.sqrt(variance + self._config.layer_norm_eps)
        return scaled * self._weights[f"{name}/LayerNorm/gamma"] + self._weights[f"{name}/LayerNorm/beta"]

    def table(self, name):
        return self._weights[f"bert/embeddings/{name}_embeddings"]

    def attend(self, name, values):
        width = self._config.hidden_size // self._config.num_attention_heads
        query, key, value = (self.dense(f"{name}/{part}", values) for part in ("query", "key", "value"))
        heads = []
        for head in range(self._config.num_attention_heads):
            mine = slice(head * width, (head + 1) * width)
            shares = softmax(query[:, mine] @ key[:, mine].T / np.sqrt(width), axis=-1)
            heads.append(shares @ value[:, mine])
        return self.dense(f"{name}/output", np.concatenate(heads, axis=-1))

    def encode(self, token_ids, token_type_ids):
        """Hidden states `[tokens, D]`."""
        values = self.table("word")[token_ids] + self.table("token_type")[token_type_ids]
        values = self.norm("bert/embeddings", values + self.table("position")[: len(token_ids)])
        for layer in range(self._config.num_hidden_layers):
            name = f"bert/layer_{layer}"
            values = self.norm(f"{name}/attention", values + self.attend(f"{name}/attention", values))
            inner = gelu(self.dense(f"{name}/feed_forward/intermediate", values))
            change = self.dense(f"{name}/feed_forward/output", inner)
            values = self.norm(f"{name}/feed_forward", values + change)
        return values

    def vocabulary_logits(self, states):
        states = self.norm("predictions", gelu(self.dense("predictions/transform", states)))
        return states @ self.table("word").T + self._weights["predictions/output_bias"]

    def pooled(self, head, states):
        return np.tanh(self.dense(f"{head}/pooler", states[0]))


def gelu(values):
    return values * (1 + erf(values / np.sqrt(2))) / 2


def randomised(model):
    """A model of which every weight counts: a bias of 0 or a norm of 1 hides that it is left out."""
    rng = np.random.default_rng(5)
    for weight in model.trainable_variables:
        weight.assign(weight.numpy() + 0.2 * rng.normal(size=weight.shape))
    return model


def sequences_of(batch):
    """Row, slot from 0, and tokens of each sequence."""
    return [
        (row, slot, np.flatnonzero(batch["sequence_ids"][row] == slot + 1))
        for row, slot in np.argwhere(batch["slot_weights"])
    ]


def assert_near(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_hidden_states_and_heads_of_pretraining():
    batch, _ = packed_and_unpacked()
    model = randomised(build_model(PRETRAINING, WIDE, seed=1))
    plain = PlainBert(model)
    hidden = np.asarray(model.encode(batch))
    outputs = {name: np.asarray(values) for name, values in model(batch).items()}
    num_predictions = 0
    for row, slot, tokens in sequences_of(batch):
        states = plain.encode(batch["token_ids"][row, tokens], batch["token_type_ids"][row, tokens])
        assert_near(hidden[row, tokens], states)
        mine = np.flatnonzero(batch["prediction_sequences"][row] == slot + 1)
        places = batch["prediction_positions"][row, mine] - tokens[0]
        if len(mine):
            assert_near(outputs["mlm_logits"][row, mine], plain.vocabulary_logits(states[places]))
        want = plain.dense("next_sentence/classifier", plain.pooled("next_sentence", states))
        assert_near(outputs["nsp_logits"][row, slot], want)
        num_predictions += len(mine)
    assert len(sequences_of(batch)) == 11 and num_predictions > 11


def test_heads_of_fine_tuning():
    batch, _ = finetuning_batches()
    answers = randomised(build_model(QUESTION_ANSWERING, CONFIG, 1))
    classes = randomised(build_model(CLASSIFICATION, CONFIG, num_outputs=3, seed=1))
    spans, labels = answers(batch), np.asarray(classes(batch)["logits"])
    for row, slot, tokens in sequences_of(batch):
        ids = batch["token_ids"][row, tokens], batch["token_type_ids"][row, tokens]
        plain = PlainBert(answers)
        want = plain.dense("question_answering/output", plain.encode(*ids))
        for place, name in enumerate(("start_logits", "end_logits")):
            assert_near(np.asarray(spans[name])[row, tokens], want[:, place])
        plain = PlainBert(classes)
        pooled = plain.pooled("classification", plain.encode(*ids))
        assert_near(labels[row, slot], plain.dense("classification/classifier", pooled))
