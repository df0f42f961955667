"""An architecture of this test's, one folder and one row, goes through every command."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from encoder_files import TEXTS, WORDS
from exports import run_export
from gate.config import GateConfig
from tiny import MAX_SEQ_LENGTH, write_data

from bert_packed import cli
from bert_packed.architectures import registry as config
from bert_packed.architectures.packed_model import build_model, check_options
from bert_packed.architectures.registry import (
    FINETUNING_HEADS,
    MASKED_LM,
    ModelFamily,
    ablate,
    check_heads,
    load_model_config,
    override_dropout,
)
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core import command_line
from bert_packed.core.settings import InputError
from bert_packed.evaluation import inference
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.kernels.choose import choose_kernels
from bert_packed.objectives.pretraining import choose_objective
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled", "registered")]


@pytest.fixture
def registered(monkeypatch):
    """The row."""
    family = ModelFamily("Gate", GateConfig, {}, (MASKED_LM,))
    monkeypatch.setitem(config.FAMILIES, "gate", family)


def run(main, config_class, **flags):
    argv = ["program", *(f"--{name}={value}" for name, value in flags.items())]
    return command_line.run(main, config_class, argv)


@pytest.fixture
def files(tmp_path):
    """Packs, the model's config and a vocabulary."""
    write_data(tmp_path)
    shape = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gate", **shape}))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return tmp_path


def pretrain(files, **flags):
    given = {
        "input_file": f"{files}/*.tfrecord",
        "output_dir": files / "run",
        "objective": "mlm",
        "bert_config_file": files / "config.json",
        "train_batch_size": 4,
        "micro_batch_size": 2,
        "num_train_steps": 2,
        "num_warmup_steps": 1,
        "remat": "true",
    }
    return run(cli.pretrain, PretrainingConfig, **{**given, **flags})


def test_it_is_trained_audited_exported_and_gives_vectors(files, capsys):
    assert pretrain(files) == 0
    assert "attention  none: tokens see the mean of their sequence" in capsys.readouterr().out
    trained = checkpoint.read_weights(files / "run" / "checkpoint-2")
    its_config = GateConfig(num_hidden_layers=2)
    for found in (starting_weights.read_config(files / "run"), load_model_config(files / "config.json")):
        assert found == its_config
    start = named_weights(build_model(MASKED_LM, its_config, 12345))
    assert trained.keys() == start.keys()
    assert all(np.any(trained[name] != weight.numpy()) for name, weight in start.items())
    # The run goes on, and packing is invisible
    assert pretrain(files, num_train_steps=2) == 0
    data = {"input_file": f"{files}/*.tfrecord", "init_checkpoint": files / "run"}
    assert run(cli.audit, AuditConfig, **data, num_packs=4) == 0
    # The model is exported and read again
    exported = {"init_checkpoint": files / "run", "output_dir": files / "hf"}
    assert run_export(**exported, vocab_file=files / "vocab.txt") == 0
    assert json.loads((files / "hf" / "config.json").read_text())["architectures"] == ["GateForMaskedLM"]
    assert "# A packed Gate" in (files / "hf" / "README.md").read_text()
    again = build_model(MASKED_LM, its_config, 0)
    found = starting_weights.load(files / "hf", named_weights(again), its_config)
    assert (found.missing, found.unused) == ([], [])
    assert run_export(init_checkpoint=files / "run", output_dir=files / "keras", format="keras") == 0
    opened = keras.saving.load_model(files / "keras" / "model.keras")
    for name, values in trained.items():
        for model in (again, opened):
            np.testing.assert_array_equal(named_weights(model)[name].numpy(), values, err_msg=name)
    assert pretrain(files, init_checkpoint=files / "hf", output_dir=files / "second") == 0
    encoder = inference.load_encoder(files / "hf", files / "vocab.txt", max_seq_length=MAX_SEQ_LENGTH)
    together = encoder.encode(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(encoder.encode([text])[0], vector, atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs KERAS_BACKEND=tensorflow")
def test_its_saved_model_has_the_inputs_that_it_reads(tmp_path):
    import tensorflow as tf

    model = build_model(MASKED_LM, GateConfig(), 0)
    checkpoint.save_weights(tmp_path / "ours", named_weights(model), GateConfig())
    shapes = {"batch_size": 1, "max_seq_length": 4, "max_predictions_per_pack": 2}
    flags = {"init_checkpoint": tmp_path / "ours", "output_dir": tmp_path / "saved", "format": "saved_model"}
    assert run_export(**flags, **shapes) == 0
    call = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
    ids = {"input_ids": [[7, 8, 9, 0]], "input_mask": [[1, 1, 1, 0]], "masked_lm_positions": [[1, 0]]}
    assert call.structured_input_signature[1].keys() == ids.keys()
    got = call(**{name: tf.constant(values) for name, values in ids.items()})
    names = {
        "input_ids": "token_ids",
        "input_mask": "sequence_ids",
        "masked_lm_positions": "prediction_positions",
    }
    batch = {names[name]: np.array(values, np.int32) for name, values in ids.items()}
    want = model({**batch, "position_ids": np.array([[0, 1, 2, 0]])})
    np.testing.assert_allclose(got["mlm_logits"], want["mlm_logits"], atol=1e-6)


OURS = GateConfig()
DROPPED = SimpleNamespace(hidden_dropout_prob=0.1, attention_probs_dropout_prob=-1)
REFUSED = [
    (lambda: choose_objective("mlm_nsp", OURS, None), "`bert_config_file` must be a BERT for"),
    (lambda: choose_kernels("flash", OURS, 128, "tpu"), "`attention` must not be flash for a Gate,"),
    (lambda: ablate(OURS, "no_attention_mask"), "`ablation` must be empty for a Gate. Received:"),
    (lambda: override_dropout(OURS, DROPPED), "`hidden_dropout_prob` must be -1 for a Gate,"),
    (lambda: check_options(OURS, layout=7), "`layout` must be left out for a Gate. Received: 7."),
    (lambda: check_heads(OURS, FINETUNING_HEADS, "given"), "`given` must be of a BERT or ModernBERT."),
    (lambda: build_model("pretraining", OURS, 0), "`bert_config_file` must be of a BERT. Received"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_unsupported_options_are_refused(refused, message):
    with pytest.raises(InputError) as caught:
        refused()
    assert message in str(caught.value)


def test_it_gets_no_kernel_of_attention(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert choose_kernels("auto", OURS, 128, "tpu").options == {}


def test_a_command_refuses_it_in_one_line(files, capsys):
    assert pretrain(files, attention="flash") == 2
    error = capsys.readouterr().err
    assert REFUSED[1][1] in error and error.count("\n") == 1
