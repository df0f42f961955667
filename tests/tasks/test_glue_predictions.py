"""Files for GLUE's server, of logits that are known; and models that learned something else."""

import types

import numpy as np
import pytest

from bert_packed.core.settings import InputError
from bert_packed.tasks.classify.labels import NUMBER, SINGLE, Problem
from bert_packed.tasks.glue import task as glue

# Logits of three examples, and what the server gets of them
PREDICTIONS = {
    "RTE": ([[1, 2], [5, 4], [0, 1]], ["not_entailment", "entailment", "not_entailment"]),
    "MNLI": ([[1, 2, 9], [5, 4, 1], [0, 1, 0.5]], ["contradiction", "entailment", "neutral"]),
    "CoLA": ([[1, 2], [5, 4], [0, 1]], ["1", "0", "1"]),
    "STS-B": ([[-0.25], [5.125], [4.0625]], ["0", "5", "4.0625"]),  # within the range of labels
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_servers_form(name, tmp_path):
    logits, labels = PREDICTIONS[name]
    task = glue.TASKS[name]
    names = task.test_columns or task.columns[:-1]
    rows = ["\t".join(("index", *names)), *("\t".join((index, *["a"] * len(names))) for index in "407")]
    (tmp_path / "test.tsv").write_text("".join(f"{row}\n" for row in rows))
    file = glue._test_file(task, tmp_path / "test.tsv", "answers.tsv")
    assert file.score is None
    file.write(np.array(logits, np.float32), tmp_path)
    pairs = zip("407", labels, strict=True)
    lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in pairs)]
    assert (tmp_path / "answers.tsv").read_text() == "".join(f"{line}\n" for line in lines)


def test_numbers_of_a_dev_file_stay_as_they_are(tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\nc\td\t5\n")
    logits = np.array([[2.5], [6]], np.float32)
    file = glue._dev_file(glue.TASKS["STS-B"], tmp_path / "dev.tsv", "predictions.tsv")
    file.write(logits, tmp_path)
    assert (tmp_path / "predictions.tsv").read_text() == "index\tprediction\n0\t2.5\n1\t6\n"
    assert file.score(logits) == pytest.approx({"pearson": 1, "spearman": 1})


def test_scores_of_a_part_have_its_ending(tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tgold_label\na\tb\tneutral\nc\td\tneutral\n")
    file = glue._dev_file(glue.TASKS["MNLI"], tmp_path / "dev.tsv", "predictions_matched.tsv")
    assert file.score(np.array([[0, 1, 0], [1, 0, 0]])) == {"accuracy_matched": 0.5}


OTHER_ORDER = "contradiction", "entailment", "neutral"
STORED = [
    ("MNLI", Problem(SINGLE, OTHER_ORDER), "labels in the order entailment, neutral"),
    ("RTE", Problem(SINGLE, glue.TASKS["RTE"].classes, num_texts=1), "`data_dir` must have single texts"),
    ("STS-B", Problem(NUMBER, is_chance=True), "the numbers of STS-B. Received: m, of a chance."),
]


@pytest.mark.parametrize(("name", "stored", "message"), STORED)
def test_a_model_of_other_labels_is_refused(name, stored, message, monkeypatch):
    monkeypatch.setattr(glue, "stored_problem", lambda *_: stored)
    with pytest.raises(InputError, match=message):
        glue._check_labels(types.SimpleNamespace(init_checkpoint="m"), glue.TASKS[name])


def test_labels_of_other_names_are_told(monkeypatch, capsys):
    config = types.SimpleNamespace(init_checkpoint="m")
    for names, told in ((("different", "equivalent"), True), (("0", "1"), False)):
        monkeypatch.setattr(glue, "stored_problem", lambda *_, names=names: Problem(SINGLE, names))
        glue._check_labels(config, glue.TASKS["MRPC"])
        assert (
            "different, equivalent of init_checkpoint are taken for 0, 1" in capsys.readouterr().out
        ) == told
