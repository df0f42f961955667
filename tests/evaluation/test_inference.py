"""Texts get the vectors that they have alone, in their order, from one compiled shape."""

import dataclasses
import functools
import random
import shutil
import threading

import keras
import numpy as np
import pytest
from byte_tokenizers import roberta
from encoder_files import TEXTS, write_encoder
from modern_bert_models import CONFIG as MODERN_BERT
from reference import import_reference, minilm_folder, reference_minilm
from tiny import CONFIG, make_engine

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, ablate
from bert_packed.checkpoints import checkpoint
from bert_packed.core.settings import InputError
from bert_packed.evaluation import inference
from bert_packed.kernels import choose as kernels
from bert_packed.layers import context as layers
from bert_packed.text import byte_bpe
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Its rates of dropout are those of a training run: vectors have none."""
    return write_encoder(tmp_path_factory.mktemp("model"), WITH_DROPOUT)


@pytest.fixture(scope="module")
def encoder(model_folder):
    return inference.load_encoder(model_folder, model_folder / "vocab.txt", batch_size=2)


def test_loading_leaves_the_random_numbers_of_the_caller_alone(model_folder):
    keras.utils.set_random_seed(3)
    states = random.getstate(), np.random.get_state()[1].tolist()
    inference.load_encoder(model_folder, model_folder / "vocab.txt")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    found = np.asarray(keras.random.uniform((3,)))
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(found, np.asarray(keras.random.uniform((3,))))


@pytest.mark.parametrize("unknown", ["", "bert/layer_0/attention/query/scale"])
def test_what_a_file_has_and_no_such_model_is_named(model_folder, tmp_path, caplog, unknown):
    """Warnings are those of training; heads are not reported, since vectors need none."""
    path = shutil.copytree(model_folder, tmp_path / "model") / checkpoint.WEIGHTS
    tensors = checkpoint.read_tensors(path)
    assert "next_sentence/classifier/kernel" in tensors
    checkpoint.write_tensors({**tensors, **({unknown: np.zeros(2, np.float32)} if unknown else {})}, path)
    inference.load_encoder(path.parent)
    assert [record.getMessage().partition("\n")[2] for record in caplog.records] == (
        [f"  in the file only, not used: {unknown}"] if unknown else []
    )


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        (["cpu:0", "cpu:1"], {}, (1, 2)),
        (["gpu:0"], {}, (8, 1)),
        (["cpu:0"], {"batch_size": 5, "num_batches_at_once": 3}, (5, 3)),
    ],
)
def test_batches_are_small_on_a_cpu_and_two_at_once(model_folder, monkeypatch, devices, given, expected):
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: devices)
    encoder = inference.load_encoder(model_folder, model_folder / "vocab.txt", **given)
    assert (encoder.batch_size, encoder.num_batches_at_once) == expected


def test_vectors_of_texts_encoded_together_and_alone(encoder):
    together = encoder.encode(TEXTS, "none")
    assert len(together) == len(TEXTS)
    for text, got in zip(TEXTS, together, strict=True):
        want = encoder.encode([text], "none")[0]
        assert got.shape == want.shape == (len(text.split()) + 2, 16)
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_batches_at_once_give_what_one_at_a_time_gives(encoder):
    one, two = (
        dataclasses.replace(encoder, batch_size=1, num_batches_at_once=number).encode(9 * TEXTS)
        for number in (1, 2)
    )
    np.testing.assert_array_equal(one, two)


def test_results_come_to_the_host_in_their_thread(encoder):
    """Under JAX a call returns before its result is there: the thread would begin another."""
    threads = []

    class Result:
        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            threads.append(threading.current_thread())
            return np.asarray(self.values)

    changed = dataclasses.replace(
        encoder, num_batches_at_once=2, forward=lambda batch: Result(encoder.forward(batch))
    )
    changed.encode(9 * TEXTS)
    assert len(threads) > 4 and threading.main_thread() not in threads[1:]


def test_one_compilation(model_folder, monkeypatch):
    traced = []
    scores = layers.attention_scores
    monkeypatch.setattr(layers, "attention_scores", lambda *of: traced.append(1) or scores(*of))
    encoder = inference.load_encoder(model_folder, model_folder / "vocab.txt", num_batches_at_once=2)
    assert 9 * len(TEXTS) / encoder.packing_factor(9 * TEXTS) > 4
    traced.clear()
    encoder.encode(9 * TEXTS)
    encoder.encode(TEXTS[:1])
    assert len(traced) == CONFIG.num_hidden_layers


def test_case_is_as_the_tokenizers_settings_say(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    load = functools.partial(inference.load_encoder, tmp_path, tmp_path / "vocab.txt")
    known, unknown = load().tokenize(["w1"]), load(do_lower_case=False).tokenize(["W1"])
    assert load().tokenize(["W1"]) == known != unknown
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load().tokenize(["W1"]) == unknown
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config\.json must hold a JSON object"):
        load()


def test_a_tokenizer_that_the_models_family_cannot_read(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "vocab.txt").rename(tmp_path / "words.txt")
    byte_bpe.save(roberta(), tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"`vocab_file` must be given where no vocab\.txt is beside"):
        inference.load_encoder(tmp_path)
    with pytest.raises(InputError, match=r"must have one WordPiece a line for a BERT\. Received: .*json"):
        inference.load_encoder(tmp_path, tmp_path / "tokenizer.json")


@pytest.mark.usefixtures("uncompiled")
def test_long_contexts_take_the_fused_kernel(tmp_path, monkeypatch):
    config = dataclasses.replace(MODERN_BERT, vocab_size=330, max_position_embeddings=8192)
    checkpoint.save_weights(tmp_path, named_weights(build_model(MASKED_LM, config, 0)), config)
    byte_bpe.save(roberta(), tmp_path / "tokenizer.json")
    asked, shapes = [], []

    def attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS):
        shapes.append(query_BSNH.shape)
        return value_BSNH

    def choose(*of):
        asked.append(of)
        return kernels.Kernels({"attend": attend}, "")

    monkeypatch.setattr(kernels, "choose_kernels", choose)
    encoders = [inference.load_encoder(tmp_path, max_seq_length=length) for length in (None, 1280)]
    assert [encoder.max_seq_length for encoder in encoders] == [1024, 1280]
    assert asked == [("auto", config, length, "cpu") for length in (1024, 1280)]
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    assert inference.load_encoder(tmp_path).max_seq_length == 128
    encoders[1].encode(["packs"])
    assert shapes == [(1, 1280, 2, 8)] * 2  # of the global blocks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("num_batches_at_once", 0),
        ("max_seq_length", 0),
        ("max_seq_length", 25),
        ("dtype", "fp16"),
        ("bert_config_file", "mamba-tiny"),
    ],
)
def test_wrong_settings_are_named(model_folder, name, value):
    received = {"bert_config_file": "model_type mamba"}.get(name, value)
    with pytest.raises(InputError, match=f"`{name}` must be .*[Rr]eceived: '?{received}'?"):
        inference.load_encoder(model_folder, model_folder / "vocab.txt", **{name: value})


def test_mistakes(model_folder, encoder, tmp_path):
    vocab = model_folder / "vocab.txt"
    with pytest.raises(ValueError, match="`pooling` must be one of mean, cls, none"):
        encoder.encode(TEXTS, "max")
    with pytest.raises(ValueError, match=r"`texts` must be a list of str\. Received: 'w1 w2'"):
        encoder.encode("w1 w2")
    (tmp_path / "vocab.txt").write_text(vocab.read_text() + "one more\n")
    with pytest.raises(InputError, match=r"vocabulary of `vocab_file` must be at most .*=31 of .*: 32"):
        inference.load_encoder(model_folder, tmp_path / "vocab.txt")
    config = ablate(dataclasses.replace(CONFIG), "no_attention_mask")
    checkpoint.save_weights(tmp_path, make_engine(config=config).weights(), config)
    with pytest.raises(InputError, match="keeps sequences apart"):
        inference.load_encoder(tmp_path, vocab)


@pytest.mark.slow
def test_vectors_of_minilm_are_those_of_transformers():
    """Published weights with their own vocabulary; in a pack each text is alone."""
    folder = minilm_folder()
    torch, transformers = import_reference()
    tokenizer, reference = transformers.AutoTokenizer.from_pretrained(folder), reference_minilm(folder)
    texts = ["Packing sequences.", "", "Nothing leaks from one text into another, however long it may be."]
    encoder = inference.load_encoder(folder, folder / "vocab.txt", max_seq_length=64, batch_size=1)
    assert encoder.packing_factor(texts) == 3
    for text, got in zip(texts, encoder.encode(texts, "none"), strict=True):
        with torch.no_grad():
            want = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        assert got.shape == want.shape and np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


CLS, SEP, LENGTH = 2, 3, 12
WORDS = {"a": 10, "b": 20, "c": 30}


@pytest.fixture
def seen():
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
    assert all(vectors.base is None for vectors in found)  # or each would keep its batch in memory
    assert [vectors.tolist() for vectors in found] == [states_of(text) for text in SHORT]
    mean = known.encode(SHORT, "mean", depth)
    np.testing.assert_allclose(mean, [np.mean(states_of(text), axis=0) for text in SHORT])
    assert known.encode(SHORT, "cls", depth).tolist() == [states_of(text)[0] for text in SHORT]
    assert known.encode([], "mean", depth).shape == (0, 3)
    slots = max(batch["sequence_ids"].max() for batch in seen)
    assert slots == {1: 1, 2: 2, "max": 3}[depth]


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
    # Rows of 12 hold 5 + 7, 2 + 10, 3 + 4 + 2 and 12 tokens
    assert known.packing_factor(SHORT) == 8 / 4
    assert known.packing_factor([]) == 1


def test_a_model_with_dropout_gives_its_states_without(tmp_path):
    """They are those that the model itself has out of training, one text a row."""
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
