"""`bert-packed train` of a ModernBERT: byte-level BPE by itself, and a start from its own export."""

import dataclasses
import json

import numpy as np
import pytest
from byte_tokenizers import roberta
from modern_bert_models import CONFIG
from text_files import write_text

import bert_packed
from bert_packed import TrainConfig
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, config_json
from bert_packed.checkpoints import checkpoint
from bert_packed.core.settings import InputError
from bert_packed.text import byte_bpe
from bert_packed.text_to_model import steps
from bert_packed.training.engines.engine import named_weights

LENGTH = 64
MODEL = dataclasses.replace(CONFIG, vocab_size=330, max_position_embeddings=LENGTH)


@pytest.fixture
def text(tmp_path):
    _, vocab = write_text(tmp_path)
    vocab.rename(tmp_path / "vocab.txt")
    byte_bpe.save(roberta(), tmp_path / "tokenizer.json")
    (tmp_path / "model.json").write_text(json.dumps(config_json(MODEL)))
    return tmp_path


def write_start(text):
    """Write a checkpoint without a vocabulary."""
    checkpoint.save_weights(text / "start", named_weights(build_model(MASKED_LM, MODEL, 0)), MODEL)


def settings_of(text, **settings):
    given = {"input_file": "text.txt", "output_dir": "my", "bert_config_file": "model.json"}
    given = {name: str(text / path) for name, path in given.items()}
    given |= {"max_seq_length": LENGTH, "num_train_epochs": 1.0, "num_workers": 1}
    placed = {name: v.format(text=text) if isinstance(v, str) else v for name, v in settings.items()}
    return TrainConfig(**given | placed)


START = {"bert_config_file": "", "init_checkpoint": "{text}/start"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("", "byte_bpe")),
        ({"bert_config_file": "bert-tiny"}, ("", "wordpiece")),
        ({"vocab_file": "{text}/tokenizer.json"}, ("{text}/tokenizer.json", "byte_bpe")),
        ({"vocab_file": "{text}/vocab.txt"}, ("{text}/vocab.txt", "wordpiece")),
        (START, ("{text}/start/tokenizer.json", "byte_bpe")),
    ],
)
def test_the_kind_of_the_vocabulary(text, settings, expected):
    """The file that is given or beside the checkpoint decides, and else the model."""
    write_start(text)
    (text / "start/tokenizer.json").write_bytes((text / "tokenizer.json").read_bytes())
    found = steps.find_vocabulary(settings_of(text, **settings))
    assert found == tuple(part.format(text=text) for part in expected)


def test_the_case_of_a_byte_level_checkpoint_is_its_own(text):
    """`do_lower_case` is of WordPieces, whatever Hugging Face's settings beside bytes say."""
    write_start(text)
    (text / "start/tokenizer_config.json").write_text('{"do_lower_case": false}')
    given = settings_of(text, **START)
    (text / "tokenizer.json").rename(text / "start/tokenizer.json")
    steps.check(given, 10**6)
    (text / "start/tokenizer.json").unlink()
    (text / "vocab.txt").rename(text / "start/vocab.txt")
    with pytest.raises(InputError, match=r"`do_lower_case` must be as in the training .*, False"):
        steps.check(given, 10**6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bert_config_file": "bert-tiny", "vocab_file": "{text}/tokenizer.json"},
            "must have one WordPiece a line for a BERT",
        ),
        ({"do_lower_case": False, "vocab_size": 300}, "`do_lower_case` must be left out with byte-level BPE"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(text, settings, message):
    with pytest.raises(InputError, match=message):
        bert_packed.train(settings_of(text, **settings))
    assert not (text / "my").exists()


@pytest.mark.slow
def test_from_text_to_a_model_and_on_from_it(text):
    first = bert_packed.train(settings_of(text, vocab_size=300, masked_lm_prob=0.3))
    assert not first.failures
    start = {"bert_config_file": "", "init_checkpoint": first.model_dir, "output_dir": "{text}/again"}
    second = bert_packed.train(settings_of(text, **start))
    assert not second.failures
    read = [(text / name / "model/tokenizer.json").read_bytes() for name in ("my", "again")]
    assert read[0] == read[1]
    encoders = [bert_packed.load_encoder(one.model_dir) for one in (first, second)]
    vectors = [encoder.encode(["doc1 doc2", "Other words: naïve ones."]) for encoder in encoders]
    assert not np.allclose(*vectors) and np.isfinite(vectors).all()
