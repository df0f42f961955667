"""Prediction of fine-tuning runs: what each sequence gets, by a model of which that is known."""

import json
import os
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.core.settings import InputError
from bert_packed.kernels.choose import Kernels
from bert_packed.parallel.processes import ALONE
from bert_packed.records.sequences import BERT_LAYOUT
from bert_packed.records.sequences import make_sequences as make_columns
from bert_packed.tasks import run as finetuning
from bert_packed.tasks.config import FinetuneConfig
from bert_packed.tasks.squad.config import SquadConfig

pytestmark = pytest.mark.both_backends
TEXT = finetuning.TextModel(ModelConfig(), None, None, Kernels({}, ""), ALONE)
LENGTHS = [5, 12, 2, 3, 7, 1, 4]
FILES = {"train_file": __file__, "predict_file": __file__}


def make_sequences():
    """Sequences of random tokens, each beginning with its own number plus 100."""
    rng = np.random.default_rng(0)
    tokens = [[100 + n, *rng.integers(1, 99, length - 1)] for n, length in enumerate(LENGTHS)]
    columns = {"tokens": np.concatenate(tokens), "lengths": LENGTHS}
    return make_columns(BERT_LAYOUT, "", **columns, record_numbers=np.arange(len(LENGTHS)))


class Known(keras.Model):
    """Gives each token its id and place, and each sequence its first id; in training, negative ones."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.built = True

    def call(self, batch, training=None):
        sign = -self.scale if training else self.scale
        ids = ops.cast(batch["token_ids"], "float32")
        places = ops.cast(batch["position_ids"], "float32")
        first = ops.take_along_axis(ids, batch["cls_positions"], axis=1)
        return {
            "start_logits": sign * ids,
            "end_logits": sign * places,
            "logits": sign * ops.stack([first, 2 * first], axis=-1),
        }


@pytest.mark.parametrize(("depth", "num_packs"), [("max", 3), (2, 4), (1, 7)])
def test_every_sequence_gets_its_own_outputs_out_of_training(depth, num_packs):
    config = SimpleNamespace(
        max_seq_length=12, max_sequences_per_pack=depth, packing_algorithm="lpfhp", predict_batch_size=2
    )
    sequences = make_sequences()
    found, packs = finetuning.predict_packed(config, finetuning.forward_of(Known()), sequences)
    assert packs == num_packs
    assert found["start_logits"][1].shape == (12,)
    for number, length in enumerate(LENGTHS):
        own = sequences["tokens"][sequences.offsets("tokens")[number] :][:length]
        assert found["start_logits"][number].tolist() == own.tolist()
        assert found["end_logits"][number].tolist() == list(range(length))
        assert found["logits"][number].tolist() == [100 + number, 200 + 2 * number]


def test_prediction_needs_the_head_of_the_task(monkeypatch, tmp_path):
    config = FinetuneConfig(output_dir=str(tmp_path / "run"), init_checkpoint="x", do_train=False)
    model = Known()
    model.head = "classification"
    objective = SimpleNamespace(build_model=lambda *_, **__: model)
    found = SimpleNamespace(missing=[], lines=list)
    monkeypatch.setattr(finetuning.starting_weights, "load", lambda *_, **__: found)
    predicted = []
    arguments = config, TEXT, objective, None, lambda *of: predicted.append(of)
    assert finetuning.run_task(*arguments).exit_status == 0 and predicted.pop()[0] is model
    found.missing.append("classification/pooler/kernel")
    with pytest.raises(InputError, match=r"must be fine-tuned for this task.* lacks classification/pooler"):
        finetuning.run_task(*arguments)
    assert not predicted


@pytest.mark.parametrize(("scores", "left"), [({}, None), (None, {"f1": 1.0}), ({"f1": 0.5}, {"f1": 0.5})])
def test_earlier_scores_stay_where_none_are_wanted(tmp_path, monkeypatch, scores, left):
    """They go if there is nothing to score against."""
    monkeypatch.setattr(finetuning, "_load_model", lambda *_: "model")
    path = tmp_path / "eval_results.json"
    path.write_text('{"f1": 1.0}')
    flags = {"do_train": False, "init_checkpoint": "x", "json": str(tmp_path / "copy.json")}
    config = SquadConfig(**FILES, output_dir=str(tmp_path), **flags)
    given = []
    predict = lambda *of: given.append(of) or scores  # noqa: E731
    assert finetuning.run_task(config, TEXT, None, None, predict).exit_status == 0
    assert given == [("model", tmp_path)]
    assert (json.loads(path.read_text()) if path.exists() else None) == left
    assert (tmp_path / "copy.json").exists() == bool(scores)


def test_a_stopped_training_predicts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetuning, "_fine_tune", lambda *of: given.append(of[3:-1]) or ("model", 15))
    config, given = SquadConfig(output_dir=str(tmp_path), **FILES), []
    predict = lambda *_: pytest.fail("predicts")  # noqa: E731
    data, inputs = SimpleNamespace(sequences=[]), {"train_file": ["a.json"]}
    with pytest.raises(InputError, match=r"a\.json must give at least one sequence\. Received: none"):
        finetuning.run_task(config, TEXT, None, lambda: (data, inputs), predict)
    data.sequences.append(1)
    assert finetuning.run_task(config, TEXT, None, lambda: (data, inputs), predict).exit_status == 128 + 15
    assert given == [(data, inputs, tmp_path, None, "")]
    assert "the same command continues" in capsys.readouterr().err


def test_results_are_younger_than_what_they_are_of(tmp_path, monkeypatch):
    config = SquadConfig(output_dir=str(tmp_path), **FILES)
    monkeypatch.setattr(finetuning, "_facts", lambda *_: {})
    found = tmp_path / "checkpoint-4"
    monkeypatch.setattr(finetuning.run_directory, "find_checkpoint", lambda *_: found)
    for number, name in enumerate(("old", "asked", "new")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(number, number))

    def has(*results, asked=(tmp_path / "asked",)):
        return finetuning.has_results(config, None, {}, results, asked)

    assert has("new") and has("old", "new", asked=[]) is False and has("asked", "new", asked=[])
    assert not has("new", "old") and not has("asked") and not has("new", "none") and not has()
    found = None
    assert not has("new")
