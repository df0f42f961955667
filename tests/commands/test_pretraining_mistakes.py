"""Mistakes in data, start and environment of the training command: one line, and nothing is begun.

Those that the settings alone tell are in `tests/runs/test_config.py`.
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packs import batch_of
from pretraining_command import assert_refused, flags_of, pretrain, write_all, write_batch
from safetensors.numpy import save_file
from tiny import CONFIG, MAX_SEQ_LENGTH, manifest_of

from bert_packed.runs import pretraining
from bert_packed.text.tokenization import SPECIAL_TOKENS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Packs, some of them with a manifest, and files that are none."""
    folder = write_all(tmp_path_factory.mktemp("data"))
    (folder / "text.tfrecord").write_text("This is no TFRecord.")
    batch = batch_of([], MAX_SEQ_LENGTH, 4, 12)
    one = {name: np.zeros((1, *values.shape[1:]), values.dtype) for name, values in batch.items()}
    write_batch(folder / "token.tfrecord", {**one, "token_ids": one["token_ids"] + 31})
    for name, words in {"long": 40, "plain": 4}.items():
        (folder / f"{name}.txt").write_text("word\n" * words)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "pack"]) + "\n")
    (folder / "same").mkdir()
    shutil.copy(folder / "packed-0.tfrecord", folder / "same")
    manifest = manifest_of(vocab_size=31, vocab_sha256="a")
    (folder / "same" / "manifest.json").write_text(json.dumps(manifest))
    return folder


BELOW = "token.tfrecord, record 1: every value of input_ids must be from 0 and below vocab_size=31"
MISTAKES = [
    (
        {"input_file": "{data}/text.tfrecord"},
        "text.tfrecord is not a TFRecord file, or its record 1 is truncated or corrupt; of text, `bert-pack",
    ),
    ({"input_file": "{data}/token.tfrecord"}, BELOW),
    ({"eval_input_file": "{data}/token.tfrecord"}, BELOW),
    ({"layout": "optimus2d", "mesh": "1,1"}, "`layout` must be none unless KERAS_BACKEND=jax. Received:"),
    ({"init_checkpoint": "{data}/none"}, "`init_checkpoint` must be a folder"),
    ({"vocab_file": "{data}/plain.txt"}, "plain.txt"),
    ({"bert_config_file": "bert-tiny", "global_rope_theta": 8192}, "`global_rope_theta` must be 0 for a"),
    (
        {"bert_config_file": "bert-tiny", "max_position_embeddings": 8192},
        "`max_position_embeddings` must be 0 for a BERT, which cannot change it. Received: 8192",
    ),
    *(
        ({"export_every": 2, **change}, message)
        for change, message in (
            ({"export_vocab_file": "{data}/long.txt"}, "the vocabulary of `export_vocab_file` must be at"),
            ({"export_vocab_file": "{data}/plain.txt"}, "must hold [PAD], [UNK], [CLS], [SEP], [MASK]"),
            ({"export_vocab_file": "{data}/none.txt"}, "none.txt"),
            (
                {"export_vocab_file": "{data}/vocab.txt", "input_file": "{data}/same/*.tfrecord"},
                "must be the vocabulary of `input_file`",
            ),
        )
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_one_line(data, tmp_path, changes, message):
    places = {"data": data, "run": tmp_path / "run"}
    changes = {name: str(value).format(**places) for name, value in changes.items()}
    assert_refused(message.replace("{data}", str(data)), **flags_of(data, tmp_path / "run", **changes))
    assert not list(tmp_path.glob("run/checkpoint*"))


class BuildsError(Exception):
    """The run has gone on to build its model."""


@pytest.fixture
def builds(monkeypatch):
    def start_engine(*_):
        raise BuildsError

    monkeypatch.setattr(pretraining.Run, "start_engine", start_engine)


def write_start(folder, file_name, tensor, **change):
    """Write a checkpoint of a config and one tensor, whose name says whose it is, and with which head."""
    folder.mkdir()
    stored = dataclasses.replace(CONFIG, **{"num_hidden_layers": 1, **change})
    (folder / file_name).write_text(json.dumps({"model_type": "bert", **dataclasses.asdict(stored)}))
    save_file({tensor: np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


OURS, HUGGING_FACE = ("bert_config.json", "bert/a"), ("config.json", "bert.a")
MASKED_LM = ("bert_config.json", "predictions/output_bias")
STARTS = [  # of the same rules, tests/checkpoints/test_refused_weights.py has more
    (OURS, {"hidden_dropout_prob": 0.5}, "", None),
    (HUGGING_FACE, {"hidden_size": 32}, "", "hidden_size must be 16. Received: 32."),
    (OURS, {"ablation_no_attention_mask": True}, "", "ablation_no_attention_mask must be False. Received:"),
    # A model of masked tokens alone may learn next sentences as well, as from its export
    (MASKED_LM, {"vocab_size": 40}, "mlm", "vocab_size must be 31. Received: 40."),
    (MASKED_LM, {"vocab_size": 40}, "", None),
]


@pytest.mark.usefixtures("builds")
@pytest.mark.parametrize(("form", "change", "objective", "message"), STARTS)
def test_a_start_is_checked_before_a_model_is_built(data, tmp_path, form, change, objective, message):
    folder = write_start(tmp_path / "start", *form, **change)
    flags = flags_of(data, tmp_path / "run", init_checkpoint=folder, objective=objective or "mlm_nsp")
    if message:
        assert_refused(f"start holds another model: {message}", **flags)
    else:
        with pytest.raises(BuildsError):
            pretrain(**flags)
    assert not list(tmp_path.glob("run/checkpoint*"))


@pytest.mark.usefixtures("builds")
def test_a_start_without_its_config_is_refused(data, tmp_path):
    folder = write_start(tmp_path / "start", *HUGGING_FACE)
    (folder / "config.json").unlink()
    message = "start must hold config.json beside model.safetensors. Received: no"
    assert_refused(message, **flags_of(data, tmp_path / "run", init_checkpoint=folder))


def test_a_backend_must_be_supported_and_installed(data, tmp_path, monkeypatch):
    flags = flags_of(data, tmp_path / "run")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert_refused("KERAS_BACKEND must be one of tensorflow, jax. Received: torch.", **flags)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused("KERAS_BACKEND=jax needs `pip install -e '.[jax]'`", **flags)


def test_a_mistake_is_all_that_a_process_prints(tmp_path):
    """No start-up line of TensorFlow surrounds it, whichever module imports that first."""
    command = [sys.executable, ROOT / "run_pretraining.py", "--input_file=none", f"--output_dir={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert "`input_file` must match at least one file. Received: 'none'." in found.stderr
