"""A Mamba trained by the command: from text to figures, continued bit for bit, with rows cut across packs."""

import dataclasses
import json
import math
import shutil

import next_tokens
import numpy as np
import pytest
from causal_files import make_sequence, read_examples, write_sequences
from pretraining_command import read_rows, run
from safetensors.numpy import load_file

from bert_packed import cli, schema
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import config_json
from bert_packed.checkpoints import checkpoint
from bert_packed.core import command_line
from bert_packed.evaluation import carried_states, contamination
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
        pack_job.pack(
            PackConfig(
                input_file=str(folder / f"{source}.tfrecord"),
                output_dir=str(folder / name),
                max_seq_length=length,
                **options,
            )
        )
    packs = read_examples((folder / "rows").glob("*.tfrecord"))
    write_sequences(folder / "lone.tfrecord", packs)  # with no manifest to say that they are rows
    return folder, sequences


def arguments(data, output_dir, packs="packs", kind="mamba", **changes):
    folder = data[0]
    flags = {
        "objective": "causal_lm",
        "input_file": f"{folder}/{packs}/*.tfrecord",
        "eval_input_file": f"{folder}/eval/*.tfrecord",
        "bert_config_file": folder / f"{kind}.json",
        "output_dir": output_dir,
        "train_batch_size": 2,
        "micro_batch_size": 1,
        "eval_batch_size": 2,
        "num_train_steps": 3,
        "num_warmup_steps": 1,
        "learning_rate": 0.01,
        "save_checkpoints_steps": 2,
        "log_steps": 1,
        **({"shuffle_buffer_size": 1} if packs == "rows" else {}),
        **changes,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packs", "kind"),
    [
        ("packs", "mamba"),
        ("rows", "mamba"),
        ("rows", "mamba2"),
    ],
)
def test_a_run_continues_bit_for_bit(data, tmp_path, packs, kind):
    """Weights, moments, and of rows the states that wait for their next pack."""
    assert run(*arguments(data, tmp_path / "whole", packs, kind)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-3")
    assert run(*arguments(data, tmp_path / "again", packs, kind)) == 0
    for name in ("model.safetensors", "training.safetensors"):
        want, got = (load_file(tmp_path / one / "checkpoint-3" / name) for one in ("whole", "again"))
        assert want.keys() == got.keys()
        for key, values in want.items():
            np.testing.assert_array_equal(got[key], values, err_msg=key)
    for name in ("metrics.csv", "eval_metrics.csv"):
        rows = read_rows(tmp_path / "whole" / name)
        assert rows == read_rows(tmp_path / "again" / name)
        assert [row["step"] for row in rows] == (["1", "2", "3"] if name == "metrics.csv" else ["3"])
        assert all(float(row["byte_perplexity"]) > 1 for row in rows)
    state = load_file(tmp_path / "whole" / "checkpoint-3" / "training.safetensors")
    carried = [values for name, values in state.items() if "carried" in name]
    assert len(carried) == (2 if packs == "rows" else 0)
    assert all(len(values) == NUM_ROWS and np.abs(values).max() > 0 for values in carried)
    stored = load_file(tmp_path / "whole" / "checkpoint-3" / "model.safetensors")
    assert not [name for name in stored if "carried" in name]  # they are of the run, not of the model


@pytest.mark.parametrize("kind", CONFIGS)
def test_sequences_cut_across_packs_have_the_loss_of_whole_ones(data, tmp_path, kind):
    """With weights that stay, the steps of an epoch add up to the sequences alone and uncut."""
    folder, sequences = data
    manifest = json.loads((folder / "rows" / "manifest.json").read_text())
    assert manifest["num_rows"] == NUM_ROWS and manifest["num_packs"] % NUM_ROWS == 0
    num_steps = manifest["num_packs"] // NUM_ROWS
    flags = arguments(
        data,
        tmp_path / "run",
        "rows",
        kind,
        learning_rate=0,
        num_train_steps=num_steps,
        num_warmup_steps=0,
        micro_batch_size=NUM_ROWS,
        eval_input_file="",
        eval_steps=0,
    )
    flags.append("--save_checkpoints_steps=1")
    assert run(*flags) == 0
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
@pytest.mark.parametrize(("kind", "chunk"), [("mamba", 20), ("mamba2", 4)])
def test_the_audit_takes_its_checkpoints(data, tmp_path, capsys, kind, chunk):
    folder, config = data[0], CONFIGS[kind]
    for name, changes in (("sound", {}), ("broken", {"ablation_no_position_reset": True})):
        tried = dataclasses.replace(config, **changes)
        engine = next_tokens.make_engine(config=tried)
        checkpoint.save_weights(tmp_path / name, engine.weights(), tried)
        flags = [f"--init_checkpoint={tmp_path / name}", f"--input_file={folder}/packs/*.tfrecord"]
        status = command_line.run(cli.audit, AuditConfig, ["audit.py", *flags])
        out = capsys.readouterr().out
        assert status == (1 if changes else 0), out
        assert ("neighbors: change of logits" in out) and ("FAIL" in out) == bool(changes)
        assert f"places of the scan's chunks of {chunk} tokens" in out and "carried" not in out


def test_the_audit_takes_rows_as_training_does(data, tmp_path, capsys, monkeypatch):
    folder, config = data[0], CONFIGS["mamba"]
    checkpoint.save_weights(tmp_path / "model", next_tokens.make_engine(config=config).weights(), config)
    # Of packs alone its own tests say enough
    monkeypatch.setattr(contamination, "audit", lambda *_: [])
    given = []
    monkeypatch.setattr(carried_states, "audit", lambda *of: given.append(of) or [Check("carried", 1.0, 0.5)])
    flags = [f"--init_checkpoint={tmp_path / 'model'}", f"--input_file={folder}/rows/*.tfrecord"]
    argv = ["audit.py", *flags, "--tolerance=0.5"]
    assert command_line.run(cli.audit, AuditConfig, argv) == 1
    ((model, packs, tolerance),) = given
    assert model.backbone.num_rows == NUM_ROWS and tolerance == 0.5
    tokens = [one[schema.INPUT_IDS] for one in read_examples((folder / "rows").glob("*.tfrecord"))]
    np.testing.assert_array_equal(packs["token_ids"].reshape(len(tokens), -1), tokens)
    printed = capsys.readouterr().out
    assert command_line.run(cli.audit, AuditConfig, [*argv, "--num_packs=3"]) == 2
    assert "`num_packs` must be at least 4" in capsys.readouterr().err
    assert "carried" in printed and "1 of 2 checks failed" in printed


@pytest.mark.parametrize(
    ("packs", "changes", "message"),
    [
        (
            "packs",
            {"objective": "mlm_nsp"},
            "`input_file` must hold records for objective=mlm_nsp",
        ),
        (
            "packs",
            {"bert_config_file": "bert-tiny"},
            "`bert_config_file` must be a Mamba or Mamba-2 for objective=causal_lm.",
        ),
        ("packs", {"attention": "flash"}, "`attention` must not be flash for a Mamba"),
        ("packs", {"hidden_dropout_prob": 0.1}, "`hidden_dropout_prob` must be -1 for a Mamba"),
        (
            "packs",
            {"ablation": "no_attention_mask"},
            "`ablation` must be empty or no_position_reset",
        ),
        ("packs", {"mlm_loss": "per_token"}, "`mlm_loss` must not be given for objective=causal_lm"),
        ("rows", {"ablation": "no_position_reset"}, "`ablation` must be empty for packs made with"),
        ("rows", {"input_file": "FIRST"}, "`input_file` must be all 8 packs of one --split_sequences."),
        ("rows", {"input_file": "LONE"}, "record 3: position_ids must begin at 0, but in training on rows"),
        ("rows", {"train_batch_size": 4}, "`train_batch_size` must be 2 for packs of 2 rows"),
        ("rows", {"shuffle_buffer_size": 8}, "`shuffle_buffer_size` must be 1 for packs of 2 rows"),
        ("rows", {"lm_loss": "per_sequence"}, "`lm_loss` must be per_token for packs of 2 rows"),
        ("rows", {"distribution": "mirrored"}, "`distribution` must be none for packs of 2 rows"),
        (
            "rows",
            {"eval_input_file": "ROWS"},
            "`eval_input_file` must hold packs made without",
        ),
    ],
)
def test_mistakes_are_one_line(data, tmp_path, capsys, packs, changes, message):
    files = {"ROWS": f"{data[0]}/rows/*.tfrecord", "LONE": f"{data[0]}/lone.tfrecord"}
    files["FIRST"] = sorted((data[0] / "rows").glob("*.tfrecord"))[0]
    changes = {name: files.get(value, value) for name, value in changes.items()}
    assert run(*arguments(data, tmp_path / "run", packs, **changes)) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
    assert not list(tmp_path.rglob("checkpoint-*"))
