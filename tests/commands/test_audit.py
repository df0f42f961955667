"""The audit passes a sound model and catches each planted fault, by the check that is meant for it."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from keras import ops
from packs import packed_and_unpacked, random_packs, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine, replace_sums, write_data

from bert_packed import cli
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import QUESTION_ANSWERING, ablate
from bert_packed.checkpoints import checkpoint
from bert_packed.core.command_line import run
from bert_packed.evaluation import contamination
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.evaluation.contamination import unpack_batch
from bert_packed.layers import context
from bert_packed.layers.context import PackContext
from bert_packed.objectives.pretraining import pretraining_sums
from bert_packed.training.engines.engine import named_weights

CHANGE, GRADIENT = "neighbors: change of hidden_states", "neighbors: gradient on their embeddings"
STATES, WEIGHTS = "unpacked: hidden_states", "unpacked: gradients of all weights"
MLM_LOSS, NSP_LOSS = "unpacked: mlm_loss", "unpacked: nsp_loss"

WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)


def failed(engine, batch):
    """Names of the checks that fail, uncompiled: a tiny model compiles for longer than it runs."""
    checks = contamination.audit(engine, batch, compile=lambda function, _: function)
    return [check.name for check in checks if not check.passed]


@pytest.fixture
def batch():
    packed, _ = packed_and_unpacked()
    assert contamination.num_neighbours(packed) == 3
    return packed


@pytest.fixture
def engine():
    return make_engine(micro_batch_size=5)


@pytest.mark.parametrize(("mlm_loss", "config"), [("per_sequence", CONFIG), ("per_token", WITH_DROPOUT)])
def test_a_sound_model_passes(batch, mlm_loss, config):
    """With dropout too: nothing here is training."""
    assert failed(make_engine(mlm_loss, config, micro_batch_size=5), batch) == []


def test_unpacking_is_what_a_plain_loop_built():
    packed, want = packed_and_unpacked()
    got, slots = unpack_batch(packed, multiple=4)
    assert len(slots) == 11 and slots[4].tolist() == [1, 1]
    for name, values in want.items():
        np.testing.assert_array_equal(got[name][:11, : values.shape[1]], values, err_msg=name)
        assert not got[name][:11, values.shape[1] :].any() and not got[name][11:].any()
        assert len(got[name]) == 12


def test_no_mask_is_caught(monkeypatch, engine, batch):
    monkeypatch.setattr(
        context,
        "attention_mask",
        lambda ids: ops.ones_like(ids[:, None, :, None] + ids[:, None, None, :], "bool"),
    )
    assert {CHANGE, GRADIENT, STATES, MLM_LOSS, NSP_LOSS, WEIGHTS} <= set(failed(engine, batch))


@pytest.mark.parametrize("layer", [0, 1])
def test_one_layer_without_mask_is_caught(monkeypatch, engine, batch, layer):
    attention = engine.model.bert.blocks[layer].attention
    call = attention.call
    monkeypatch.setattr(
        attention,
        "call",
        lambda hidden, context, training=None: call(
            hidden, PackContext(ops.ones_like(context.sequence_ids_BS), None), training=training
        ),
    )
    assert {CHANGE, GRADIENT, STATES} <= set(failed(engine, batch))


def test_positions_that_go_on_are_caught(engine, batch):
    batch["position_ids"] = np.tile(np.arange(MAX_SEQ_LENGTH, dtype=np.int32), (5, 1))
    found = failed(engine, batch)
    assert {STATES, MLM_LOSS, NSP_LOSS, WEIGHTS} <= set(found) and CHANGE not in found


def test_next_sentence_on_the_first_cls_is_caught(monkeypatch, engine, batch):
    head = engine.model.next_sentence
    call = head.call
    monkeypatch.setattr(head, "call", lambda hidden, positions, **_: call(hidden, positions * 0))
    found = set(failed(engine, batch))
    assert {"neighbors: change of nsp_logits", GRADIENT, "unpacked: nsp_logits", NSP_LOSS} <= found
    assert MLM_LOSS not in found


def test_next_sentence_beside_the_cls_is_caught(engine, batch):
    batch["cls_positions"] = np.where(batch["slot_weights"] > 0, batch["cls_positions"] + 1, 0).astype(
        np.int32
    )
    assert {"unpacked: nsp_logits", NSP_LOSS} <= set(failed(engine, batch))


def nll_and_sums(outputs, batch):
    nll = ops.sparse_categorical_crossentropy(
        batch["prediction_ids"], outputs["mlm_logits"], from_logits=True
    )
    return nll, pretraining_sums(outputs, batch, "per_sequence")


def per_pack_mean(outputs, batch):
    """Each pack's mean over its predictions: a long neighbour takes weight from a short one."""
    nll, sums = nll_and_sums(outputs, batch)
    used = ops.cast(batch["prediction_sequences"] > 0, "float32")
    mean = ops.sum(nll * used, axis=1) / ops.maximum(ops.sum(used, axis=1), 1.0)
    return {**sums, "mlm_loss": ops.sum(mean)}


def per_slot_mean(outputs, batch):
    """Each slot's mean over the packs that fill it, times the sequences: rare slots weigh too much."""
    nll, sums = nll_and_sums(outputs, batch)
    num_slots = batch["slot_weights"].shape[1]
    total = 0.0
    for slot in range(1, num_slots + 1):
        mine = ops.cast(ops.equal(batch["prediction_sequences"], float(slot)), "float32")
        per_pack = ops.sum(nll * mine, axis=1) / ops.maximum(ops.sum(mine, axis=1), 1.0)
        filled = ops.maximum(ops.sum(batch["slot_weights"][:, slot - 1]), 1.0)
        total += ops.sum(per_pack) / filled
    return {**sums, "mlm_loss": total * sums["num_sequences"] / num_slots}


@pytest.mark.parametrize("faulty_sums", [per_pack_mean, per_slot_mean])
def test_wrong_means_are_caught(engine, batch, faulty_sums):
    replace_sums(engine, faulty_sums)
    found = failed(engine, batch)
    assert {MLM_LOSS, WEIGHTS} <= set(found)
    assert STATES not in found and CHANGE not in found


def test_nan_is_caught(engine, batch):
    engine.model.bert.blocks[0].attention.query.bias.assign(np.full(16, np.nan))
    assert {STATES, CHANGE} <= set(failed(engine, batch))


def test_a_model_that_ignores_its_input_is_caught(engine, batch):
    engine.model.bert.embeddings.norm.gamma.assign(np.zeros(16))
    assert "changed tokens whose own state stays" in failed(engine, batch)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    write_data(folder)
    checkpoint.save_weights(folder / "model", make_engine().weights(), WITH_DROPOUT)
    return folder


def run_audit(folder, **changes):
    flags = {
        "input_file": f"{folder}/*.tfrecord",
        "init_checkpoint": folder / "model",
        "num_packs": 4,
        "json": folder / "audit.json",
        **changes,
    }
    return run(cli.audit, AuditConfig, ["audit", *(f"--{n}={v}" for n, v in flags.items())])


def test_command_passes(on_disk, capsys):
    assert run_audit(on_disk) == 0
    printed = capsys.readouterr().out
    rows = json.loads((on_disk / "audit.json").read_text())
    assert f"all {len(rows)} checks passed" in printed and "FAIL" not in printed
    assert all(row["largest"] == 0 for row in rows if row["name"].startswith("neighbors"))


def test_flags_arrive(on_disk, capsys, monkeypatch):
    """At the model, the batch and the checks; and the table says what these say."""
    given = []
    checks = [contamination.Check("small", 0.25, 0.5), contamination.Check("large", 1.0, 0.5)]
    monkeypatch.setattr(contamination, "audit", lambda *of: given.append(of) or checks)
    assert run_audit(on_disk, num_packs=2, mlm_loss="per_token", tolerance=0.5) == cli.STATUS_FAILED
    ((engine, batch, tolerance),) = given
    assert tolerance == 0.5
    assert batch["slot_weights"].sum(axis=1).tolist() == [4, 3]  # chosen: the first two packs have 4 and 2
    assert engine.objective.losses["mlm_loss"] == "num_predictions"
    assert engine.model.config == WITH_DROPOUT
    for name, weight in make_engine().weights().items():  # those of the checkpoint
        np.testing.assert_array_equal(engine.weights()[name].numpy(), weight.numpy())
    rows = json.loads((on_disk / "audit.json").read_text())
    assert [(row["name"], row["result"]) for row in rows[:2]] == [("small", "pass"), ("large", "FAIL")]
    printed = capsys.readouterr().out
    assert f"1 of {len(rows)} checks failed" in printed
    assert "packs of 3 to 4 sequences, of at most 4" in printed and "a larger num_packs would" in printed


def test_a_fine_tuned_checkpoint_passes(on_disk, tmp_path, capsys, monkeypatch):
    uncompiled = functools.partial(contamination.audit, compile=lambda function, _: function)
    monkeypatch.setattr(contamination, "audit", uncompiled)
    model = build_model(QUESTION_ANSWERING, CONFIG, seed=3)
    checkpoint.save_weights(tmp_path / "model", named_weights(model), CONFIG)
    assert run_audit(on_disk, init_checkpoint=tmp_path / "model") == 0
    printed = capsys.readouterr().out
    assert "in the file only, not used: question_answering/output" in printed
    assert "initial values kept: predictions" in printed


@pytest.mark.usefixtures("uncompiled")
def test_a_checkpoint_of_an_ablation_fails(on_disk, tmp_path, capsys):
    """Without next-sentence loss the weights alone look sound."""
    config = ablate(CONFIG, "no_next_sentence")
    checkpoint.save_weights(tmp_path / "model", make_engine(config=config).weights(), config)
    assert run_audit(on_disk, init_checkpoint=tmp_path / "model") == cli.STATUS_FAILED
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert len(failed) == 1 and failed[0].startswith("settings: ablations of the checkpoint")


def test_packs_of_one_are_refused(on_disk, tmp_path, capsys):
    rng = np.random.default_rng(0)
    write_packs(
        tmp_path / "one.tfrecord", random_packs(rng, 3, MAX_SEQ_LENGTH, max_sequences=1), MAX_SEQ_LENGTH
    )
    assert run_audit(on_disk, input_file=tmp_path / "one.tfrecord") == 2
    assert "must hold several sequences" in capsys.readouterr().err
