"""Mistakes in calling the training command: one line, status 2, and nothing is begun."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packs import batch_of
from pretraining_command import arguments, run, write_all, write_batch
from safetensors.numpy import save_file
from tiny import CONFIG, MAX_SEQ_LENGTH, write_data

from bert_packed import schema
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.runs import pretraining
from bert_packed.runs.run_directory import SCANS_FILE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


def mistakes(data):
    """Changed flags, and what the one line must say."""
    (data / "empty.tfrecord").write_bytes(b"")
    (data / "text.tfrecord").write_text("This is no TFRecord.")
    whole = (data / "packed-0.tfrecord").read_bytes()
    (data / "cut.tfrecord").write_bytes(whole[:-10])
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (data / "flipped.tfrecord").write_bytes(flipped)
    batch = batch_of([], MAX_SEQ_LENGTH, 4, 12)
    one = {name: np.zeros((1, *values.shape[1:]), values.dtype) for name, values in batch.items()}
    write_batch(data / "token.tfrecord", {**one, "token_ids": one["token_ids"] + 31})
    write_batch(data / "bare.tfrecord", one, leave_out=schema.NEXT_SENTENCE_POSITIONS)
    features = {name: np.zeros((1, 8), np.int64) for name in schema.UNPACKED_LENGTHS}
    features[schema.NEXT_SENTENCE_LABELS] = features[schema.NEXT_SENTENCE_LABELS][:, :1]
    tfrecords.write_records(data / "unpacked.tfrecord", serialize_examples(features))
    return [
        ({"input_file": f"{data}/empty.tfrecord"}, "empty.tfrecord, which is empty"),
        ({"input_file": f"{data}/text.tfrecord"}, "text.tfrecord is not a TFRecord file"),
        (
            {"input_file": f"{data}/cut.tfrecord"},
            "cut.tfrecord, record 9: the record is truncated or corrupt",
        ),
        ({"input_file": f"{data}/flipped.tfrecord"}, "the record is truncated or corrupt"),
        (
            {"input_file": f"{data}/token.tfrecord"},
            "token.tfrecord, record 1: every value of input_ids must be from 0 and below vocab_size=31",
        ),
        ({"input_file": f"{data}/bare.tfrecord"}, "features next_sentence_positions are missing. Received: "),
        (
            {"input_file": f"{data}/unpacked.tfrecord"},
            f"python data_gen/pack_tfrecords.py --input_file={data}/unpacked.tfrecord --max_seq_length=8 ",
        ),
        ({"micro_batch_size": 3}, "`micro_batch_size` must divide `train_batch_size`"),
        (
            {"eval_input_file": f"{data}/token.tfrecord"},
            "token.tfrecord, record 1: every value of input_ids must be from 0 and below vocab_size=31",
        ),
        ({"packing_correction": "betas"}, "`packing_correction` must be none where no manifest.json"),
        (
            {"layout": "optimus2d", "mesh": "1,1"},
            "`layout` must be none unless KERAS_BACKEND=jax. Received: optimus2d, under tensorflow.",
        ),
    ]


def test_mistakes_are_one_line_and_status_2(data, tmp_path, capsys):
    for number, (change, message) in enumerate(mistakes(data)):
        output_dir = tmp_path / str(number)
        capsys.readouterr()
        assert run(*arguments(data, output_dir, **change)) == 2, change
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1, (change, printed)
        assert not list(output_dir.glob("checkpoint*")), change


def test_manifests_are_checked_against_the_model_and_each_other(tmp_path, capsys):
    write_data(tmp_path)
    (tmp_path / "eval").mkdir()
    write_data(tmp_path / "eval")
    manifest = {
        "kind": "packed",
        "files": [],
        "num_sequences": 30,
        "num_packs": 15,
        "histogram": {"lengths": [6]},
        "vocab_size": 31,
        "vocab_sha256": "a",
    }
    for change, message in (
        ({"vocab_size": 32}, "the vocabulary of `input_file` must be at most vocab_size=31 of"),
        (
            {"histogram": {"lengths": [6, 25]}},
            "longest sequence of `input_file` must be at most max_position",
        ),
        ({"vocab_sha256": "b"}, "all records must be of one vocabulary"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        (tmp_path / "eval" / "manifest.json").write_text(json.dumps(manifest))
        assert run(*arguments(tmp_path, tmp_path / "run")) == 2
        assert message in capsys.readouterr().err
        # what reading the files told is kept for the next try
        assert {path.name for path in tmp_path.glob("run/*")} <= {SCANS_FILE}


class BuildsError(Exception):
    """The run has gone on to build its model."""


@pytest.fixture
def builds(monkeypatch):
    def start_engine(*_):
        raise BuildsError

    monkeypatch.setattr(pretraining.Run, "start_engine", start_engine)


def write_start(folder, file_name, tensor, **change):
    """A checkpoint with a config and one tensor; its name says whose it is, and with which head."""
    folder.mkdir()
    stored = dataclasses.replace(CONFIG, **{"num_hidden_layers": 1, **change})
    (folder / file_name).write_text(json.dumps({"model_type": "bert", **dataclasses.asdict(stored)}))
    save_file({tensor: np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


OURS, HUGGING_FACE = ("bert_config.json", "bert/a"), ("config.json", "bert.a")


@pytest.mark.usefixtures("builds")
@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        *(
            (form, change, message)
            for form in (OURS, HUGGING_FACE)
            for change, message in (
                ({}, None),
                ({"hidden_dropout_prob": 0.5}, None),
                ({"hidden_size": 32}, "hidden_size must be 16. Received: 32."),
                ({"num_hidden_layers": 3}, "num_hidden_layers must be 1. Received: 3."),
                ({"layer_norm_eps": 0.5}, "layer_norm_eps must be 1e-12. Received: 0.5."),
            )
        ),
        (OURS, {"vocab_size": 40}, "vocab_size must be 31. Received: 40."),
        (OURS, {"intermediate_size": 40}, "intermediate_size must be 32. Received: 40."),
        (OURS, {"max_position_embeddings": 40}, "max_position_embeddings must be 24. Received: 40."),
        (
            OURS,
            {"ablation_no_attention_mask": True},
            "ablation_no_attention_mask must be False. Received: True.",
        ),
        (HUGGING_FACE, {"ablation_no_attention_mask": True}, "ablations must be none."),
    ],
)
def test_what_an_init_checkpoint_says_of_its_model_is_read_before_a_model_is_built(
    data, tmp_path, capsys, form, change, message
):
    folder = write_start(tmp_path / "start", *form, **change)
    command = arguments(data, tmp_path / "run", init_checkpoint=folder)
    if message is None:
        with pytest.raises(BuildsError):
            run(*command)
    else:
        assert run(*command) == 2
        assert f"start holds another model: {message}" in capsys.readouterr().err
    assert not list(tmp_path.glob("run/checkpoint*"))


@pytest.mark.usefixtures("builds")
def test_a_start_with_the_models_own_head_must_be_the_same_in_every_setting(data, tmp_path, capsys):
    """A model of masked tokens alone may learn next sentences as well, as from its export."""
    masked_lm = ("bert_config.json", "predictions/output_bias")
    folder = write_start(tmp_path / "start", *masked_lm, vocab_size=40)
    assert run(*arguments(data, tmp_path / "run", init_checkpoint=folder, objective="mlm")) == 2
    assert "start holds another model: vocab_size must be 31. Received: 40." in capsys.readouterr().err
    with pytest.raises(BuildsError):
        run(*arguments(data, tmp_path / "run", init_checkpoint=folder))
    folder = write_start(tmp_path / "other", *masked_lm, hidden_size=40)
    assert run(*arguments(data, tmp_path / "run", init_checkpoint=folder)) == 2
    assert "other holds another model: hidden_size must be 16. Received: 40." in capsys.readouterr().err


@pytest.mark.usefixtures("builds")
def test_a_start_of_others_without_its_config_is_told_so(data, tmp_path, capsys):
    folder = write_start(tmp_path / "start", *HUGGING_FACE)
    (folder / "config.json").unlink()
    assert run(*arguments(data, tmp_path / "run", init_checkpoint=folder)) == 2
    assert "start must hold config.json beside model.safetensors. Received: no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{tmp_path}/none", "`init_checkpoint` must be a folder"),
        ("{tmp_path}/run/checkpoint-1", "`init_checkpoint` must be outside `output_dir`"),
    ],
)
def test_where_an_init_checkpoint_lies_is_looked_at_before_a_model_is_built(
    data, tmp_path, monkeypatch, capsys, place, message
):
    monkeypatch.setattr(pretraining.Run, "start_engine", lambda *_: pytest.fail("builds"))
    (tmp_path / "run").mkdir()
    assert run(*arguments(data, tmp_path / "run", init_checkpoint=place.format(tmp_path=tmp_path))) == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_is_not_supported_or_not_installed_is_refused(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert run(*arguments(data, tmp_path / "run")) == 2
    assert "KERAS_BACKEND must be one of tensorflow, jax. Received: torch." in capsys.readouterr().err
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(*arguments(data, tmp_path / "run")) == 2
    assert "KERAS_BACKEND=jax needs `pip install -e '.[jax]'`" in capsys.readouterr().err


def test_a_mistake_is_all_that_a_process_prints(tmp_path):
    """No start-up line of TensorFlow's surrounds it, whichever module imports that first."""
    command = [sys.executable, ROOT / "run_pretraining.py", "--input_file=none", f"--output_dir={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert "`input_file` must match at least one file. Received: 'none'." in found.stderr
