"""The audit passes a sound model and catches each planted fault, by the check that is meant for it."""

import dataclasses
import json

import numpy as np
import pytest
from keras import ops
from packs import packed_and_unpacked, random_packs, write_packs
from recorded_calls import assert_refused, run
from tiny import CONFIG, MAX_SEQ_LENGTH, SHALLOW, make_engine, replace_sums, write_data

from bert_packed import cli
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import EMBEDDING, QUESTION_ANSWERING, ablate
from bert_packed.checkpoints import checkpoint
from bert_packed.checkpoints.sentence_transformers import VectorSettings, write_settings
from bert_packed.evaluation import contamination
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.evaluation.contamination import unpack_batch
from bert_packed.layers import context
from bert_packed.layers.context import PackContext
from bert_packed.objectives.pretraining import pretraining_sums
from bert_packed.tasks.embed import losses
from bert_packed.training.engines.engine import named_weights

CHANGE, GRADIENT = "neighbors: change of hidden_states", "neighbors: gradient on their embeddings"
STATES, WEIGHTS = "unpacked: hidden_states", "unpacked: gradients of all weights"
MLM_LOSS, NSP_LOSS = "unpacked: mlm_loss", "unpacked: nsp_loss"

WITH_DROPOUT = dataclasses.replace(SHALLOW, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)


def failed(engine, batch):
    return [check.name for check in contamination.audit(engine, batch) if not check.passed]


@pytest.fixture
def batch():
    """Two packs, of four and of three sequences."""
    packed = {name: values[:2] for name, values in packed_and_unpacked()[0].items()}
    assert contamination.num_neighbours(packed) == 2
    return packed


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("mlm_loss", "config"), [("per_sequence", SHALLOW), ("per_token", WITH_DROPOUT)])
def test_a_sound_model_passes(batch, mlm_loss, config):
    """The model has dropout: nothing here is training."""
    assert failed(make_engine(mlm_loss, config, micro_batch_size=2), batch) == []


def test_unpacking_is_what_a_plain_loop_built():
    packed, want = packed_and_unpacked()
    got, slots = unpack_batch(packed, multiple=4)
    assert len(slots) == 11 and slots[4].tolist() == [1, 1]
    for name, values in want.items():
        np.testing.assert_array_equal(got[name][:11, : values.shape[1]], values, err_msg=name)
        assert not got[name][:11, values.shape[1] :].any() and not got[name][11:].any()
        assert len(got[name]) == 12


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


def no_mask(monkeypatch, engine, batch):
    def everywhere(ids):
        return ops.ones_like(ids[:, None, :, None] + ids[:, None, None, :], "bool")

    monkeypatch.setattr(context, "attention_mask", everywhere)


def last_layer_without_mask(monkeypatch, engine, batch):
    attention = engine.model.bert.blocks[-1].attention
    call = attention.call

    def call_without_mask(hidden, context, training=None):
        everywhere = PackContext(ops.ones_like(context.sequence_ids_BS), None)
        return call(hidden, everywhere, training=training)

    monkeypatch.setattr(attention, "call", call_without_mask)


def positions_that_go_on(monkeypatch, engine, batch):
    batch["position_ids"] = np.tile(np.arange(MAX_SEQ_LENGTH, dtype=np.int32), (2, 1))


def next_sentence_on_the_first_cls(monkeypatch, engine, batch):
    head = engine.model.next_sentence
    call = head.call
    monkeypatch.setattr(head, "call", lambda hidden, positions, **_: call(hidden, positions * 0))


def next_sentence_beside_the_cls(monkeypatch, engine, batch):
    beside = np.where(batch["slot_weights"] > 0, batch["cls_positions"] + 1, 0)
    batch["cls_positions"] = beside.astype(np.int32)


def nan_weights(monkeypatch, engine, batch):
    engine.model.bert.blocks[0].attention.query.bias.assign(np.full(16, np.nan))


def an_ignored_input(monkeypatch, engine, batch):
    engine.model.bert.embeddings.norm.gamma.assign(np.zeros(16))


# A fault has the checks that must fail, and those that must not
FAULTS = [
    (no_mask, {CHANGE, GRADIENT, STATES, MLM_LOSS, NSP_LOSS, WEIGHTS}, set()),
    (last_layer_without_mask, {CHANGE, GRADIENT, STATES}, set()),
    (positions_that_go_on, {STATES, MLM_LOSS, NSP_LOSS, WEIGHTS}, {CHANGE}),
    (
        next_sentence_on_the_first_cls,
        {"neighbors: change of nsp_logits", GRADIENT, "unpacked: nsp_logits", NSP_LOSS},
        {MLM_LOSS},
    ),
    (next_sentence_beside_the_cls, {"unpacked: nsp_logits", NSP_LOSS}, set()),
    (lambda _, engine, batch: replace_sums(engine, per_pack_mean), {MLM_LOSS, WEIGHTS}, {STATES, CHANGE}),
    (lambda _, engine, batch: replace_sums(engine, per_slot_mean), {MLM_LOSS, WEIGHTS}, {STATES, CHANGE}),
    (nan_weights, {STATES, CHANGE}, set()),
    (an_ignored_input, {"changed tokens whose own state stays"}, set()),
]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("plant", "caught", "passed"), FAULTS)
def test_a_fault_is_caught_by_the_check_for_it(monkeypatch, batch, plant, caught, passed):
    config = CONFIG if plant is last_layer_without_mask else SHALLOW
    engine = make_engine(config=config, micro_batch_size=2)
    plant(monkeypatch, engine, batch)
    found = set(failed(engine, batch))
    assert caught <= found and not passed & found


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    write_data(folder)
    checkpoint.save_weights(folder / "model", make_engine(config=SHALLOW).weights(), WITH_DROPOUT)
    return folder


def flags_of(folder, **changes):
    return {
        "input_file": f"{folder}/*.tfrecord",
        "init_checkpoint": folder / "model",
        "num_packs": 4,
        "json": folder / "audit.json",
        **changes,
    }


def run_audit(folder, **changes):
    return run(cli.audit, AuditConfig, **flags_of(folder, **changes))


def test_command_passes(on_disk):
    seen = run_audit(on_disk)
    rows = json.loads((on_disk / "audit.json").read_text())
    assert seen.status == 0 and f"all {len(rows)} checks passed" in seen.out and "FAIL" not in seen.out
    assert all(row["largest"] == 0 for row in rows if row["name"].startswith("neighbors"))


def test_the_table_says_what_the_checks_say(on_disk, monkeypatch):
    checks = [contamination.Check("small", 0.25, 0.5), contamination.Check("large", 1.0, 0.5)]
    given = []
    monkeypatch.setattr(contamination, "audit", lambda *of: given.append(of) or checks)
    seen = run_audit(on_disk, num_packs=2)
    ((_, batch, _),) = given
    assert batch["slot_weights"].sum(axis=1).tolist() == [4, 3]  # chosen: the first two packs have 4 and 2
    rows = json.loads((on_disk / "audit.json").read_text())
    assert [(row["name"], row["result"]) for row in rows[:2]] == [("small", "pass"), ("large", "FAIL")]
    assert seen.status == cli.STATUS_FAILED and f"1 of {len(rows)} checks failed" in seen.out
    assert "packs of 3 to 4 sequences, of at most 4" in seen.out and "a larger num_packs would" in seen.out


@pytest.mark.usefixtures("uncompiled")
def test_a_fine_tuned_checkpoint_passes(on_disk, tmp_path):
    model = build_model(QUESTION_ANSWERING, SHALLOW, seed=3)
    checkpoint.save_weights(tmp_path / "model", named_weights(model), SHALLOW)
    seen = run_audit(on_disk, init_checkpoint=tmp_path / "model")
    assert seen.status == 0 and "initial values kept: predictions" in seen.out
    assert "in the file only, not used: question_answering/output" in seen.out


def vector_of_the_pack(hidden_BSD, sequence_ids_BS, cls_positions_BK, pooling):
    return ops.mean(hidden_BSD, axis=1, keepdims=True) + 0.0 * hidden_BSD[:, : cls_positions_BK.shape[1]]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("pooling", "fault"), [("mean", None), ("cls", None), ("mean", vector_of_the_pack)])
def test_vectors_are_audited(on_disk, tmp_path, monkeypatch, pooling, fault):
    """And a step of their loss; where a vector is that of the pack, each check of vectors fails."""
    if fault:
        monkeypatch.setattr(losses, "pool_sequences", fault)
    checkpoint.save_weights(tmp_path / "model", named_weights(build_model(EMBEDDING, SHALLOW, 3)), SHALLOW)
    write_settings(tmp_path / "model", VectorSettings(pooling, True), SHALLOW.hidden_size)
    seen = run_audit(on_disk, init_checkpoint=tmp_path / "model")
    rows = {row["name"]: row for row in json.loads((on_disk / "audit.json").read_text())}
    of_vectors = "neighbors: change of vectors", GRADIENT, "unpacked: vectors", "unpacked: loss", WEIGHTS
    assert seen.status == (cli.STATUS_FAILED if fault else 0)
    assert {rows[name]["result"] for name in of_vectors} == {"FAIL" if fault else "pass"}
    assert {rows[name]["result"] for name in (CHANGE, STATES)} == {"pass"}
    assert f"vectors: {pooling}; the loss ranks " in seen.out
    flags = flags_of(on_disk, init_checkpoint=tmp_path / "model", mlm_loss="per_token")
    assert_refused(cli.audit, AuditConfig, "`mlm_loss` must not be given for a model of vectors", **flags)


@pytest.mark.usefixtures("uncompiled")
def test_a_checkpoint_of_an_ablation_fails(on_disk, tmp_path):
    """Its weights alone look sound without next-sentence loss, and a plain config is given for it."""
    (tmp_path / "plain.json").write_text(json.dumps(dataclasses.asdict(SHALLOW)))
    config = ablate(SHALLOW, "no_next_sentence")
    checkpoint.save_weights(tmp_path / "model", make_engine(config=config).weights(), config)
    flags = {"init_checkpoint": tmp_path / "model", "bert_config_file": tmp_path / "plain.json"}
    seen = run_audit(on_disk, **flags)
    failed = [line for line in seen.out.splitlines() if "FAIL" in line]
    assert seen.status == cli.STATUS_FAILED and len(failed) == 1
    assert failed[0].startswith("settings: ablations of the checkpoint")


def test_packs_of_one_are_refused(on_disk, tmp_path):
    packs = random_packs(np.random.default_rng(0), 3, MAX_SEQ_LENGTH, max_sequences=1)
    write_packs(tmp_path / "one.tfrecord", packs, MAX_SEQ_LENGTH)
    flags = flags_of(on_disk, input_file=tmp_path / "one.tfrecord")
    assert_refused(cli.audit, AuditConfig, "must hold several sequences", **flags)
