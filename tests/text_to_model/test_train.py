"""`bert-packed train`: every step is taken once, and a kill costs none."""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import CONFIG
from train_calls import FILES, LENGTH, finish, flags_of, newest, times, weights_of, write_inputs

import bert_packed
from bert_packed import TrainConfig
from bert_packed.core.command_line import parse
from bert_packed.core.settings import InputError
from bert_packed.runs.pretraining_config import PretrainingConfig
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig

ROOT = Path(__file__).parents[2]
STEPS = ("instances", "packs", "proof", "training", "audit", "export")
TEXTS = ["doc1 doc2", "doc3", "doc4 doc5 doc6 doc7"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    return finish(text, tmp_path_factory.mktemp("finished") / "my [1]")


def test_every_step_leaves_what_it_made(finished):
    packs = json.loads((finished / "packed/train/manifest.json").read_text())
    assert packs["packing_factor"] > 1.3
    proof = json.loads((finished / "proof.json").read_text())
    assert proof["splits"][0] == {
        "data": "train",
        "input sequences": packs["num_sequences"],
        "missing": 0,
        "packed sequences": packs["num_sequences"],
        "unexpected": 0,
    }
    audit = json.loads((finished / "audit.json").read_text())
    assert len(audit) > 10 and {row["result"] for row in audit} == {"pass"}
    card = (finished / "model" / "README.md").read_text()
    assert "neighbors: gradient on their embeddings" in card


def test_the_model_gives_vectors(finished):
    """By its folder alone; packed as alone."""
    encoder = bert_packed.load_encoder(finished / "model")
    vectors = encoder.encode(TEXTS)
    assert vectors.shape == (3, CONFIG.hidden_size) and encoder.packing_factor(TEXTS) == 3
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(encoder.encode([text])[0], vector, atol=1e-5)
    of_run = bert_packed.load_encoder(finished / "run").encode(TEXTS)
    np.testing.assert_allclose(of_run, vectors, atol=1e-6)


def test_what_was_chosen_is_a_flagfile_of_each_command(finished):
    def read(name, config_class):
        path = finished / "flags" / f"{name}.flags"
        assert f"--flagfile={path}" in path.read_text().splitlines()[0]
        return parse(config_class, ["x", f"--flagfile={path}"])

    created, packed = read("create", CreateConfig), read("pack-eval", PackConfig)
    assert (created.objective, created.dupe_factor, created.max_seq_length) == ("mlm", 1, LENGTH)
    assert packed.input_file == f"{glob.escape(str(finished))}/instances/eval-*.tfrecord"
    training = read("pretrain", PretrainingConfig)
    assert (training.masking, training.objective, training.optimizer) == ("dynamic", "mlm", "adam")
    num_packs = json.loads((finished / "packed/train/manifest.json").read_text())["num_packs"]
    assert training.num_train_steps == round(2 * num_packs / training.train_batch_size)
    assert (finished / f"run/checkpoint-{training.num_train_steps}").is_dir()


def test_a_call_that_is_repeated_does_nothing(text, finished, capsys):
    before = times(finished)
    assert bert_packed.train(TrainConfig(**flags_of(text, finished))).model_dir == str(finished / "model")
    assert times(finished) == before
    shown = capsys.readouterr().out
    assert [f"{number}/6 {name}: done before" in shown for number, name in enumerate(STEPS, 1)] == [True] * 6


@pytest.mark.parametrize("missing", ["model", "proof.json", "packed/eval"])
def test_a_step_whose_result_is_gone_is_taken_again(text, finished, missing, capsys):
    """And those after it, which depend on it; but training, whose packs are the same ones."""
    before, weights = times(newest(finished)), weights_of(finished)
    path = finished / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    bert_packed.train(TrainConfig(**flags_of(text, finished)))
    shown = capsys.readouterr().out
    assert path.exists() and shown.count("done before") < len(STEPS)
    assert ("export: done before" in shown) == (missing == "proof.json")
    assert times(newest(finished)) == before
    assert all((weights[name] == values).all() for name, values in weights_of(finished).items())


def test_the_same_call_may_be_made_elsewhere(text, finished, monkeypatch, capsys):
    before = times(finished)
    monkeypatch.chdir(finished)
    relative = {name: os.path.relpath(text / path) for name, path in FILES.items()}
    bert_packed.train(TrainConfig(**flags_of(text, ".", **relative)))
    assert capsys.readouterr().out.count("done before") == len(STEPS) and times(finished) == before


@pytest.mark.slow
def test_hours_and_a_checkpoint_to_start_from(text, finished, tmp_path):
    """Steps by their time, measured; the vocabulary and the shape of the start; a text of one document."""
    flags = flags_of(text, tmp_path / "my", vocab_file="", bert_config_file="", num_train_epochs=0.0)
    flags |= {"init_checkpoint": str(finished / "model"), "train_hours": 1e-5}
    (tmp_path / "one.txt").write_text((text / "text.txt").read_text().replace("\n\n", "\n"))
    flags["input_file"] = str(tmp_path / "one.txt")
    with pytest.raises(InputError, match="`eval_fraction` must be 0 for a text of one document"):
        bert_packed.train(TrainConfig(**flags))
    bert_packed.train(TrainConfig(**flags, eval_fraction=0.0))
    vocabulary = (tmp_path / "my/instances/vocab.txt").read_text().split()
    assert vocabulary == (text / "words.txt").read_text().split()
    training = parse(PretrainingConfig, ["x", f"--flagfile={tmp_path}/my/flags/pretrain.flags"])
    assert 1 <= training.num_train_steps < 1000 and training.init_checkpoint == str(finished / "model")
    started, ended = weights_of(finished), weights_of(tmp_path / "my")
    assert {name: array.shape for name, array in ended.items()} == {n: a.shape for n, a in started.items()}
    assert any((started[name] != ended[name]).any() for name in started)


def is_inside(number, folder):
    """True once a call has begun to write what a step leaves, and before the step is over."""
    places = {
        1: folder / "instances/.incomplete",
        2: folder / "packed/train/manifest.json",  # before those of the held-out split
        3: folder / "packed/eval/manifest.json",
        4: folder / "run/checkpoint-50",
        5: folder / "flags/audit.flags",
        6: folder / "flags/export.flags",
    }
    return places[number].exists()


@pytest.mark.slow
def test_a_kill_inside_each_step_costs_nothing(text, tmp_path):
    """One after another, in one call's folder: the model is that of a call without kills, bit for bit."""
    whole, folder = tmp_path / "whole", tmp_path / "my"
    bert_packed.train(TrainConfig(**flags_of(text, whole, num_train_epochs=60.0)))
    flags = [f"--{name}={value}" for name, value in flags_of(text, folder, num_train_epochs=60.0).items()]
    command = [sys.executable, "-u", "-m", "bert_packed", "train", *flags]
    for number in range(1, len(STEPS) + 1):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            while not is_inside(number, folder):
                assert process.poll() is None
                time.sleep(0.001)
            process.kill()
            shown = process.stdout.read()
        assert process.returncode == -signal.SIGKILL and "the model is in" not in shown
        assert ("continues from" in shown) == (number > 4)  # a run that is complete, too
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    expected, found = weights_of(whole), weights_of(folder)
    assert found.keys() == expected.keys()
    for tensor, values in found.items():
        np.testing.assert_array_equal(values, expected[tensor])
    again = [*command[:-1], "--num_train_epochs=1", "--overwrite"]
    assert subprocess.run(again, cwd=ROOT).returncode == 0
    assert any((values != expected[tensor]).any() for tensor, values in weights_of(folder).items())
