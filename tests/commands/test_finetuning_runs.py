"""Fine-tuning commands from file to score, as a grid of task and architecture.

Packed is unpacked, a stopped run ends as an uninterrupted one, and whatever a run leaves predicts the same.
"""

import csv
import json
import shutil

import numpy as np
import pytest
from exports import run_export
from pretraining_command import newest_checkpoint
from run_logs import losses_of
from safetensors.numpy import load_file
from task_files import PREDICTIONS, VOCABULARIES, finetune, write_tasks

from bert_packed.tasks.ner.scores import score
from bert_packed.tasks.squad import scores
from bert_packed.tasks.squad.files import read_squad

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("files"))


def squad_scores(files, folder):
    """Scores of the answers that were written."""
    answers = json.loads((folder / "predictions.json").read_text())
    nbest = json.loads((folder / "nbest_predictions.json").read_text())
    questions = read_squad(files / "questions.json", for_training=False)
    assert [*answers] == [question.id for question in questions.questions]
    assert all(len(nbest[name]) == 20 and nbest[name][0]["text"] == answers[name] for name in answers)
    assert not (folder / "null_odds.json").exists()
    for question in questions.questions:
        text = answers[question.id]
        assert text in questions.contexts[question.context_index] and text == text.strip()
    return scores.score(questions.questions, answers)


def glue_scores(files, folder):
    """Accuracy, of the row by row comparison with the file."""
    with (folder / "predictions.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    labels = [line.rpartition("\t")[2] for line in (files / "RTE/dev.tsv").read_text().splitlines()[1:]]
    exported = json.loads((folder / "model" / "config.json").read_text())
    assert [*exported["id2label"].values()] == ["entailment", "not_entailment"]
    assert [row["index"] for row in rows] == [str(index) for index in range(len(labels))]
    return {
        "accuracy": np.mean([row["prediction"] == label for row, label in zip(rows, labels, strict=True)])
    }


def ner_scores(files, folder):
    """Scores of the columns that were written: the file again, with a tag more."""
    sentences = (folder / "predictions.txt").read_text().strip().split("\n\n")
    columns = [[line.split(" ") for line in sentence.split("\n")] for sentence in sentences]
    source = [line.split() for line in (files / "dev.txt").read_text().splitlines()[2:]]
    assert [row[:2] for part in columns for row in part] == [[row[0], row[2]] for row in source if row]
    labels = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    assert (folder / "labels.txt").read_text().split() == labels
    assert {row[2] for part in columns for row in part} <= {*labels}
    return score(*([[row[column] for row in part] for part in columns] for column in (1, 2)))


SCORES = {"squad": squad_scores, "glue": glue_scores, "ner": ner_scores}
SLOW = [("squad", "modernbert"), ("ner", "modernbert"), ("glue", "bert")]
GRID = [
    *(("squad", "bert"), ("glue", "modernbert"), ("ner", "bert")),
    *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW),
]


@pytest.mark.parametrize(("task", "architecture"), GRID)
def test_a_run_packed_unpacked_and_resumed(task, architecture, files, tmp_path):
    name, vocabulary = PREDICTIONS[task], VOCABULARIES[architecture]
    packed, unpacked, stopped = (tmp_path / folder for folder in ("packed", "unpacked", "stopped"))
    seen = finetune(task, files, packed, architecture, json=tmp_path / "scores.json")
    assert seen.status == 0, seen.error
    assert (
        f"{files}/{architecture}/{vocabulary}, " in seen.out and "compiled   1 training program" in seen.out
    )
    assert task != "ner" or "1 sentences cut into windows" in seen.out
    assert (packed / vocabulary).read_bytes() == (files / architecture / vocabulary).read_bytes()
    assert sum((packed / one).exists() for one in VOCABULARIES.values()) == 1
    found = json.loads((packed / "eval_results.json").read_text())
    assert found == json.loads((tmp_path / "scores.json").read_text())
    assert found == pytest.approx(SCORES[task](files, packed), abs=1e-6)
    losses = losses_of(packed)
    assert len(losses) >= 3 and losses[-1] < losses[0]

    seen = finetune(task, files, unpacked, architecture, max_sequences_per_pack=1)
    assert "packing factor 1.000" in seen.out and "compiled   1 training program" in seen.out
    assert losses == pytest.approx(losses_of(unpacked), rel=1e-3)
    assert (packed / name).read_bytes() == (unpacked / name).read_bytes()

    # A damaged last checkpoint counts as missing
    shutil.copytree(packed, stopped)
    last = newest_checkpoint(packed)
    damaged = stopped / last.name / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (stopped / name).unlink()
    seen = finetune(task, files, stopped, architecture)
    steps = [int(path.name.partition("-")[2]) for path in packed.glob("checkpoint-*") if path != last]
    step = max(steps)
    assert seen.status == 0
    assert f"{last.name}.damaged; checkpoint-{step} is next: {damaged} must have" in seen.out
    segments = json.loads((stopped / "run.json").read_text())["segments"]
    assert [segment["first_step"] for segment in segments] == [0, step]
    for file in ("model.safetensors", "training.safetensors"):
        one, other = (load_file(folder / last.name / file) for folder in (packed, stopped))
        assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
    assert losses_of(stopped) == losses
    assert (stopped / name).read_bytes() == (packed / name).read_bytes()

    # Predicted without training, from the run, from its checkpoint and from its export
    assert run_export(init_checkpoint=packed, output_dir=tmp_path / "hf", format="hf") == 0
    for number, start in enumerate((packed, last, tmp_path / "hf")):
        again = tmp_path / f"again-{number}"
        changes = {"init_checkpoint": start, "do_train": "false"}
        if architecture == "modernbert":  # whose bytes know no case
            changes["do_lower_case"] = ["true", "false"][number % 2]
        assert finetune(task, files, again, architecture, **changes).status == 0
        assert (again / name).read_bytes() == (packed / name).read_bytes()
        assert f"--init_checkpoint={start}\n" in (again / "resolved.flags").read_text()


def test_another_run_is_refused(files, tmp_path):
    folder = tmp_path / "run"
    assert finetune("squad", files, folder, num_train_epochs=0.1, do_predict="false").status == 0
    seen = finetune("squad", files, folder, num_train_epochs=0.1, do_predict="false", learning_rate=0.02)
    assert seen.status == 2 and "learning_rate 0.01 -> 0.02" in seen.error
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "inputs": {"input_file": []}}))
    seen = finetune("squad", files, folder, num_train_epochs=0.1, do_predict="false")
    assert seen.status == 2  # of another command
    assert "a run must continue as it was, unless --overwrite. Received: train_file" in seen.error


@pytest.mark.slow
def test_a_run_of_one_pack_at_once_continues_so(files, tmp_path):
    """An earlier default, of fine-tuning alone; today it is all packs of a step, as in pre-training."""
    packed, single = tmp_path / "packed", tmp_path / "single"
    seen = finetune("squad", files, packed)
    assert json.loads((packed / "run.json").read_text())["flags"]["micro_batch_size"] == 0
    assert seen.out.startswith("batch      4 sequences a step (train_batch_size), packed or not\n")
    assert "1 at once" in finetune("squad", files, single, micro_batch_size=1).out
    losses = losses_of(single)
    assert losses == pytest.approx(losses_of(packed), rel=1e-4)
    shutil.rmtree(newest_checkpoint(single))
    assert "1 at once" in finetune("squad", files, single).out
    assert losses_of(single) == losses


def test_words_without_tags_are_tagged(files, tmp_path):
    assert finetune("ner", files, tmp_path / "run", num_train_epochs=0.1).status == 0
    lines = (files / "dev.txt").read_text().split("\n")
    (tmp_path / "bare.txt").write_text("\n".join(line.split(" ")[0] for line in lines))
    flags = {"init_checkpoint": tmp_path / "run", "predict_file": tmp_path / "bare.txt", "do_train": "false"}
    assert finetune("ner", files, tmp_path / "again", **flags).status == 0
    tagged = [
        (folder / "predictions.txt").read_text().splitlines()
        for folder in (tmp_path / "run", tmp_path / "again")
    ]
    without = [" ".join([*line.split(" ")[:1], *line.split(" ")[2:]]) if line else "" for line in tagged[0]]
    assert tagged[1] == without
    assert not (tmp_path / "again" / "eval_results.json").exists()
