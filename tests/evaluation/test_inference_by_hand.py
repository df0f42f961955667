"""Vectors of texts from a model whose states are known: order, places, poolings, and the batches it gets."""

import dataclasses

import keras
import numpy as np
import pytest
from encoder_files import TEXTS, write_encoder
from tiny import CONFIG, make_engine

from bert_packed.checkpoints import checkpoint
from bert_packed.evaluation import inference

pytestmark = pytest.mark.both_backends
CLS, SEP, LENGTH = 2, 3, 12
WORDS = {"a": 10, "b": 20, "c": 30}


@pytest.fixture
def seen():
    """The batches that a model was given."""
    return []


@pytest.fixture
def known(seen):
    """An encoder whose state of a token is its id, its position and its id summed over its sequence."""

    def forward(batch):
        seen.append({name: values.copy() for name, values in batch.items()})
        ids, owners = batch["token_ids"], batch["sequence_ids"]
        same = owners[:, :, None] == owners[:, None, :]
        return np.stack([ids, batch["position_ids"], np.sum(same * ids[:, None, :], axis=-1)], axis=-1)

    def tokenize(texts):
        return [[WORDS[word] for word in text.split()] for text in texts]

    return inference.TextEncoder(forward, tokenize, CLS, SEP, LENGTH, batch_size=2, width=3)


def states_of(text):
    ids = [CLS, *[WORDS[word] for word in text.split()][: LENGTH - 2], SEP]
    return [[token, position, sum(ids)] for position, token in enumerate(ids)]


SHORT = ["a b c", "", "c a b a c b a a", "b", "a a a a a", "c c", "b a c " * 14, ""]


@pytest.mark.parametrize("depth", ["max", 2, 1])
def test_every_text_gets_its_own_states_in_order(known, seen, depth):
    found = known.encode(SHORT, "none", depth)
    assert [vectors.tolist() for vectors in found] == [states_of(text) for text in SHORT]
    mean = known.encode(SHORT, "mean", depth)
    np.testing.assert_allclose(mean, [np.mean(states_of(text), axis=0) for text in SHORT])
    assert known.encode(SHORT, "cls", depth).tolist() == [states_of(text)[0] for text in SHORT]
    assert known.encode([], "mean", depth).shape == (0, 3)
    slots = max(batch["sequence_ids"].max() for batch in seen)
    assert slots == {1: 1, 2: 2, "max": 3}[depth]


def test_vectors_keep_no_batch_in_memory(known):
    assert all(vector.base is None for vector in known.encode(SHORT, "none"))


def test_batches_are_static_and_their_rest_is_empty(known, seen):
    known.encode(SHORT)
    assert {(name, v.shape, v.dtype.name) for batch in seen for name, v in batch.items()} == {
        (name, (2, LENGTH), "int32")
        for name in ("token_ids", "sequence_ids", "token_type_ids", "position_ids")
    }
    for batch in seen:
        for row in range(2):
            used = int(np.count_nonzero(batch["sequence_ids"][row]))
            assert not any(values[row, used:].any() for values in batch.values())
            assert not batch["token_type_ids"].any()


def test_the_packing_factor_is_texts_per_row(known):
    # 5 + 7, 2 + 10, 3 + 4 + 2 and 12 tokens in rows of 12
    assert known.packing_factor(SHORT) == 8 / 4
    assert known.packing_factor([]) == 1


def test_a_model_with_dropout_gives_its_states_without(tmp_path):
    """As the model itself has them out of training, one text a row."""
    write_encoder(tmp_path)
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    engine = make_engine(config=config, seed=4)
    checkpoint.save_weights(tmp_path, engine.weights(), config)
    encoder = inference.load_encoder(tmp_path, tmp_path / "vocab.txt", batch_size=2)
    text = TEXTS[0]
    ids = [encoder.cls_id, *encoder.tokenize([text])[0], encoder.sep_id]
    row = {
        "token_ids": np.array([ids], np.int32),
        "sequence_ids": np.ones((1, len(ids)), np.int32),
        "token_type_ids": np.zeros((1, len(ids)), np.int32),
        "position_ids": np.arange(len(ids), dtype=np.int32)[None],
    }
    want = keras.ops.convert_to_numpy(engine.model.encode(row, training=False))[0]
    for _ in range(2):
        (got,) = encoder.encode([text], "none")
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
