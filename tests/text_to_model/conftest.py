"""A text, and the output directory of a `bert-packed train` on it that took every step."""

import dataclasses
import json

import pytest
from text_files import write_text
from tiny import CONFIG
from train_calls import LENGTH, flags_of

import bert_packed
from bert_packed import TrainConfig


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a text, its vocabulary and the config of a model of one layer."""
    folder = tmp_path_factory.mktemp("text")
    _, vocab = write_text(folder)
    num_tokens = len(vocab.read_text().split())
    model = dataclasses.replace(
        CONFIG, vocab_size=num_tokens, num_hidden_layers=1, max_position_embeddings=LENGTH
    )
    (folder / "model.json").write_text(json.dumps(dataclasses.asdict(model)))
    return folder


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The output directory of a call that took every step."""
    folder = tmp_path_factory.mktemp("finished") / "my [1]"
    result = bert_packed.train(TrainConfig(**flags_of(text, folder)))
    assert result == dataclasses.replace(result, output_dir=str(folder), model_dir=str(folder / "model"))
    assert not result.failures and not result.exit_status
    return folder
