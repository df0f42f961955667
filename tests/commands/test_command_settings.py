"""Settings of the audit and of the export in effect: in what is audited and in what is written."""

import dataclasses
import json

import next_tokens
import numpy as np
import pytest
from packs import random_packs, random_sequence, write_packs
from recorded_calls import run
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

from bert_packed import cli
from bert_packed.checkpoints import checkpoint, export_formats
from bert_packed.evaluation import contamination
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.runs import exports
from bert_packed.runs.checkpoint_export import ExportConfig, export_checkpoint
from bert_packed.schema import PackSpec
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

WRITERS = ("write_hugging_face", "write_keras", "write_saved_model")
AUDIT = [{"name": "a check", "result": "pass"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Packs and checkpoints: of `a` and `b` each, and the config of `b` with another dropout."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for seed, name in enumerate("ab"):
        packs = [[random_sequence(rng, 6, 2), *pack[1:]] for pack in random_packs(rng, 9, MAX_SEQ_LENGTH)]
        write_packs(folder / f"{name}.tfrecord", packs, MAX_SEQ_LENGTH)  # of more predictions than sequences
        checkpoint.save_weights(folder / name, make_engine(seed=seed).weights(), CONFIG)
    other = dataclasses.replace(CONFIG, hidden_dropout_prob=0.25)
    checkpoint.save_weights(folder / "config", {}, other)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "word"]) + "\n")
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    return folder


def audited(**flags):
    """The object of an audit, and its arguments."""
    stand_in = {(contamination, "audit"): lambda *_: []}
    seen = run(cli.audit, AuditConfig, replaced=stand_in, **flags)
    assert seen.status == 0, seen.error
    (call,) = seen.calls["audit"]
    return call["engine"], call["batch"], call


def denominator(engine, batch, loss):
    """The count that a loss is a mean over."""
    predicted = "label_sequences" if loss == "lm_loss" else "prediction_sequences"
    counts = {"tokens": np.count_nonzero(batch[predicted]), "sequences": batch["slot_weights"].sum()}
    found = float(engine.objective.denominators(engine.objective.counts(batch))[loss])
    (name,) = (name for name, count in counts.items() if count == found)
    return name


def test_settings_of_the_audit(files, tmp_path):
    engine, batch, call = audited(input_file=files / "a.tfrecord", init_checkpoint=files / "a")
    flags = {
        "input_file": files / "b.tfrecord",
        "init_checkpoint": files / "b",
        "bert_config_file": files / "config" / "bert_config.json",
        "num_packs": 5,
        "mlm_loss": "per_token",
        "tolerance": 0.25,
        "json": tmp_path / "audit.json",
    }
    other_engine, other_batch, other_call = audited(**flags)
    assert batch["token_ids"][0].tolist() != other_batch["token_ids"][0].tolist()
    assert [len(each["token_ids"]) for each in (batch, other_batch)] == [8, 5]
    stored = checkpoint.read_weights(files / "b")
    assert all(np.array_equal(other_engine.weights()[name].numpy(), stored[name]) for name in stored)
    assert other_engine.model.config.hidden_dropout_prob == 0.25
    assert denominator(engine, batch, "mlm_loss") == "sequences"
    assert denominator(other_engine, other_batch, "mlm_loss") == "tokens"
    assert [each["tolerance"] for each in (call, other_call)] == [1e-5, 0.25]
    assert (tmp_path / "audit.json").exists()
    flash = run(cli.audit, AuditConfig, **{**flags, "attention": "flash"})
    assert flash.status == 2 and "`attention`" in flash.error


def test_the_audit_of_a_mamba_weighs_as_it_is_told(tmp_path):
    checkpoint.save_weights(tmp_path, next_tokens.make_engine().weights(), next_tokens.CONFIG)
    next_tokens.write_packs(tmp_path / "packs.tfrecord", next_tokens.packed_and_unpacked()[0])
    given = {"input_file": tmp_path / "packs.tfrecord", "init_checkpoint": tmp_path}
    for flags, name in (({}, "tokens"), ({"lm_loss": "per_sequence"}, "sequences")):
        assert denominator(*audited(**given, **flags)[:2], "lm_loss") == name


EXPORTS = {
    "default": {"init_checkpoint": "{files}/a"},
    "hf": {
        "init_checkpoint": "{files}/b",
        "vocab_file": "{files}/vocab.txt",
        "do_lower_case": False,
        "audit_file": "{files}/audit.json",
    },
    "keras": {
        "init_checkpoint": "{files}/a",
        "bert_config_file": "{files}/config/bert_config.json",
        "format": "keras",
    },
    "saved_model": {
        "init_checkpoint": "{files}/a",
        "format": "saved_model",
        "batch_size": 3,
        "max_seq_length": 20,
        "max_sequences_per_pack": 4,
        "max_predictions_per_pack": 7,
    },
}
WRITTEN = {  # the writer and arguments of it
    "default": ("write_hugging_face", {"vocab_file": "", "do_lower_case": True}),
    "hf": ("write_hugging_face", {"vocab_file": "{files}/vocab.txt", "do_lower_case": False}),
    "keras": ("write_keras", {}),
    "saved_model": ("write_saved_model", {"batch_size": 3, "spec": PackSpec(20, 4, 7)}),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_settings_of_the_export(files, tmp_path, name):
    def place(value):
        return value.format(files=files) if isinstance(value, str) else value

    flags = {flag: place(value) for flag, value in EXPORTS[name].items()}
    writers = [*((export_formats, writer) for writer in WRITERS), (exports, "write_model_card")]
    stand_ins = {writer: lambda *_: None for writer in writers}
    seen = run(export_checkpoint, ExportConfig, replaced=stand_ins, output_dir=tmp_path / name, **flags)
    assert seen.status == 0 and (tmp_path / name).is_dir()
    cards = [call["audit"] for call in seen.calls.pop("write_model_card", [])]
    assert cards == {"default": [None], "hf": [AUDIT]}.get(name, [])
    writer, expected = WRITTEN[name]
    assert [*seen.calls] == [writer]
    (call,) = seen.calls[writer]
    assert {argument: call[argument] for argument in expected} == {k: place(v) for k, v in expected.items()}
    assert call["folder"].name == f"{name}.partial"
    assert call["model"].config.hidden_dropout_prob == (0.25 if name == "keras" else 0)
    stored = checkpoint.read_weights(flags["init_checkpoint"])
    weights = named_weights(call["model"])
    assert all(np.array_equal(weights[tensor].numpy(), stored[tensor]) for tensor in stored)
