"""Files for GLUE's server, of logits that are known."""

from types import SimpleNamespace

import numpy as np
import pytest

from bert_packed.records.sequences import BERT_LAYOUT, make_sequences
from bert_packed.tasks import run as finetuning
from bert_packed.tasks.glue import scores as glue_predictions
from bert_packed.tasks.glue.files import TASKS, GlueTexts

LOGITS = {  # of two examples of dev, then of three that the server asks
    "RTE": [[2, 1], [0, 3], [1, 2], [5, 4], [0, 1]],
    "MNLI": [[2, 1, 0], [0, 3, 1], [1, 2, 9], [5, 4, 1], [0, 1, 0.5]],
    "CoLA": [[2, 1], [0, 3], [1, 2], [5, 4], [0, 1]],
    "STS-B": [[2.5], [6], [-0.25], [5.125], [4.0625]],
}
EXPECTED = {
    "RTE": ["not_entailment", "entailment", "not_entailment"],
    "MNLI": ["contradiction", "entailment", "neutral"],
    "CoLA": ["1", "0", "1"],
    "STS-B": ["0", "5", "4.0625"],
}
DEV = {"RTE": ["entailment", "not_entailment"], "STS-B": ["2.5", "6"]}


@pytest.mark.parametrize("name", LOGITS)
def test_the_servers_form(name, tmp_path, monkeypatch):
    task = TASKS[name]
    config = SimpleNamespace(data_dir="data", do_eval=True, do_predict=True)
    files = glue_predictions.asked_files(config, task)
    sets = 2 if name == "MNLI" else 1
    assert [file.ending is None for file in files] == [False] * sets + [True] * sets
    dev = GlueTexts([], np.array([0, 1]), None, 0)
    test = GlueTexts([], None, ["4", "0", "7"], 0)
    asked = [(files[0], dev, sequences(2)), (files[-1], test, sequences(3))]

    def predict(config, model, packed):
        assert len(packed) == 5 and not model
        return {"logits": [np.array(row, np.float32) for row in LOGITS[name]]}, 1

    monkeypatch.setattr(finetuning, "predict_packed", predict)
    scores = glue_predictions.predict_files(config, task, None, asked, tmp_path)
    assert set(scores) == {f"{metric}{files[0].ending}" for metric in task.metrics}
    server = {"MNLI": "MNLI-mm"}.get(name, name)
    pairs = zip("407", EXPECTED[name], strict=True)
    lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in pairs)]
    assert (tmp_path / f"{server}.tsv").read_text() == "".join(f"{line}\n" for line in lines)
    if name in DEV:  # a dev set's numbers stay as they are
        first, second = DEV[name]
        assert (tmp_path / "predictions.tsv").read_text() == f"index\tprediction\n0\t{first}\n1\t{second}\n"
    assert not list(tmp_path.glob("*.partial"))


def sequences(number):
    columns = {"tokens": range(number), "lengths": [1] * number, "record_numbers": range(1, number + 1)}
    return make_sequences(BERT_LAYOUT, f"{number}", **columns)
