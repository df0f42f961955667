"""Every flag of the audit and of the export arrives at what audits and at what writes."""

import contextlib
import dataclasses
import inspect
import io
import json
import types

import next_tokens
import numpy as np
import pytest
from packs import random_packs, random_sequence, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

from bert_packed import audit, export
from bert_packed.checkpoints import checkpoint, export_formats
from bert_packed.core import command_line
from bert_packed.evaluation import contamination
from bert_packed.runs import model_card
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


def run(main, config_class, recorded, **flags):
    """A command under flags, with functions replaced: their arguments by name, status and errors."""
    seen = types.SimpleNamespace(calls={})

    def recording(function):
        def call(*arguments, **keywords):
            seen.calls[function.__name__] = inspect.signature(function).bind(*arguments, **keywords).arguments
            return []

        return call

    argv = ["command", *(f"--{name}={value}" for name, value in flags.items())]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as error:
        for module, name in recorded:
            patch.setattr(module, name, recording(getattr(module, name)))
        with contextlib.redirect_stdout(io.StringIO()):
            seen.status = command_line.run(main, config_class, "", argv)
    seen.error = error.getvalue()
    return seen


def start_of(weights):
    return weights["bert/embeddings/word_embeddings"].numpy().tolist()


@pytest.fixture(scope="module")
def audits(files, tmp_path_factory):
    given = {"input_file": files / "a.tfrecord", "init_checkpoint": files / "a"}
    changed = {
        "input_file": files / "b.tfrecord",
        "init_checkpoint": files / "b",
        "bert_config_file": files / "config" / "bert_config.json",
        "num_packs": 5,
        "mlm_loss": "per_token",
        "tolerance": 0.25,
        "json": tmp_path_factory.mktemp("audit") / "audit.json",
    }
    recorded = [(contamination, "audit")]
    made = [run(audit.main, audit.AuditConfig, recorded, **flags) for flags in (given, changed)]
    assert [seen.status for seen in made] == [0, 0]
    flash = run(audit.main, audit.AuditConfig, recorded, **given, attention="flash")
    folder = tmp_path_factory.mktemp("mamba")
    checkpoint.save_weights(folder, next_tokens.make_engine().weights(), next_tokens.CONFIG)
    next_tokens.write_packs(folder / "packs.tfrecord", next_tokens.packed_and_unpacked()[0])
    given = {"input_file": folder / "packs.tfrecord", "init_checkpoint": folder}
    mambas = [
        run(audit.main, audit.AuditConfig, recorded, **given, **flags)
        for flags in ({}, {"lm_loss": "per_sequence"})
    ]
    assert [seen.status for seen in mambas] == [0, 0]
    return made, changed["json"], flash, mambas


def denominator_of(call, loss):
    """What a loss is a mean over."""
    objective, batch = call["engine"].objective, call["batch"]
    found = float(objective.denominators(objective.counts(batch))[loss])
    counts = {"tokens": np.count_nonzero(batch["label_sequences"]), "sequences": batch["slot_weights"].sum()}
    (name,) = (name for name, count in counts.items() if count == found)
    return name


def denominator(objective, batch):
    return float(objective.denominators(objective.counts(batch))["mlm_loss"])


AUDITED = {
    "input_file": lambda call, files: call["batch"]["token_ids"][0].tolist(),
    "init_checkpoint": lambda call, files: start_of(call["engine"].weights()),
    "bert_config_file": lambda call, files: call["engine"].model.config.hidden_dropout_prob,
    "num_packs": lambda call, files: len(call["batch"]["token_ids"]),
    "mlm_loss": lambda call, files: (
        denominator(call["engine"].objective, call["batch"])
        == np.count_nonzero(call["batch"]["prediction_sequences"])
    ),
    "tolerance": lambda call, files: call.get("tolerance"),
}
EXPECTED = {"bert_config_file": 0.25, "num_packs": 5, "mlm_loss": True, "tolerance": 0.25}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(audit.AuditConfig)])
def test_a_setting_of_the_audit_arrives(files, audits, name):
    made, report, flash, mambas = audits
    if name == "json":
        assert report.exists()
    elif name == "attention":
        assert flash.status == 2 and "`attention`" in flash.error
    elif name == "lm_loss":
        assert [denominator_of(seen.calls["audit"], "lm_loss") for seen in mambas] == ["tokens", "sequences"]
    else:
        one, other = (AUDITED[name](seen.calls["audit"], files) for seen in made)
        assert one != other
        assert name not in EXPECTED or other == EXPECTED[name]


def test_the_audit_is_of_the_checkpoint(files, audits):
    stored = checkpoint.read_weights(files / "b")
    weights = audits[0][1].calls["audit"]["engine"].weights()
    assert all(np.array_equal(weights[name].numpy(), values) for name, values in stored.items())


@pytest.fixture(scope="module")
def exports(files, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("exports")
    recorded = [*((export_formats, name) for name in WRITERS), (model_card, "write_model_card")]
    shapes = dict(zip(SHAPES, (3, 20, 4, 7), strict=True))
    flags = {
        "default": {"init_checkpoint": files / "a"},
        "hf": {
            "init_checkpoint": files / "b",
            "vocab_file": files / "vocab.txt",
            "do_lower_case": False,
            "audit_file": files / "audit.json",
        },
        "keras": {
            "init_checkpoint": files / "a",
            "bert_config_file": files / "config" / "bert_config.json",
            "format": "keras",
        },
        "saved_model": {"init_checkpoint": files / "a", "format": "saved_model", **shapes},
    }
    made = {
        name: run(export.main, export.ExportConfig, recorded, output_dir=tmp / name, **its)
        for name, its in flags.items()
    }
    assert {seen.status for seen in made.values()} == {0}
    assert all((tmp / name).is_dir() for name in made)
    return made


SHAPES = ("batch_size", "max_seq_length", "max_sequences_per_pack", "max_predictions_per_pack")
SAVED = {"batch_size": 3, "spec": PackSpec(20, 4, 7)}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(export.ExportConfig)])
def test_a_setting_of_the_export_arrives(files, exports, name):
    writers = {made: next(iter(seen.calls)) for made, seen in exports.items()}
    calls = {made: next(iter(seen.calls.values())) for made, seen in exports.items()}
    if name == "init_checkpoint":
        stored = checkpoint.read_weights(files / "b")["bert/embeddings/word_embeddings"]
        assert start_of(named_weights(calls["hf"]["model"])) == stored.tolist()
        assert start_of(named_weights(calls["default"]["model"])) != stored.tolist()
    elif name == "output_dir":
        assert {call["folder"].name for call in calls.values()} == {f"{made}.partial" for made in exports}
    elif name == "format":
        assert [writers[made] for made in ("default", "keras", "saved_model")] == list(WRITERS)
    elif name == "bert_config_file":
        assert calls["keras"]["model"].config.hidden_dropout_prob == 0.25
        assert calls["default"]["model"].config.hidden_dropout_prob == 0
    elif name in ("vocab_file", "do_lower_case"):
        want = {"vocab_file": ("", str(files / "vocab.txt")), "do_lower_case": (True, False)}[name]
        assert (calls["default"][name], calls["hf"][name]) == want
    elif name == "audit_file":
        cards = {made: seen.calls.get("write_model_card", {}).get("audit") for made, seen in exports.items()}
        assert cards == {"default": None, "hf": AUDIT, "keras": None, "saved_model": None}
    else:
        assert name in SHAPES
        assert {what: calls["saved_model"][what] for what in SAVED} == SAVED
