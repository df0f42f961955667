"""Calls of `bert-packed train` on a small text, and what they leave."""

import dataclasses
import json

from safetensors.numpy import load_file
from text_files import write_text
from tiny import CONFIG

import bert_packed
from bert_packed import TrainConfig

LENGTH = 64
FILES = {"input_file": "text.txt", "vocab_file": "words.txt", "bert_config_file": "model.json"}


def write_inputs(folder):
    """Write a text, its vocabulary and the config of a model of one layer into a folder; returns it."""
    _, vocab = write_text(folder)
    num_tokens = len(vocab.read_text().split())
    model = dataclasses.replace(
        CONFIG, vocab_size=num_tokens, num_hidden_layers=1, max_position_embeddings=LENGTH
    )
    (folder / "model.json").write_text(json.dumps(dataclasses.asdict(model)))
    return folder


def finish(text, folder):
    """A call that takes every step, on inputs in the folder `text`; returns its output directory."""
    result = bert_packed.train(TrainConfig(**flags_of(text, folder)))
    assert result == dataclasses.replace(result, output_dir=str(folder), model_dir=str(folder / "model"))
    assert not result.failures and not result.exit_status
    return folder


def flags_of(text, output_dir, **settings):
    return {
        **{name: str(text / path) for name, path in FILES.items()},
        "output_dir": str(output_dir),
        "max_seq_length": LENGTH,
        "num_workers": 1,
        "num_train_epochs": 2.0,
        **settings,
    }


def times(folder):
    """Times of the last change of all files."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def newest(folder):
    """The newest checkpoint."""
    return max((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def weights_of(folder):
    return load_file(folder / "model" / "model.safetensors")
