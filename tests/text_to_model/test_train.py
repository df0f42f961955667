"""`bert-packed train`: every step is taken once, a kill costs none, faults stop it."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from text_files import write_text
from tiny import CONFIG

import bert_packed
from bert_packed import TrainConfig
from bert_packed.core.command_line import parse
from bert_packed.core.settings import InputError
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.train_from_text import main
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig

ROOT = Path(__file__).parents[2]
STEPS = ("instances", "packs", "proof", "training", "audit", "export")
LENGTH = 64
TEXTS = ["doc1 doc2", "doc3", "doc4 doc5 doc6 doc7"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a text, its vocabulary and the config of a model of one layer."""
    folder = tmp_path_factory.mktemp("text")
    _, vocab = write_text(folder)
    num_tokens = len(vocab.read_text().split())
    model = dataclasses.replace(
        CONFIG, vocab_size=num_tokens, num_hidden_layers=1, max_position_embeddings=LENGTH
    )
    (folder / "model.json").write_text(json.dumps(dataclasses.asdict(model)))
    return folder


def flags_of(text, output_dir, **settings):
    return {
        "input_file": str(text / "text.txt"),
        "output_dir": str(output_dir),
        "vocab_file": str(text / "words.txt"),
        "bert_config_file": str(text / "model.json"),
        "max_seq_length": LENGTH,
        "num_workers": 1,
        "num_train_epochs": 2.0,
        **settings,
    }


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The output directory of a call that took every step."""
    folder = tmp_path_factory.mktemp("finished") / "my"
    result = bert_packed.train(TrainConfig(**flags_of(text, folder)))
    assert result == dataclasses.replace(result, output_dir=str(folder), model_dir=str(folder / "model"))
    assert not result.failures and not result.exit_status
    return folder


def times(folder):
    """Times of the last change of all files."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def newest(folder):
    """The newest checkpoint."""
    return max((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def weights_of(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_every_step_leaves_what_it_made(finished):
    packs = json.loads((finished / "packed/train/manifest.json").read_text())
    assert packs["packing_factor"] > 1.3
    proof = json.loads((finished / "proof.json").read_text())
    assert proof["train"] == {
        "input sequences": packs["num_sequences"],
        "missing": 0,
        "packed sequences": packs["num_sequences"],
        "unexpected": 0,
    }
    audit = json.loads((finished / "audit.json").read_text())
    assert len(audit) > 10 and {row["result"] for row in audit} == {"pass"}
    card = (finished / "model" / "README.md").read_text()
    assert "neighbours: gradient on their embeddings" in card


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
    assert packed.input_file == str(finished / "instances/eval-*.tfrecord")
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
    assert path.exists() and capsys.readouterr().out.count("done before") < len(STEPS)
    assert times(newest(finished)) == before
    assert all((weights[name] == values).all() for name, values in weights_of(finished).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_length": 32}, r"a call must continue as it began, .*max_seq_length 64 -> 32"),
        (
            {"num_train_epochs": 0.0, "train_hours": 1.0},
            r"num_train_epochs 2\.0 -> 0\.0, train_hours 0\.0 ->",
        ),
        ({"input_file": "words.txt"}, r"`input_file` must be the text that .*train\.json names"),
    ],
)
def test_other_settings_and_texts_are_refused(text, finished, changes, message):
    before = times(finished)
    if "input_file" in changes:
        changes = {"input_file": str(text / changes["input_file"])}
    with pytest.raises(InputError, match=message):
        bert_packed.train(TrainConfig(**flags_of(text, finished, **changes)))
    assert times(finished) == before


def test_mistakes(text, tmp_path):
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(InputError, match=r"`output_dir` must be empty or an earlier call's\. .* holds mine"):
        bert_packed.train(TrainConfig(**flags_of(text, tmp_path)))
    with pytest.raises(
        InputError, match=r"`output_dir` must be a directory\. Received: .*mine, which is a file"
    ):
        bert_packed.train(TrainConfig(**flags_of(text, tmp_path / "mine")))
    with pytest.raises(InputError, match=r"`input_file` must match at least one file\. Received: 'none'"):
        bert_packed.train(TrainConfig(**flags_of(text, tmp_path / "new", input_file="none")))
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="`num_train_epochs` must be left out with train_hours"):
        TrainConfig(**flags_of(text, "x", train_hours=1.0))
    with pytest.raises(InputError, match="`masked_lm_prob` must be between 0 and 1"):
        TrainConfig(**flags_of(text, "x", masked_lm_prob=1.0))


def test_texts_are_arguments_and_flags_may_follow():
    given = ["x", "a.txt", "b.txt", "--output_dir=my", "c.txt"]
    assert parse(TrainConfig, given).input_file == "a.txt,b.txt,c.txt"
    with pytest.raises(InputError, match=r"`input_file` must be given once\. Received: a flag, and 'a.txt'"):
        parse(TrainConfig, [*given, "--input_file=d.txt"])
    with pytest.raises(InputError, match="every argument must be a flag"):
        parse(PackConfig, ["x", "a.txt"])


def test_false_packs_stop_it(text, finished, tmp_path, capsys):
    """Before a model is trained on them."""
    folder = tmp_path / "my"
    shutil.copytree(
        finished, folder, ignore=shutil.ignore_patterns("run", "model", "proof.json", "audit.json")
    )
    packs = sorted((folder / "packed/train").glob("*.tfrecord"))
    shutil.copy(packs[0], packs[1])  # some sequences twice, others never
    assert main(TrainConfig(**flags_of(text, folder))) == 1
    assert "in the inputs, not in the packs" in capsys.readouterr().err
    assert not (folder / "run").exists() and not (folder / "proof.json").exists()


def test_a_model_that_leaks_is_not_exported(text, finished, tmp_path, capsys):
    folder = tmp_path / "my"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("run", "model", "audit.json"))
    path = folder / "flags/pretrain.flags"
    chosen = path.read_text().replace(str(finished), str(folder))
    path.write_text(f"{chosen}--ablation=no_attention_mask\n")
    assert main(TrainConfig(**flags_of(text, folder))) == 1
    assert "neighbours: change of hidden_states: " in capsys.readouterr().err
    assert not (folder / "model").exists() and not (folder / "audit.json").exists()


@pytest.mark.slow
def test_hours_and_a_checkpoint_to_start_from(text, finished, tmp_path):
    """Steps by their time, measured; the vocabulary and the shape of the start."""
    flags = flags_of(text, tmp_path / "my", vocab_file="", bert_config_file="", num_train_epochs=0.0)
    flags |= {"init_checkpoint": str(finished / "model"), "train_hours": 1e-5}
    bert_packed.train(TrainConfig(**flags))
    vocabulary = (tmp_path / "my/instances/vocab.txt").read_text().split()
    assert vocabulary == (text / "words.txt").read_text().split()
    training = parse(PretrainingConfig, ["x", f"--flagfile={tmp_path}/my/flags/pretrain.flags"])
    assert 1 <= training.num_train_steps < 1000 and training.init_checkpoint == str(finished / "model")
    started, ended = weights_of(finished), weights_of(tmp_path / "my")
    assert {name: array.shape for name, array in ended.items()} == {n: a.shape for n, a in started.items()}
    assert any((started[name] != ended[name]).any() for name in started)


@pytest.mark.slow
def test_a_kill_inside_each_step_costs_nothing(text, finished, tmp_path):
    """Killed at the heading of every step, one after another: the model is that of one call, bit for bit."""
    folder = tmp_path / "my"
    flags = [f"--{name}={value}" for name, value in flags_of(text, folder).items()]
    command = [sys.executable, "-u", "-m", "bert_packed", "train", *flags]
    for number, name in enumerate(STEPS, 1):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith(f"{number}/6 {name}"):
                    assert "done" not in line
                    os.kill(process.pid, signal.SIGKILL)
                    break
            process.stdout.read()
        assert process.returncode == -signal.SIGKILL
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    expected = weights_of(finished)
    found = weights_of(folder)
    assert found.keys() == expected.keys()
    for tensor, values in found.items():
        np.testing.assert_array_equal(values, expected[tensor])
    again = [*command[:-1], "--num_train_epochs=1", "--overwrite"]
    assert subprocess.run(again, cwd=ROOT).returncode == 0
    found = weights_of(folder)
    assert any((values != expected[tensor]).any() for tensor, values in found.items())
