"""`run_squad.py` from file to score on a tiny model: packed equals unpacked, stopped equals uninterrupted."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from run_logs import losses_of
from safetensors.numpy import load_file
from squad_files import CONTEXT, QUESTIONS, entry, write
from tiny import CONFIG

from bert_packed import cli
from bert_packed.core.command_line import run
from bert_packed.tasks.squad.config import SquadConfig
from bert_packed.tasks.squad.files import read_squad
from bert_packed.text import tokenization

LENGTH = 48
TRAINING = {"train_batch_size": 4, "num_train_epochs": 4, "learning_rate": 0.01, "log_steps": 1}


def command(**flags):
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return run(cli.squad, SquadConfig, ["run_squad.py", *arguments])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of a tiny run: questions, vocabulary and a model without dropout."""
    folder = tmp_path_factory.mktemp("data")
    path = write(folder / "questions.json", *QUESTIONS)
    questions = read_squad(path, for_training=True)
    texts = [*questions.contexts, *(question.text for question in questions.questions)]
    vocabulary = tokenization.train_vocab([texts], 400, do_lower_case=True)
    tokenization.save_vocab(vocabulary, folder / "vocab.txt")
    model = dataclasses.replace(
        CONFIG, vocab_size=len(vocabulary), num_hidden_layers=1, max_position_embeddings=LENGTH
    )
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(model)))
    return {
        "train_file": path,
        "predict_file": path,
        "vocab_file": folder / "vocab.txt",
        "bert_config_file": folder / "bert_config.json",
        "max_seq_length": LENGTH,
        "doc_stride": 8,
        "max_query_length": 16,
        **TRAINING,
    }


@pytest.fixture(scope="module")
def packed(data, tmp_path_factory):
    """A finished packed run, which keeps all checkpoints, and its scores."""
    folder = tmp_path_factory.mktemp("packed")
    flags = {**data, "output_dir": folder, "save_checkpoints_steps": 2, "keep_checkpoint_max": 9}
    json_file = folder.parent / "packed_scores.json"
    assert command(**flags, json=json_file) == 0
    return flags, folder, json.loads(json_file.read_text())


def plain_scores(answers):
    """Exact match and F1 in percent, from the words of the questions above: each has one right answer."""
    exact, f1 = [], []
    for _, entries in QUESTIONS:
        for right in entries:
            texts = answers[right["id"]], right["answers"][0]["text"]
            words = [[w for w in re.findall(r"\w+", t.lower()) if w not in ("a", "an", "the")] for t in texts]
            common = sum(min(words[0].count(word), words[1].count(word)) for word in set(words[0]))
            exact.append(words[0] == words[1])
            f1.append(2 * common / len(words[0] + words[1]) if common else 0.0)
    return {"exact_match": 100 * np.mean(exact), "f1": 100 * np.mean(f1), "total": 6}


def test_a_run_writes_answers_and_scores(data, packed):
    _, folder, scores = packed
    questions = read_squad(data["predict_file"], False).questions
    answers = json.loads((folder / "predictions.json").read_text())
    assert list(answers) == [question.id for question in questions]
    assert scores == pytest.approx(plain_scores(answers))
    assert scores == json.loads((folder / "eval_results.json").read_text())
    assert 0 < scores["f1"] < 100
    nbest = json.loads((folder / "nbest_predictions.json").read_text())
    assert all(len(nbest[name]) == 20 and nbest[name][0]["text"] == answers[name] for name in answers)
    assert not (folder / "null_odds.json").exists()
    losses = losses_of(folder)
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_unpacked_sees_the_same_sequences_in_each_step(data, packed, tmp_path, capsys):
    _, folder, scores = packed
    json_file = tmp_path / "scores.json"
    flags = {**data, "output_dir": tmp_path / "run", "max_sequences_per_pack": 1, "json": json_file}
    assert command(**flags) == 0
    text = capsys.readouterr().out
    assert "packing factor 1.000" in text and "compiled   1 training program" in text
    np.testing.assert_allclose(losses_of(folder), losses_of(tmp_path / "run"), rtol=1e-4)
    assert json.loads(json_file.read_text()) == scores


def test_a_stopped_run_continues_bit_for_bit(packed, tmp_path, capsys):
    flags, folder, _ = packed
    stopped = tmp_path / "run"
    shutil.copytree(folder, stopped)
    shutil.rmtree(stopped / "checkpoint-4")
    damaged = stopped / "checkpoint-6" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])  # as good as not there
    assert command(**{**flags, "output_dir": stopped}) == 0
    text = capsys.readouterr().out
    assert f"checkpoint-6.damaged; checkpoint-2 is next: {damaged} must have the SHA-256" in text
    segments = json.loads((stopped / "run.json").read_text())["segments"]
    assert [segment["first_step"] for segment in segments] == [0, 2]
    assert "plan       6 steps of 4 sequences" in text
    assert "continues from" in text and "compiled   1 training program" in text
    for name in ("model.safetensors", "training.safetensors"):
        one, other = (load_file(path / "checkpoint-6" / name) for path in (folder, stopped))
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)
    assert losses_of(folder) == losses_of(stopped)
    assert (folder / "predictions.json").read_bytes() == (stopped / "predictions.json").read_bytes()
    assert command(**{**flags, "output_dir": stopped, "learning_rate": 0.02}) == 2
    assert "learning_rate 0.01 -> 0.02" in capsys.readouterr().err
    record = json.loads((stopped / "run.json").read_text())
    (stopped / "run.json").write_text(json.dumps({**record, "inputs": {"input_file": []}}))
    assert command(**{**flags, "output_dir": stopped}) == 2  # another command's run
    assert (
        "a run must continue as it was, unless --overwrite. Received: train_file" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_of_one_pack_at_once_is_the_same_and_continues_so(data, packed, tmp_path, capsys):
    """Fine-tuning took one pack at once until that had one default with pre-training: all of a step."""
    _, folder, _ = packed
    assert json.loads((folder / "run.json").read_text())["flags"]["micro_batch_size"] == 0
    flags = {**data, "output_dir": tmp_path / "run", "save_checkpoints_steps": 4, "keep_checkpoint_max": 9}
    assert command(**flags, micro_batch_size=1) == 0
    text = capsys.readouterr().out
    assert text.startswith("batch      4 sequences a step (train_batch_size), packed or not\n")
    assert "1 at once" in text
    losses = losses_of(tmp_path / "run")
    np.testing.assert_allclose(losses, losses_of(folder), rtol=1e-4)
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert command(**flags) == 0
    text = capsys.readouterr().out
    assert "1 at once" in text and "checkpoint-4" in text
    assert losses_of(tmp_path / "run") == losses


def test_prediction_alone_finds_model_and_vocabulary(data, packed, tmp_path):
    _, folder, _ = packed
    sizes = {
        name: data[name] for name in ("predict_file", "max_seq_length", "doc_stride", "max_query_length")
    }
    flags = {**sizes, "init_checkpoint": folder, "do_train": "false", "output_dir": tmp_path / "out"}
    assert command(**flags) == 0
    got = (tmp_path / "out" / "predictions.json").read_bytes()
    assert got == (folder / "predictions.json").read_bytes()
    assert f"--init_checkpoint={folder}\n" in (tmp_path / "out" / "resolved.flags").read_text()


@pytest.mark.usefixtures("uncompiled")
def test_own_questions_take_the_checkpoints_vocabulary(packed, tmp_path, capsys, monkeypatch):
    _, folder, _ = packed
    monkeypatch.chdir(tmp_path)
    flags = {"max_seq_length": LENGTH, "max_query_length": 16, "doc_stride": 16, "num_train_epochs": 0.1}
    assert command(**flags, init_checkpoint=folder, output_dir=tmp_path / "run", do_predict="false") == 0
    assert f"vocabulary {folder / 'vocab.txt'}, " in capsys.readouterr().out
    assert not list(tmp_path.glob("sample_data"))  # none was trained
    assert "--learning_rate=5e-05" in (tmp_path / "run" / "resolved.flags").read_text()


def test_version_2(data, packed, tmp_path):
    _, folder, _ = packed
    path = write(
        tmp_path / "v2.json",
        (CONTEXT, [entry("1", "Who wrote it?", "Ada Lovelace"), entry("2", "Why?", is_impossible=True)]),
        version="v2.0",
    )
    out, scores = tmp_path / "out", tmp_path / "scores.json"
    flags = {name: data[name] for name in ("max_seq_length", "doc_stride", "max_query_length")}
    flags |= {"init_checkpoint": folder, "predict_file": path, "do_train": "false", "output_dir": out}
    always = {"null_score_diff_threshold": -1e9, "version_2_with_negative": "true"}
    assert command(**flags, **always, json=scores) == 0
    assert json.loads((out / "predictions.json").read_text()) == {"1": "", "2": ""}
    assert json.loads(scores.read_text())["NoAns_f1"] == 100.0
    assert set(json.loads((out / "null_odds.json").read_text())) == {"1", "2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_file": ""}, "`train_file` must be given unless --do_train=false"),
        ({"vocab_file": ""}, "`vocab_file` must be given where no vocab.txt is beside `init_checkpoint`"),
        ({"bert_config_file": ""}, "`bert_config_file` must be given without `init_checkpoint`"),
        ({"max_seq_length": 64}, "`max_seq_length` must be at most max_position_embeddings=48 of the model"),
    ],
)
def test_mistakes_are_one_line(data, tmp_path, capsys, change, message):
    assert command(**{**data, "output_dir": tmp_path / "run", **change}) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.usefixtures("uncompiled")
def test_contexts_without_a_word_are_answered_with_nothing(packed, tmp_path, capsys):
    _, folder, _ = packed
    path = write(tmp_path / "a.json", (" \u200b", [entry("1", "Who?"), entry("2", "When?")]))
    flags = {"init_checkpoint": folder, "predict_file": path, "do_train": "false"}
    flags |= {"max_seq_length": LENGTH, "max_query_length": 16, "output_dir": tmp_path / "out"}
    assert command(**flags) == 0
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == {"1": "", "2": ""}
    assert "warning: 2 questions whose context has no word" in capsys.readouterr().out
    flags = {**flags, "do_train": "true", "do_predict": "false", "train_file": path}
    assert command(**flags) == 2  # no answer to learn
    assert "must have an answer to train on" in capsys.readouterr().err


def test_own_questions_are_sound(tmp_path):
    """The project's own questions pass the checks of training, and each is asked once."""
    from data_gen.sample_data import QUESTIONS_FILE

    questions = read_squad(QUESTIONS_FILE, for_training=True).questions
    assert len(questions) == len({question.text for question in questions}) == 30
