"""TensorFlow and JAX train alike, and a checkpoint or a run goes from one to the other."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import other_backend
import pytest
from safetensors.numpy import load_file
from tiny import CONFIG, write_data

from bert_packed import cli
from bert_packed.checkpoints import checkpoint
from bert_packed.core import command_line
from bert_packed.runs.pretraining_config import PretrainingConfig

pytest.importorskip("jax", reason="pip install -e '.[jax]'")

pytestmark = pytest.mark.slow  # both backends compile twice

TESTS = Path(__file__).resolve().parents[1]
OTHER = {"tensorflow": "jax", "jax": "tensorflow"}[keras.backend.backend()]


def run_other(*command):
    """A Python command under the other backend: what it prints."""
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KERAS_BACKEND": OTHER, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 20 steps here, with checkpoints; the same there: folder and losses."""
    folder = tmp_path_factory.mktemp("run")
    engine = other_backend.training_engine()
    checkpoint.save_checkpoint(folder, 0, engine, CONFIG, other_backend.STATE)
    losses = other_backend.train(engine, range(other_backend.NUM_STEPS))
    engine = other_backend.training_engine(other_backend.WITH_DROPOUT)
    other_backend.train(engine, range(1))
    checkpoint.save_checkpoint(folder / "dropout", 1, engine, other_backend.WITH_DROPOUT, other_backend.STATE)
    run_other(TESTS / "other_backend.py", folder)
    return folder, np.array(losses), np.array(json.loads((folder / "losses.json").read_text()))


def test_the_same_curve_for_20_steps(trained):
    _, here, there = trained
    assert here.shape == there.shape == (20, 2)
    assert here[-4:, 0].mean() < 0.9 * here[:4, 0].mean()  # it learns: the curve is more than its start
    np.testing.assert_allclose(there, here, rtol=1e-5)


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.TRAINING])
def test_a_checkpoint_comes_back_bit_for_bit(trained, name):
    folder, _, _ = trained
    ours, theirs = (load_file(folder / kind / "checkpoint-1" / name) for kind in ("dropout", "resaved"))
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert values.dtype == theirs[key].dtype, key
        np.testing.assert_array_equal(values, theirs[key], err_msg=key)
    if name == checkpoint.TRAINING:
        # five micro-batches have drawn
        assert ours["lamb/iteration"] == 1 and ours["dropout_seed/0"][1] == 5


def read_losses(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return np.array([(row["mlm_loss"], row["nsp_loss"]) for row in csv.DictReader(file)], float)


def test_a_run_goes_on_under_the_other_backend(tmp_path):
    write_data(tmp_path)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    flags = {
        "input_file": f"{tmp_path}/*.tfrecord",
        "bert_config_file": f"{tmp_path}/bert_config.json",
        "train_batch_size": 4,
        "micro_batch_size": 2,
        "num_train_steps": 5,
        "num_warmup_steps": 2,
        "learning_rate": 0.01,
        "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0,
        "save_checkpoints_steps": 3,
        "log_steps": 1,
    }
    command = ["run_pretraining.py", *(f"--{name}={value}" for name, value in flags.items())]
    assert command_line.run(cli.pretrain, PretrainingConfig, [*command, f"--output_dir={whole}"]) == 0
    shutil.copytree(whole, moved)
    shutil.rmtree(moved / "checkpoint-5")
    printed = run_other(TESTS.parent / command[0], *command[1:], f"--output_dir={moved}")
    assert f"continues from {moved}/checkpoint-3" in printed and "compiled   1 training" in printed
    here = keras.backend.backend()
    segments = json.loads((moved / "run.json").read_text())["segments"]
    assert [(one["first_step"], one["backend"]) for one in segments] == [(0, here), (3, OTHER)]
    assert all(one["peak_flops"] > 1e6 for one in segments)
    got, want = read_losses(moved), read_losses(whole)
    assert got.shape == want.shape == (5, 2)
    np.testing.assert_array_equal(got[:3], want[:3])
    np.testing.assert_allclose(got[3:], want[3:], rtol=1e-5)
