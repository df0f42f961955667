"""Models of every architecture and head out to every format and back, bit for bit.

This file alone catches a tensor that a format loses, and a head that a checkpoint is not known by.
"""

import functools
import io
import json
import zipfile

import h5py
import keras
import numpy as np
import pytest
from checkpoint_cases import BERT, CASES, NUM_CLASSES, assert_equal_weights, make_model, write_model
from exports import assert_close, run_export
from finetuning_batches import packed_and_unpacked
from foreign_checkpoints import write_google

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    family_of,
)
from bert_packed.checkpoints import starting_weights
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
WITH_POOLER = (PRETRAINING, CLASSIFICATION)
# Keras finds parts of a .keras file by the names of attributes and classes: those of earlier versions
PARTS_IN_KERAS = {
    "bert": {"layers/masked_language_model_head", "layers/next_sentence_head"},
    "bert mlm": {"layers/masked_language_model_head"},
    "bert answers": {"layers/answer_head"},
    "bert classes": {"classification/classifier", "classification/pooler"},
    "bert tags": {"layers/token_classification_head"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    @functools.cache
    def make(case):
        folder, model = tmp_path_factory.mktemp("model"), make_model(case)
        for form in ("ours", "hf"):
            write_model(folder / form, model, form)
        return folder, model

    return make


def load(path, case):
    config, head = CASES[case]
    model = build_model(head, config, num_outputs=NUM_CLASSES, seed=2)
    found = starting_weights.load(path, named_weights(model), config, head)
    assert (found.missing, found.unused) == ([], []) and found.num_used == len(model.weights)
    return model


@pytest.mark.parametrize("form", ["ours", "hf"])
@pytest.mark.parametrize("case", CASES)
def test_round_trips_are_exact(made, case, form):
    folder, model = made(case)
    config, head = CASES[case]
    num_outputs = {PRETRAINING: 2, QUESTION_ANSWERING: 2, CLASSIFICATION: 3, TOKEN_CLASSIFICATION: 3}
    found = starting_weights.stored_head(folder / form)
    assert found[0] == head and found[1] == num_outputs.get(head, found[1])
    assert starting_weights.read_config(folder / form) == config
    assert_equal_weights(load(folder / form, case), model)


@pytest.mark.parametrize("case", CASES)
def test_a_keras_file_opens(made, tmp_path, case):
    folder, model = made(case)
    assert run_export(init_checkpoint=folder / "ours", output_dir=tmp_path, format="keras") == 0
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.config == model.config
    assert_equal_weights(model, again)
    if case not in PARTS_IN_KERAS:
        return
    packed, _ = packed_and_unpacked()
    for name, values in again(packed).items():
        np.testing.assert_array_equal(np.asarray(values), np.asarray(model(packed)[name]))
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        weights = h5py.File(io.BytesIO(file.read("model.weights.h5")))
    names = []
    weights.visit(names.append)
    parts = {"/".join(name.split("/")[:2]) for name in names if "vars/" in name}
    assert parts == {"bert/blocks", "bert/embeddings"} | PARTS_IN_KERAS[case]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs KERAS_BACKEND=tensorflow")
@pytest.mark.parametrize(
    "case", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in [*PARTS_IN_KERAS][1:])]
)
def test_a_saved_model_computes_the_same(made, tmp_path, case):
    import tensorflow as tf

    folder, model = made(case)
    head = CASES[case][1]
    packed, unpacked = packed_and_unpacked()
    num_packs, length = packed["token_ids"].shape
    shapes = {"batch_size": num_packs, "max_seq_length": length}
    if head in WITH_POOLER:
        shapes["max_sequences_per_pack"] = packed["cls_positions"].shape[1]
    if head in (PRETRAINING, MASKED_LM):
        shapes["max_predictions_per_pack"] = packed["prediction_ids"].shape[1]
    flags = {"init_checkpoint": folder / "ours", "output_dir": tmp_path / "saved", **shapes}
    assert run_export(**flags, format="saved_model") == 0
    signatures = tf.saved_model.load(str(tmp_path / "saved")).signatures
    inputs = signatures["packed"].structured_input_signature[1]
    assert all(spec.shape.is_fully_defined() for spec in inputs.values())
    assert ("cls_positions" in inputs) == (head in WITH_POOLER)
    got = signatures["packed"](**{name: tf.constant(packed[name]) for name in inputs})
    want = model(packed)
    if head in (PRETRAINING, MASKED_LM):
        want["hidden_states"] = model.encode(packed)
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert_close(got[name], values)
    one = {name: values[:num_packs] for name, values in unpacked.items()}
    feeds = {
        "input_ids": one["token_ids"],
        "input_mask": one["sequence_ids"],
        "segment_ids": one["token_type_ids"],
        "masked_lm_positions": one["prediction_positions"],
    }
    want, used = model(one), one["sequence_ids"] > 0
    for signature in ("unpacked", "serving_default"):
        names = signatures[signature].structured_input_signature[1]
        got = signatures[signature](**{name: tf.constant(feeds[name]) for name in names})
        for name, values in want.items():
            part = used if head in (QUESTION_ANSWERING, TOKEN_CLASSIFICATION) else slice(None)
            assert_close(np.asarray(got[name])[part], np.asarray(values)[part])


@pytest.mark.parametrize(
    # run_squad.py and run_classifier.py of google-research/bert declare outputs × inputs
    ("case", "name", "num_outputs"),
    [("bert answers", "cls/squad/output_weights", 2), ("bert classes", "output_weights", NUM_CLASSES)],
)
def test_names_of_google(made, tmp_path, case, name, num_outputs):
    _, model = made(case)
    weights, head = named_weights(model), CASES[case][1]
    tensors = {
        row.google: weights[row.ours].numpy().T if row.google_transposed else weights[row.ours].numpy()
        for row in family_of(BERT).load_names().tensor_names(BERT, head)
    }
    assert tensors[name].shape == (num_outputs, BERT.hidden_size)
    prefix = write_google(tmp_path, tensors, BERT)
    assert starting_weights.stored_head(prefix) == (head, num_outputs)
    assert_equal_weights(load(prefix, case), model)


@pytest.mark.parametrize("num_classes", [1, NUM_CLASSES])
def test_an_export_has_the_number_of_classes(tmp_path, num_classes):
    """`transformers` takes one label for a number to predict, and two where it is given none."""
    model = build_model(CLASSIFICATION, BERT, num_outputs=num_classes, seed=1)
    config = json.loads((write_model(tmp_path, model, "hf") / "config.json").read_text())
    assert (config["num_labels"], config["architectures"]) == (num_classes, ["BertForSequenceClassification"])
