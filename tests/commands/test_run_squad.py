"""`run_squad.py` on what SQuAD alone has: no answer, contexts without a word, the own questions."""

import json

import pytest
from squad_files import CONTEXT, entry, write
from task_files import finetune, write_tasks

from bert_packed.tasks.squad.files import read_squad
from data_gen.sample_data import QUESTIONS_FILE

pytestmark = pytest.mark.usefixtures("uncompiled_file")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory):
    """A model that has seen a step."""
    folder = tmp_path_factory.mktemp("tuned")
    assert finetune("squad", files, folder, num_train_epochs=0.1, do_predict="false").status == 0
    return folder


def predict(files, tuned, questions, output_dir, **flags):
    """Predict the questions of a file: what the command printed, and the answers."""
    given = {"init_checkpoint": tuned, "predict_file": questions, "do_train": "false"}
    seen = finetune("squad", files, output_dir, **given, **flags)
    assert seen.status == 0, seen.error
    return seen.out, json.loads((output_dir / "predictions.json").read_text())


def test_version_2(files, tuned, tmp_path):
    pair = [entry("1", "Who wrote it?", "Ada Lovelace"), entry("2", "Why?", is_impossible=True)]
    without_a_word = (" \u200b", [entry("3", "Who?"), entry("4", "When?")])
    path = write(tmp_path / "v2.json", (CONTEXT, pair), without_a_word, version="v2.0")
    never = {"null_score_diff_threshold": -1e9, "version_2_with_negative": "true"}
    out, answers = predict(files, tuned, path, tmp_path, **never)
    assert answers == dict.fromkeys("1234", "")
    assert "warning: 2 questions whose context has no word" in out
    assert json.loads((tmp_path / "eval_results.json").read_text())["NoAns_f1"] == 100.0
    assert set(json.loads((tmp_path / "null_odds.json").read_text())) == set("1234")


def test_own_questions_take_the_checkpoints_vocabulary(files, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {"init_checkpoint": tuned, "train_file": "", "predict_file": "", "do_predict": "false"}
    seen = finetune("squad", files, tmp_path / "run", num_train_epochs=0.1, **flags)
    assert seen.status == 0, seen.error
    assert f"vocabulary {tuned / 'vocab.txt'}, " in seen.out
    assert not list(tmp_path.glob("sample_data"))  # none was trained


def test_own_questions_are_sound():
    """The project's own questions pass the checks of training, and each is asked once."""
    questions = read_squad(QUESTIONS_FILE, for_training=True).questions
    assert len(questions) == len({question.text for question in questions}) == 30
