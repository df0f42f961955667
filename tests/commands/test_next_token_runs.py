"""A Mamba trained by the command: from text to figures, continued bit for bit, with rows cut across packs."""

import dataclasses
import json
import math
import shutil

import next_tokens
import numpy as np
import pytest
import recorded_calls
from causal_files import make_sequence, read_examples, write_sequences
from pretraining_command import assert_refused, assert_same_run, pretrain, read_rows
from safetensors.numpy import load_file

from bert_packed import cli, schema
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import config_json
from bert_packed.checkpoints import checkpoint
from bert_packed.evaluation import contamination
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.evaluation.model_audit import Check
from bert_packed.schema import CAUSAL_LM
from data_gen import pack_job
from data_gen.pack_config import PackConfig

NUM_ROWS = 2
CONFIGS = {
    name: dataclasses.replace(config, num_hidden_layers=1)
    for name, config in (("mamba", next_tokens.CONFIG), ("mamba2", next_tokens.MAMBA2))
}
pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled_file")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Packs, rows that are cut across packs, held-out packs, and a model."""
    folder = tmp_path_factory.mktemp("data")
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config_json(config)))
    rng, lengths = np.random.default_rng(0), [9, 1, 14, 5, 3, 8, 20, 2, 6, 4, 11, 13]
    sequences = [make_sequence(rng, n, goes_on=n == 14, vocab_size=next_tokens.VOCAB_SIZE) for n in lengths]
    write_sequences(folder / "train.tfrecord", sequences)
    write_sequences(folder / "eval.tfrecord", sequences[:4])
    for name, source, options in (
        ("packs", "train", {}),
        ("rows", "train", {"split_sequences": True, "num_rows": NUM_ROWS}),
        ("eval", "eval", {}),
    ):
        length = 12 if name == "rows" else 20
        files = {"input_file": str(folder / f"{source}.tfrecord"), "output_dir": str(folder / name)}
        pack_job.pack(PackConfig(**files, max_seq_length=length, **options))
    packs = read_examples((folder / "rows").glob("*.tfrecord"))
    write_sequences(folder / "lone.tfrecord", packs)  # with no manifest to say that they are rows
    return folder, sequences


def flags_of(data, output_dir, packs="packs", kind="mamba", **changes):
    """Flags of a short run: dict."""
    folder = data[0]
    return {
        "objective": "causal_lm",
        "input_file": f"{folder}/{packs}/*.tfrecord",
        "eval_input_file": f"{folder}/eval/*.tfrecord",
        "bert_config_file": folder / f"{kind}.json",
        "output_dir": output_dir,
        "train_batch_size": 2,
        "micro_batch_size": 1,
        "eval_batch_size": 2,
        "num_train_steps": 2,
        "num_warmup_steps": 1,
        "learning_rate": 0.01,
        "save_checkpoints_steps": 1,
        "log_steps": 1,
        **({"shuffle_buffer_size": 1} if packs == "rows" else {}),
        **changes,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_run_continues_bit_for_bit(data, tmp_path, kind):
    """Weights, moments, and the states that wait for their next pack."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert pretrain(**flags_of(data, whole, "rows", kind)).status == 0
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoint-2")
    assert pretrain(**flags_of(data, again, "rows", kind)).status == 0
    assert_same_run(again, whole)
    for name, steps in (("metrics.csv", ["1", "2"]), ("eval_metrics.csv", ["2"])):
        rows = read_rows(whole / name)
        assert [row["step"] for row in rows] == steps
        assert all(float(row["byte_perplexity"]) > 1 for row in rows)
    state = load_file(whole / "checkpoint-2" / "training.safetensors")
    carried = [values for name, values in state.items() if "carried" in name]
    assert len(carried) == 2
    assert all(len(values) == NUM_ROWS and np.abs(values).max() > 0 for values in carried)
    stored = load_file(whole / "checkpoint-2" / "model.safetensors")
    assert not [name for name in stored if "carried" in name]  # they are of the run, not of the model


@pytest.mark.parametrize("kind", CONFIGS)
def test_sequences_cut_across_packs_have_the_loss_of_whole_ones(data, tmp_path, kind):
    """If weights stay, the steps of an epoch add up to the sequences alone and uncut."""
    folder, sequences = data
    manifest = json.loads((folder / "rows" / "manifest.json").read_text())
    assert manifest["num_rows"] == NUM_ROWS and manifest["num_packs"] % NUM_ROWS == 0
    num_steps = manifest["num_packs"] // NUM_ROWS
    changes = {"learning_rate": 0, "num_train_steps": num_steps, "num_warmup_steps": 0}
    changes |= {"micro_batch_size": NUM_ROWS, "eval_input_file": "", "eval_steps": 0}
    assert pretrain(**flags_of(data, tmp_path / "run", "rows", kind, **changes)).status == 0
    names = (schema.INPUT_IDS, schema.LABEL_IDS, schema.LABEL_MASK)
    tokens, labels, used = (
        np.array([sequence[name] + [0] * (20 - len(sequence[name])) for sequence in sequences], np.int32)
        for name in names
    )
    alone = {"token_ids": tokens, "sequence_ids": np.ones_like(tokens)}
    alone["position_ids"] = np.zeros_like(tokens) + np.arange(20, dtype=np.int32)
    logits = np.asarray(build_model(CAUSAL_LM, CONFIGS[kind], 12345)(alone)["logits"]).astype(float)
    chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    total = np.sum((np.log(np.exp(logits).sum(axis=-1)) - chosen)[used > 0])
    steps = read_rows(tmp_path / "run" / "metrics.csv")
    assert [int(row["step"]) for row in steps] == list(range(1, num_steps + 1)) and num_steps >= 4
    counts = labels_of_steps(folder / "rows", num_steps)
    assert sum(counts) == np.count_nonzero(used)
    got = sum(float(row["lm_loss"]) * number for row, number in zip(steps, counts, strict=True))
    assert got == pytest.approx(total, rel=1e-5)
    assert math.isclose(float(steps[0]["perplexity"]), math.exp(float(steps[0]["lm_loss"])), rel_tol=1e-5)


def labels_of_steps(folder, num_steps):
    """Number of predictions in each step, packs in the order of their files."""
    packs = read_examples(folder.glob("*.tfrecord"))
    counts = [np.count_nonzero(one[schema.LABEL_MASK]) for one in packs]
    return [sum(counts[step * NUM_ROWS : (step + 1) * NUM_ROWS]) for step in range(num_steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "chunk", "is_broken"), [("mamba", 20, False), ("mamba2", 4, False), ("mamba2", 4, True)]
)
def test_the_audit_takes_its_checkpoints(data, tmp_path, kind, chunk, is_broken):
    tried = dataclasses.replace(CONFIGS[kind], ablation_no_position_reset=is_broken)
    checkpoint.save_weights(tmp_path, next_tokens.make_engine(config=tried).weights(), tried)
    seen = run_audit(init_checkpoint=tmp_path, input_file=f"{data[0]}/packs/*.tfrecord")
    assert seen.status == is_broken, seen.out
    assert "neighbors: change of logits" in seen.out and ("FAIL" in seen.out) == is_broken
    assert f"places of the scan's chunks of {chunk} tokens" in seen.out and "carried" not in seen.out


def run_audit(replaced=None, **flags):
    return recorded_calls.run(cli.audit, AuditConfig, replaced=replaced, **flags)


def test_the_audit_takes_rows_as_training_does(data, tmp_path, monkeypatch):
    folder, config = data[0], CONFIGS["mamba"]
    checkpoint.save_weights(tmp_path / "model", next_tokens.make_engine(config=config).weights(), config)
    given = {
        "init_checkpoint": tmp_path / "model",
        "input_file": f"{folder}/rows/*.tfrecord",
        "tolerance": 0.5,
    }
    # Other tests audit packs alone
    monkeypatch.setattr(contamination, "audit", lambda *_: [])
    found = [Check("carried", 1.0, 0.5)]
    seen = run_audit({(contamination, "audit_rows"): lambda *_: found}, **given)
    (call,) = seen.calls["audit_rows"]
    model, packs, tolerance = call.values()
    assert seen.status == 1 and model.backbone.num_rows == NUM_ROWS and tolerance == 0.5
    tokens = [one[schema.INPUT_IDS] for one in read_examples((folder / "rows").glob("*.tfrecord"))]
    np.testing.assert_array_equal(packs["token_ids"].reshape(len(tokens), -1), tokens)
    assert "carried" in seen.out and "1 of 2 checks failed" in seen.out
    message = "`num_packs` must be at least 4"
    recorded_calls.assert_refused(cli.audit, AuditConfig, message, **given, num_packs=3)


@pytest.mark.parametrize(
    ("packs", "changes", "message"),
    [
        ("packs", {"objective": "mlm_nsp"}, "`input_file` must hold records for objective=mlm_nsp"),
        ("packs", {"hidden_dropout_prob": 0.1}, "`hidden_dropout_prob` must be -1 for a Mamba"),
        ("packs", {"ablation": "no_attention_mask"}, "`ablation` must be empty or no_position_reset"),
        ("packs", {"mlm_loss": "per_token"}, "`mlm_loss` must not be given for objective=causal_lm"),
        ("rows", {"ablation": "no_position_reset"}, "`ablation` must be empty for packs made with"),
        ("rows", {"input_file": "FIRST"}, "`input_file` must be all 8 packs of one --split_sequences."),
        ("rows", {"input_file": "LONE"}, "record 3: position_ids must begin at 0, but in training on rows"),
        ("rows", {"train_batch_size": 4}, "`train_batch_size` must be 2 for packs of 2 rows"),
        ("rows", {"shuffle_buffer_size": 8}, "`shuffle_buffer_size` must be 1 for packs of 2 rows"),
        ("rows", {"lm_loss": "per_sequence"}, "`lm_loss` must be per_token for packs of 2 rows"),
        ("rows", {"distribution": "mirrored"}, "`distribution` must be none for packs of 2 rows"),
        ("rows", {"eval_input_file": "ROWS"}, "`eval_input_file` must hold packs made without"),
    ],
)
def test_a_mistake_is_one_line(data, tmp_path, packs, changes, message):
    files = {"ROWS": f"{data[0]}/rows/*.tfrecord", "LONE": f"{data[0]}/lone.tfrecord"}
    files["FIRST"] = sorted((data[0] / "rows").glob("*.tfrecord"))[0]
    changes = {name: files.get(value, value) for name, value in changes.items()}
    # A checkpoint may be due only behind the records of all steps
    changes["save_checkpoints_steps"] = 9
    assert_refused(message, **flags_of(data, tmp_path / "run", packs, **changes))
    assert not list(tmp_path.rglob("checkpoint-*"))
