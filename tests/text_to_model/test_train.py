"""`bert-packed train`: each step is taken once, a kill costs none; calls and faults that stop it."""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import crash
import numpy as np
import pytest
from local_hub import serve
from tiny import CONFIG
from train_calls import FILES, LENGTH, finish, flags_of, newest, times, weights_of, write_inputs

import bert_packed
from bert_packed import TrainConfig
from bert_packed.cli import train as main
from bert_packed.core.command_line import parse
from bert_packed.core.settings import InputError
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.text_to_model import output_folder, steps
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig
from data_gen.text.sources import find_text_sources

STEPS = ("instances", "packs", "proof", "training", "audit", "export")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    return finish(text, tmp_path_factory.mktemp("finished") / "my [1]")


def train(text, output_dir, **settings):
    return bert_packed.train(TrainConfig(**flags_of(text, output_dir, **settings)))


def assert_refused(message, text, output_dir, **settings):
    with pytest.raises((InputError, OSError), match=message):
        train(text, output_dir, **settings)


def copy(finished, folder, *left_out):
    """The output directory of a call, without some of its results."""
    return shutil.copytree(finished, folder, ignore=shutil.ignore_patterns(*left_out))


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_step_leaves_what_it_made(finished):
    packs = json.loads((finished / "packed/train/manifest.json").read_text())
    assert packs["packing_factor"] > 1.3
    proof = json.loads((finished / "proof.json").read_text())
    counts = dict.fromkeys(("input sequences", "packed sequences"), packs["num_sequences"])
    assert proof["splits"][0] == {"data": "train", "missing": 0, "unexpected": 0, **counts}
    audit = json.loads((finished / "audit.json").read_text())
    assert len(audit) > 10 and {row["result"] for row in audit} == {"pass"}
    card = (finished / "model" / "README.md").read_text()
    assert "neighbors: gradient on their embeddings" in card


def test_the_model_gives_vectors(finished):
    """Only its folder is named."""
    texts = ["doc1 doc2", "doc3", "doc4 doc5 doc6 doc7"]
    of_export, of_run = (bert_packed.load_encoder(finished / name).encode(texts) for name in ("model", "run"))
    assert of_export.shape == (3, CONFIG.hidden_size)
    np.testing.assert_allclose(of_run, of_export, atol=1e-6)


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


def test_a_call_that_is_repeated_does_nothing(text, finished, monkeypatch, capsys):
    """It may be repeated from elsewhere, too."""
    before = times(finished)
    assert train(text, finished).model_dir == str(finished / "model")
    monkeypatch.chdir(finished)
    relative = {name: os.path.relpath(text / path) for name, path in FILES.items()}
    train(text, ".", **relative)
    assert times(finished) == before
    shown = capsys.readouterr().out
    assert [shown.count(f"{number}/6 {name}: done before") for number, name in enumerate(STEPS, 1)] == [2] * 6


@pytest.mark.parametrize("missing", ["model", "proof.json", "packed/eval"])
def test_a_step_whose_result_is_gone_is_taken_again(text, finished, missing, capsys):
    """Those after it, which depend on it, are, too; but training, whose packs are the same ones, is not."""
    before, weights = times(newest(finished)), weights_of(finished)
    path = finished / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(text, finished)
    shown = capsys.readouterr().out
    assert path.exists() and shown.count("done before") < len(STEPS)
    assert ("export: done before" in shown) == (missing == "proof.json")
    assert times(newest(finished)) == before
    assert all((weights[name] == values).all() for name, values in weights_of(finished).items())


@pytest.mark.slow
def test_hours_and_a_checkpoint_to_start_from(text, finished, tmp_path):
    """Steps by their time, measured; the vocabulary and the shape of the start; a text of one document."""
    (tmp_path / "one.txt").write_text((text / "text.txt").read_text().replace("\n\n", "\n"))
    flags = {"input_file": str(tmp_path / "one.txt"), "vocab_file": "", "bert_config_file": ""}
    flags |= {"init_checkpoint": str(finished / "model"), "num_train_epochs": 0.0, "train_hours": 1e-5}
    assert_refused("`eval_fraction` must be 0 for a text of one document", text, tmp_path / "my", **flags)
    train(text, tmp_path / "my", **flags, eval_fraction=0.0)
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
def test_text_and_start_come_from_the_hub(text, finished, tmp_path):
    """By the environment; the call goes on where the cache is lost and a commit was pushed."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    documents = (text / "text.txt").read_text().split("\n\n")
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"body": documents}), tmp_path / "data/train-0.parquet")
    output = tmp_path / "output"
    flags = {"output_dir": output, "max_seq_length": LENGTH, "init_checkpoint": "owner/start"}
    flags |= {"text_column": "body", "num_train_epochs": 1}
    given = [f"--{name}={value}" for name, value in flags.items()]
    with serve() as (hub, url):
        hub.add("owner/text", tmp_path / "data")
        hub.add("owner/start", finished / "model")
        start = f"owner/start@{hub.commits['owner/start'][0]}"

        def call(name):
            own = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / name)}
            command = [sys.executable, "-m", "bert_packed", "train"]
            command += ["hf://datasets/owner/text/train-*.parquet", *given]
            return subprocess.run(command, env=os.environ | own, capture_output=True, text=True)

        first = call("one")
        assert first.returncode == 0, first.stderr
        assert f"init_checkpoint is {start} from the hub" in first.stderr
        assert json.loads((output / "run/run.json").read_text())["flags"]["init_checkpoint"] == start
        (output / "audit.json").unlink()
        shutil.rmtree(output / "model")
        hub.add("owner/start", finished / "model", commit="2")
        again = call("two")
        assert again.returncode == 0, again.stderr
        assert "the run is complete" in again.stdout and f"init_checkpoint is {start}" in again.stderr


@pytest.mark.slow
def test_a_kill_inside_each_step_costs_nothing(text, tmp_path):
    """One after another, in one call's folder: the model is that of a call without kills, bit for bit."""
    whole, folder = (
        TrainConfig(**flags_of(text, tmp_path / name, num_train_epochs=60.0)) for name in ("whole", "my")
    )
    bert_packed.train(whole)
    for number in range(1, len(STEPS) + 1):
        process = crash.start(bert_packed.train, folder)
        while not is_inside(number, tmp_path / "my"):
            assert process.is_alive()
            time.sleep(0.001)
        process.kill()
        assert crash.finish(process) == -signal.SIGKILL
        assert not (tmp_path / "my/model").exists()
    assert crash.finish(crash.start(bert_packed.train, folder)) == 0
    segments = json.loads((tmp_path / "my/run/run.json").read_text())["segments"]
    assert len(segments) > 1 and segments[1]["first_step"] >= 50
    expected, found = weights_of(tmp_path / "whole"), weights_of(tmp_path / "my")
    assert found.keys() == expected.keys()
    for tensor, values in found.items():
        np.testing.assert_array_equal(values, expected[tensor])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_file": "none"}, r"`input_file` must match at least one file\. Received: 'none'"),
        ({"bert_config_file": "bert-huge"}, "`bert_config_file` must be one of bert-tiny, "),
        ({"bert_config_file": "mamba-tiny"}, "`bert_config_file` must be of a BERT"),
        ({"bert_config_file": "", "max_seq_length": 513}, "`max_seq_length` must be at most .*=512"),
        ({"max_seq_length": 128}, "`max_seq_length` must be at most max_position_embeddings=64"),
        ({"init_checkpoint": "./none"}, "`init_checkpoint` must be a folder, .* that exists"),
        ({"vocab_file": "none"}, "none"),
        ({"output_dir": "memory://x"}, r"`output_dir` must be a local folder\. Received: memory://x, a URL"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(text, tmp_path, changes, message):
    assert_refused(message, text, **{"output_dir": tmp_path / "new", **changes})
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_reads_other_case_is_refused(text, finished, tmp_path):
    model = shutil.copytree(finished / "model", tmp_path / "model")
    (model / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    flags = {"vocab_file": "", "bert_config_file": "", "init_checkpoint": str(model)}
    assert_refused(r"`do_lower_case` must be as in the training .* False", text, tmp_path / "new", **flags)


def test_folders_of_others_are_left_alone(text, tmp_path):
    for name in ("train.json", "dev.json"):
        (tmp_path / name).write_text("{}")
    for overwrite in (False, True):
        message = r"`output_dir` must be empty or an earlier .* holds dev\.json"
        assert_refused(message, text, tmp_path, overwrite=overwrite)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev.json", "train.json"]
    message = r"`output_dir` must be a directory\. .*dev\.json, which is a file"
    assert_refused(message, text, tmp_path / "dev.json")


def begun(folder, text, **settings):
    """Begin in an output directory, as `train` does before its first step: what is in it afterwards."""
    config = TrainConfig(**flags_of(text, folder, **settings))
    sources = find_text_sources(config.input_file)
    output_folder.begin(config, output_folder.OutputFolder(str(folder)), output_folder.describe_text(sources))
    return files_in(folder)


def test_another_training_may_begin_until_a_checkpoint_is_there(text, finished, tmp_path):
    """It is on the same packs, which are kept."""
    folder = copy(finished, tmp_path / "my", "run", "model")
    before = files_in(folder)
    other = {"num_train_epochs": 5.0, "train_batch_size": 3, "learning_rate": 0.5, "attention": "dense"}
    other |= {"distribution": "mirrored", "bert_config_file": "bert-tiny"}
    assert before - begun(folder, text, **other) == {"audit.json", "flags/pretrain.flags"}


@pytest.mark.parametrize(
    ("change", "result"),
    [
        *(("text", result) for result in ("packed/train", "run", "model")),
        *(("max_seq_length", result) for result in ("proof.json", "audit.json", "run/checkpoint-1")),
        *(("num_train_epochs", result) for result in ("run/checkpoint-1", "model")),
        *(("call file", result) for result in ("run", "model")),
    ],
)
def test_results_go_by_overwrite_alone(text, tmp_path, change, result):
    """If the instances were gone, any change erased the rest."""
    folder, text = tmp_path / "my", shutil.copytree(text, tmp_path / "text")
    begun(folder, text)
    (folder / result).mkdir(parents=True)
    (folder / result / "content").touch()
    if change == "text":
        os.utime(text / "text.txt")
    elif change == "call file":
        (folder / output_folder.CALL_FILE).write_text('{"x": 1}')
    settings = {change: 32} if change in ("max_seq_length", "num_train_epochs") else {}
    before = times(folder)
    with pytest.raises(InputError, match="unless --overwrite"):
        begun(folder, text, **settings)
    assert times(folder) == before
    assert begun(folder, text, overwrite=True, **settings) == {output_folder.CALL_FILE}


def test_a_step_taken_again_keeps_model_and_run(tmp_path):
    """The step that replaces the model may yet fail."""
    folder = output_folder.OutputFolder(str(tmp_path))
    for name in output_folder.RESULTS:
        (tmp_path / name).mkdir()
    folder.remove_after("instances")
    assert {path.name for path in tmp_path.iterdir()} == {"flags", "instances", "run", "model"}


def test_an_empty_manifest_is_named(text, tmp_path):
    """Its `inputs` were read without a look at its form."""
    begun(tmp_path, text, max_seq_length=32)
    begun(tmp_path, text)  # as nothing was made, settings may change
    (tmp_path / "instances").mkdir()
    (tmp_path / "instances/manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"instances/manifest\.json: what create_.* Received: no 'splits'"):
        begun(tmp_path, text, input_file=str(text / "words.txt"))


def test_an_output_folder_that_vanishes_is_named(text, tmp_path, monkeypatch):
    """A later step named `input_file`, and left a folder that the next call refused."""
    folder = tmp_path / "my"
    monkeypatch.setattr(steps, "_make_instances", lambda *_: shutil.rmtree(folder))
    assert_refused(r"`output_dir` must stay where it is .* Received: .*/my, which has", text, folder)
    assert not folder.exists()


def test_the_same_text_goes_on_wherever_it_is(text, finished, tmp_path):
    """It may have another time, as where a machine mounts it, or another place, but no other letter."""
    folder, moved = shutil.copytree(finished, tmp_path / "my"), shutil.copytree(text, tmp_path / "moved")
    os.utime(moved / "text.txt")
    others = {name: str(text / FILES[name]) for name in ("vocab_file", "bert_config_file")}
    before = files_in(folder)
    for _ in range(2):  # the second without reading it
        assert begun(folder, moved, **others) == before
    content = (moved / "text.txt").read_text()
    (moved / "text.txt").write_text(content[:-2] + ("b" if content[-2] != "b" else "c") + content[-1])
    with pytest.raises(InputError, match="`input_file` must be the text"):
        begun(folder, moved, **others)


def test_what_a_killed_overwrite_leaves_does_not_pass_for_whole(text, finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "my")
    other = {"num_train_epochs": 5.0, "max_seq_length": 32}

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        begun(folder, text, overwrite=True, **other)
    with pytest.raises(InputError, match="`input_file` must be the text"):  # the call before
        begun(folder, text)
    assert begun(folder, text, **other) == {output_folder.CALL_FILE}


def test_texts_are_arguments_and_flags_may_follow():
    given = ["x", "a.txt", "b.txt", "--output_dir=my", "c.txt"]
    assert parse(TrainConfig, given).input_file == "a.txt,b.txt,c.txt"
    with pytest.raises(InputError, match=r"`input_file` must be given once\. Received: a flag, and 'a.txt'"):
        parse(TrainConfig, [*given, "--input_file=d.txt"])
    with pytest.raises(InputError, match="every argument must be a flag"):
        parse(PackConfig, ["x", "a.txt"])


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_wrong_packs_stop_the_training(text, finished, tmp_path, fault, capsys):
    """No model is trained on them, even if an earlier call has proved them."""
    folder = copy(finished, tmp_path / "my", "run", "model", "audit.*")
    first, second, *_ = sorted((folder / "packed/train").glob("*.tfrecord"))
    if fault == "lost":
        first.unlink()
    else:
        shutil.copy(first, second)
    assert main(TrainConfig(**flags_of(text, folder))) == 1
    assert "the proof of the packs failed: in the inputs, not in the packs" in capsys.readouterr().err
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_model_that_leaks_is_not_exported(text, finished, tmp_path, capsys):
    """Trained in a folder that was copied, without a change in the other one."""
    before = times(finished)
    folder = copy(finished, tmp_path / "my", "run", "model", "audit.*")
    with (folder / "flags/pretrain.flags").open("a") as file:
        file.write("--ablation=no_attention_mask\n")
    assert main(TrainConfig(**flags_of(text, folder))) == 1
    error = capsys.readouterr().err
    assert "the audit failed, and no model is exported: neighbors: change of hidden_states is " in error
    assert not (folder / "model").exists() and not (folder / "audit.json").exists()
    assert newest(folder).exists() and times(finished) == before
