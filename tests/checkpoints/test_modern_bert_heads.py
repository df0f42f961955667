"""A ModernBERT's heads for fine-tuning give what transformers gives, and their checkpoints are told apart."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from exports import assert_close, run_export
from finetuning_batches import packed_and_unpacked
from modern_bert_models import CONFIG
from reference import import_reference

from bert_packed.architectures.modern_bert.checkpoint_names import tensor_names
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    FAMILIES,
    MASKED_LM,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
)
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.training.backend import compiled
from bert_packed.training.engines.engine import named_weights

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
NUM_CLASSES = 3
CLASSES = {
    QUESTION_ANSWERING: "ModernBertForQuestionAnswering",
    TOKEN_CLASSIFICATION: "ModernBertForTokenClassification",
    CLASSIFICATION: "ModernBertForSequenceClassification",
}
# Head, and pooling of a sequence
KINDS = [
    (QUESTION_ANSWERING, "cls"),
    (TOKEN_CLASSIFICATION, "cls"),
    (CLASSIFICATION, "cls"),
    (CLASSIFICATION, "mean"),
]


def make_model(head, pooling="cls", seed=1):
    """A model all of whose tensors are random, those that start at 0 or 1 too."""
    config = dataclasses.replace(CONFIG, classifier_pooling=pooling)
    model = build_model(head, config, num_outputs=NUM_CLASSES, seed=seed)
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(np.asarray(weight) + rng.normal(size=weight.shape, scale=0.2))
    return model


def save(folder, model):
    checkpoint.save_weights(folder, named_weights(model), model.config)
    return folder


def test_the_test_knows_every_head():
    assert {MASKED_LM, *CLASSES} == {*FAMILIES["modernbert"].heads}


@pytest.mark.parametrize("head", CLASSES)
def test_the_table_names_every_tensor_of_each_model_once(head):
    assert sorted(row.ours for row in tensor_names(CONFIG, head)) == sorted(named_weights(make_model(head)))


@pytest.mark.parametrize(("head", "pooling"), KINDS)
def test_transformers_computes_the_same(head, pooling, tmp_path):
    torch, transformers = import_reference()
    model = make_model(head, pooling)
    save(tmp_path / "ours", model)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == [CLASSES[head]] and config["classifier_pooling"] == pooling
    kind = getattr(transformers, CLASSES[head])
    reference, info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    packed, unpacked = packed_and_unpacked()
    outputs = {
        name: np.asarray(of) for name, of in compiled(lambda batch: model(batch), model)(packed).items()
    }
    pairs = {name: [] for name in outputs}
    for sequence, (row, slot) in enumerate(np.argwhere(packed["slot_weights"])):
        tokens = unpacked["token_ids"][sequence, : int(unpacked["sequence_ids"][sequence].sum())]
        with torch.no_grad():
            theirs = reference.eval()(input_ids=torch.tensor(tokens).long()[None])
        part = slot if head == CLASSIFICATION else packed["sequence_ids"][row] == slot + 1
        for name, values in outputs.items():
            pairs[name].append((values[row][part], theirs[name][0].numpy()))
    for found in pairs.values():  # of all sequences at once: two logits near 0 are no measure of rounding
        assert len(found) == 11 and all(one.shape == other.shape for one, other in found)
        assert_close(*(np.concatenate([pair[side].ravel() for pair in found]) for side in (0, 1)))


@pytest.mark.parametrize("head", CLASSES)
def test_round_trips_are_exact(head, tmp_path):
    model = make_model(head)
    save(tmp_path / "ours", model)
    for form in ("hf", "keras"):
        assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / form, format=form) == 0
    again = build_model(head, model.config, num_outputs=NUM_CLASSES, seed=2)
    found = starting_weights.load(tmp_path / "hf", named_weights(again), model.config, head)
    assert not found.missing and not found.unused
    opened = keras.saving.load_model(tmp_path / "keras" / "model.keras")
    for name, variable in named_weights(model).items():
        for other in (again, opened):
            np.testing.assert_array_equal(named_weights(other)[name].numpy(), variable.numpy(), err_msg=name)


@pytest.mark.parametrize("form", ["ours", "hf"])
@pytest.mark.parametrize("stored", CLASSES)
def test_a_head_is_not_taken_for_another_of_the_same_names(stored, form, tmp_path):
    """All three last layers have one name at Hugging Face's; only the class differs."""
    model = make_model(stored)
    save(tmp_path / "ours", model)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    num_outputs = 2 if stored == QUESTION_ANSWERING else NUM_CLASSES
    assert starting_weights.stored_head(tmp_path / form) == (stored, num_outputs)
    for wanted in CLASSES.keys() - {stored}:
        other = build_model(wanted, model.config, num_outputs=NUM_CLASSES, seed=2)
        found = starting_weights.load(tmp_path / form, named_weights(other), model.config, wanted)
        assert sorted(found.missing) == [f"{wanted}/classifier/bias", f"{wanted}/classifier/kernel"]
        # What all heads begin with goes along, as in transformers
        np.testing.assert_array_equal(
            named_weights(other)[f"{wanted}/transform/kernel"].numpy(),
            model.predictions.transform.kernel.numpy(),
        )


@pytest.mark.parametrize("stored", CLASSES)
def test_a_head_whose_class_is_not_named_counts_as_one_of_sequences(stored, tmp_path):
    save(tmp_path / "ours", make_model(stored))
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    content = json.loads((tmp_path / "hf/config.json").read_text())
    del content["architectures"]
    (tmp_path / "hf/config.json").write_text(json.dumps(content))
    num_outputs = 2 if stored == QUESTION_ANSWERING else NUM_CLASSES
    assert starting_weights.stored_head(tmp_path / "hf") == (CLASSIFICATION, num_outputs)


@pytest.mark.parametrize("form", ["ours", "hf"])
def test_a_pretrained_model_starts_a_fine_tuning(form, tmp_path):
    save(tmp_path / "ours", make_model(MASKED_LM))
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    model = build_model(CLASSIFICATION, CONFIG, num_outputs=NUM_CLASSES, seed=2)
    found = starting_weights.load(tmp_path / form, named_weights(model), CONFIG, CLASSIFICATION)
    assert sorted(found.missing) == ["classification/classifier/bias", "classification/classifier/kernel"]
    assert len(found.unused) == 1 and found.unused[0] in ("predictions/output_bias", "decoder.bias")
