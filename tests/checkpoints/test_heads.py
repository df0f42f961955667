"""A checkpoint of one head as the start of a model with another, from our form and from Hugging Face's.

This file alone catches a last layer that is taken for another head's, and layers that should go along.
"""

import functools
import json

import numpy as np
import pytest
from checkpoint_cases import BERT, CASES, NUM_CLASSES, load_transformers, make_model, write_model

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    model_type,
)
from bert_packed.checkpoints import export_formats, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
FORMS = ("ours", "hf")
TASKS = (QUESTION_ANSWERING, CLASSIFICATION, TOKEN_CLASSIFICATION)
STARTS = [
    *(("bert", head) for head in (MASKED_LM, *TASKS)),
    ("bert mlm", CLASSIFICATION),
    ("bert classes", TOKEN_CLASSIFICATION),
    ("bert tags", CLASSIFICATION),
    *(("modernbert", head) for head in TASKS),
    ("modernbert answers", CLASSIFICATION),
    ("modernbert answers", TOKEN_CLASSIFICATION),
    ("modernbert classes", QUESTION_ANSWERING),
    ("modernbert classes", TOKEN_CLASSIFICATION),
    ("modernbert tags", QUESTION_ANSWERING),
    ("modernbert tags", CLASSIFICATION),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    @functools.cache
    def make(case, form):
        model = make_model(case)
        folder = write_model(tmp_path_factory.mktemp("stored"), model, form)
        return folder, {name: variable.numpy() for name, variable in named_weights(model).items()}

    return make


def same_layer(name, case, wanted, stored):
    """The name that a tensor of a model with another head has in a case's model; None where it has none."""
    config, head = CASES[case]
    encoder, part = ("bert/", "modern_bert/"), name.partition("/")[2]
    if name.startswith((*encoder, "predictions/")):
        other = name
    elif model_type(config) == "modernbert" and part.startswith(("transform/", "LayerNorm/")):
        other = f"{'predictions' if head == MASKED_LM else head}/{part}"
    else:
        pooler = (head, wanted) == (PRETRAINING, CLASSIFICATION) and part.startswith("pooler/")
        other = f"next_sentence/{part}" if pooler else None
    return other if other in stored else None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("case", "wanted"), STARTS)
def test_a_checkpoint_starts_what_it_can(stored, case, wanted, form):
    folder, values = stored(case, form)
    config = CASES[case][0]
    weights = named_weights(build_model(wanted, config, num_outputs=NUM_CLASSES, seed=2))
    before = {name: variable.numpy() for name, variable in weights.items()}
    found = starting_weights.load(folder, weights, config, wanted)
    shared = {name: same_layer(name, case, wanted, values) for name in weights}
    shared = {name: other for name, other in shared.items() if other}
    assert found.missing == [name for name in weights if name not in shared]
    assert found.num_used == len(shared) and len(found.unused) == len(values) - len(shared)
    for name, variable in weights.items():
        want = values[shared[name]] if name in shared else before[name]
        np.testing.assert_array_equal(variable.numpy(), want, err_msg=name)


@pytest.mark.parametrize("case", ["modernbert answers", "modernbert classes", "modernbert tags", "bert tags"])
def test_a_head_without_a_class_counts_as_one_of_sequences(tmp_path, case):
    """The last layers have one name at Hugging Face's; only the class in `config.json` differs."""
    folder = write_model(tmp_path, make_model(case), "hf")
    head, num_outputs = starting_weights.stored_head(folder)
    assert head == CASES[case][1]
    content = json.loads((folder / "config.json").read_text())
    del content["architectures"]
    (folder / "config.json").write_text(json.dumps(content))
    assert starting_weights.stored_head(folder) == (CLASSIFICATION, num_outputs)


def test_names_of_labels_go_out_and_come_back(tmp_path):
    model, names = make_model("bert tags"), ("O", "B-PER", "I-PER")
    export_formats.write_hugging_face(tmp_path, model, named_weights(model), classes=names)
    reference = load_transformers("bert tags", tmp_path)
    assert reference.config.id2label == dict(enumerate(names))
    assert reference.config.label2id == {name: number for number, name in enumerate(names)}
    reference.save_pretrained(tmp_path / "theirs")
    assert starting_weights.stored_labels(tmp_path / "theirs") == names


def test_labels_of_a_run_are_those_of_its_checkpoints(tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "labels.txt").write_text("O\nB-X\n")
    for name in ("", "checkpoint-4"):
        assert starting_weights.stored_labels(tmp_path / name) == ("O", "B-X")
    (tmp_path / "model").mkdir()
    assert starting_weights.stored_labels(tmp_path / "model") == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("labels.txt", "O\nO\n", r"labels.txt must name each label once. Received: 'O', 'O'"),
        ("config.json", '{"id2label": {"0": "O", "2": "B-X"}}', "must hold id2label from 0 on"),
        ("config.json", '{"id2label": {"0": "O", "1": ""}}', "name each label once. Received: 'O', ''"),
    ],
)
def test_wrong_labels_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        starting_weights.stored_labels(tmp_path)


def test_a_tokenizer_knows_the_greatest_length(tmp_path, monkeypatch):
    model, given = make_model("bert answers"), []
    monkeypatch.setattr(export_formats, "write_tokenizer", lambda *arguments: given.append(arguments))
    for limit in (None, 8, 99):
        export_formats.write_hugging_face(
            tmp_path, model, named_weights(model), vocab_file="v.txt", do_lower_case=False, max_length=limit
        )
    assert given == [(tmp_path, "v.txt", False, length, {}) for length in (24, 8, 24)]


def test_pretraining_does_not_start_from_a_task_unasked(stored):
    folder, _ = stored("bert answers", "ours")
    weights = named_weights(make_model("bert", seed=2))
    with pytest.raises(InputError, match="holds another model"):
        starting_weights.load(folder, weights, BERT)
    assert starting_weights.load(folder, weights, BERT, any_head=True).missing


def test_another_number_of_classes_is_refused(stored):
    weights = named_weights(build_model(CLASSIFICATION, BERT, num_outputs=2, seed=2))
    with pytest.raises(InputError, match=r"classification/classifier/.* must have shape"):
        starting_weights.load(stored("bert classes", "ours")[0], weights, BERT, CLASSIFICATION)
