"""Models of every head go to other programs and come back; checkpoints start what they can."""

import collections
import dataclasses
import io
import json
import zipfile

import h5py
import keras
import numpy as np
import pytest
from exports import assert_close, run_export
from finetuning_batches import packed_and_unpacked
from foreign_checkpoints import write_google, write_hugging_face
from reference import import_reference
from safetensors.numpy import load_file
from tiny import CONFIG

from bert_packed.architectures.bert.checkpoint_names import tensor_names
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    FAMILIES,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
)
from bert_packed.checkpoints import checkpoint, export_formats, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.nonfinite import NotFiniteError

pytestmark = pytest.mark.both_backends

NUM_CLASSES = 3
CLASSES = {
    PRETRAINING: "BertForPreTraining",
    MASKED_LM: "BertForMaskedLM",
    QUESTION_ANSWERING: "BertForQuestionAnswering",
    CLASSIFICATION: "BertForSequenceClassification",
    TOKEN_CLASSIFICATION: "BertForTokenClassification",
}
FINE_TUNED = (QUESTION_ANSWERING, CLASSIFICATION, TOKEN_CLASSIFICATION)
WITH_POOLER = (PRETRAINING, CLASSIFICATION)
KERNELS = {
    PRETRAINING: "cls.seq_relationship.weight",
    MASKED_LM: "cls.predictions.transform.dense.weight",
    QUESTION_ANSWERING: "qa_outputs.weight",
    CLASSIFICATION: "classifier.weight",
    TOKEN_CLASSIFICATION: "classifier.weight",
}
# Parts of a .keras file, which Keras finds by the names of attributes and classes: those of earlier versions
HEADS_IN_KERAS = {
    PRETRAINING: {"layers/masked_language_model_head", "layers/next_sentence_head"},
    MASKED_LM: {"layers/masked_language_model_head"},
    QUESTION_ANSWERING: {"layers/answer_head"},
    CLASSIFICATION: {"classification/classifier", "classification/pooler"},
    TOKEN_CLASSIFICATION: {"layers/token_classification_head"},
}
OUTPUTS = {
    QUESTION_ANSWERING: "question_answering/output",
    CLASSIFICATION: "classification/classifier",
    TOKEN_CLASSIFICATION: "token_classification/classifier",
}


def make_model(head, seed=1):
    """A model all of whose tensors are random, those that start at 0 or 1 too."""
    model = build_model(head, CONFIG, num_outputs=NUM_CLASSES, seed=seed)
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(np.asarray(weight) + rng.normal(size=weight.shape, scale=0.1))
    return model


def save(folder, model):
    checkpoint.save_weights(folder, named_weights(model), CONFIG)
    return folder


def assert_same_weights(one, other, names=None):
    one, other = named_weights(one), named_weights(other)
    for name in names or one:
        np.testing.assert_array_equal(one[name].numpy(), other[name].numpy(), err_msg=name)


def test_the_test_knows_every_head():
    assert set(CLASSES) == set(FAMILIES["bert"].heads)


@pytest.mark.parametrize("head", CLASSES)
def test_the_table_names_every_tensor_of_each_model_once(head):
    rows = [row.ours for row in tensor_names(CONFIG.num_hidden_layers, head)]
    assert sorted(rows) == sorted(named_weights(make_model(head)))


@pytest.mark.parametrize("head", CLASSES)
def test_round_trip_is_exact(head, tmp_path):
    model = make_model(head)
    assert starting_weights.stored_head(save(tmp_path / "ours", model))[0] == head
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == [CLASSES[head]]
    assert starting_weights.stored_head(tmp_path / "hf")[0] == head
    again = build_model(head, CONFIG, num_outputs=NUM_CLASSES, seed=2)
    found = starting_weights.load(tmp_path / "hf", named_weights(again), CONFIG, head)
    assert not found.missing and not found.unused
    assert_same_weights(model, again)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert tensors[KERNELS[head]].shape[1] == CONFIG.hidden_size
    assert ("bert.pooler.dense.weight" in tensors) == (head in WITH_POOLER)


@pytest.mark.parametrize("num_classes", [1, NUM_CLASSES])
def test_an_export_has_the_number_of_classes(num_classes, tmp_path):
    """`transformers` takes one label for a number to predict, and two without any word of it."""
    model = build_model(CLASSIFICATION, CONFIG, num_outputs=num_classes, seed=1)
    save(tmp_path / "ours", model)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_labels"] == num_classes


@pytest.mark.parametrize("head", CLASSES)
def test_keras_file(head, tmp_path):
    model = make_model(head)
    save(tmp_path / "ours", model)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "keras", format="keras") == 0
    again = keras.saving.load_model(tmp_path / "keras" / "model.keras")
    assert_same_weights(model, again)
    packed, _ = packed_and_unpacked()
    for name, values in again(packed).items():
        np.testing.assert_array_equal(np.asarray(values), np.asarray(model(packed)[name]))
    with zipfile.ZipFile(tmp_path / "keras" / "model.keras") as file:
        weights = h5py.File(io.BytesIO(file.read("model.weights.h5")))
    names = []
    weights.visit(names.append)
    parts = {"/".join(name.split("/")[:2]) for name in names if "vars/" in name}
    assert parts == {"bert/blocks", "bert/embeddings"} | HEADS_IN_KERAS[head]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs KERAS_BACKEND=tensorflow")
@pytest.mark.parametrize(
    "head", [PRETRAINING, *(pytest.param(name, marks=pytest.mark.slow) for name in (MASKED_LM, *FINE_TUNED))]
)
def test_saved_model(head, tmp_path):
    import tensorflow as tf

    model = make_model(head)
    save(tmp_path / "ours", model)
    packed, unpacked = packed_and_unpacked()
    num_packs, length = packed["token_ids"].shape
    shapes = {"batch_size": num_packs, "max_seq_length": length}
    if head in WITH_POOLER:
        shapes["max_sequences_per_pack"] = packed["cls_positions"].shape[1]
    if head in (PRETRAINING, MASKED_LM):
        shapes["max_predictions_per_pack"] = packed["prediction_ids"].shape[1]
    flags = {"init_checkpoint": tmp_path / "ours", "output_dir": tmp_path / "saved", **shapes}
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


@pytest.mark.parametrize("head", [QUESTION_ANSWERING, CLASSIFICATION])
def test_google_names(head, tmp_path):
    model = make_model(head)
    weights = named_weights(model)
    tensors = {
        row.google: weights[row.ours].numpy().T if row.google_transposed else weights[row.ours].numpy()
        for row in tensor_names(CONFIG.num_hidden_layers, head)
    }
    # outputs × inputs, as run_squad.py and run_classifier.py of google-research/bert declare them
    name, num_outputs = {
        QUESTION_ANSWERING: ("cls/squad/output_weights", 2),
        CLASSIFICATION: ("output_weights", NUM_CLASSES),
    }[head]
    assert tensors[name].shape == (num_outputs, CONFIG.hidden_size)
    prefix = write_google(tmp_path / "google", tensors, CONFIG)
    assert starting_weights.stored_head(prefix)[0] == head
    again = build_model(head, CONFIG, num_outputs=NUM_CLASSES, seed=2)
    found = starting_weights.load(prefix, named_weights(again), CONFIG, head)
    assert not found.missing and not found.unused
    assert_same_weights(model, again)


@pytest.mark.parametrize("head", CLASSES)
def test_transformers_computes_the_same(head, tmp_path):
    torch, transformers = import_reference()
    model = make_model(head)
    save(tmp_path / "ours", model)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    reference, info = getattr(transformers, CLASSES[head]).from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    packed, unpacked = packed_and_unpacked()
    outputs = {name: np.asarray(values) for name, values in model(packed).items()}
    pairs = collections.defaultdict(list)
    for sequence, (row, slot) in enumerate(np.argwhere(packed["slot_weights"])):
        length = int(unpacked["sequence_ids"][sequence].sum())
        tokens, types = (
            torch.tensor(unpacked[name][sequence, :length]).long()[None]
            for name in ("token_ids", "token_type_ids")
        )
        with torch.no_grad():
            theirs = reference.eval()(input_ids=tokens, token_type_ids=types)
        theirs = {name: values[0].numpy() for name, values in theirs.items()}
        mine, predicted = (packed[name][row] == slot + 1 for name in ("sequence_ids", "prediction_sequences"))
        if head in (PRETRAINING, MASKED_LM):
            used = unpacked["prediction_sequences"][sequence] > 0
            logits = theirs["prediction_logits" if head == PRETRAINING else "logits"]
            want = {"mlm_logits": (predicted, logits[unpacked["prediction_positions"][sequence][used]])}
            if head == PRETRAINING:
                want["nsp_logits"] = slot, theirs["seq_relationship_logits"]
        else:
            want = {name: (slot if head == CLASSIFICATION else mine, theirs[name]) for name in outputs}
        for name, (part, values) in want.items():
            pairs[name].append((outputs[name][row][part], values))
    assert pairs.keys() == outputs.keys()
    for name in pairs:  # of all sequences at once: two logits near 0 are no measure of rounding
        got, want = zip(*pairs[name], strict=True)
        assert len(got) == 11
        assert [one.shape for one in got] == [one.shape for one in want]
        assert_close(*(np.concatenate([one.ravel() for one in side]) for side in (got, want)))


def test_a_head_of_transformers_is_read(tmp_path):
    """The other way: a model that transformers made answers here as it does there."""
    torch, transformers = import_reference()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{name: value for name, value in dataclasses.asdict(CONFIG).items() if "ablation" not in name}
    )
    reference = transformers.BertForQuestionAnswering(config).eval()
    reference.save_pretrained(tmp_path)
    model = build_model(QUESTION_ANSWERING, CONFIG, num_outputs=2, seed=1)
    found = starting_weights.load(tmp_path, named_weights(model), CONFIG, QUESTION_ANSWERING)
    assert not found.missing and not found.unused
    _, unpacked = packed_and_unpacked()
    length = int(unpacked["sequence_ids"][0].sum())
    with torch.no_grad():
        want = reference(
            input_ids=torch.tensor(unpacked["token_ids"][:1, :length]).long(),
            token_type_ids=torch.tensor(unpacked["token_type_ids"][:1, :length]).long(),
        )
    assert_close(model(unpacked)["end_logits"][0, :length], want.end_logits[0].numpy())


@pytest.mark.parametrize("form", ["ours", "hf"])
@pytest.mark.parametrize(
    ("stored", "head"),
    [*((PRETRAINING, head) for head in FINE_TUNED), (MASKED_LM, CLASSIFICATION), (PRETRAINING, MASKED_LM)],
)
def test_a_checkpoint_starts_what_it_can(stored, head, form, tmp_path):
    pretrained = make_model(stored)
    save(tmp_path / "ours", pretrained)
    assert form == "ours" or run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf") == 0
    model = build_model(head, CONFIG, num_outputs=NUM_CLASSES, seed=2)
    found = starting_weights.load(tmp_path / form, named_weights(model), CONFIG, head)
    shared = [name for name in named_weights(model) if name in named_weights(pretrained)]
    assert_same_weights(pretrained, model, shared)
    names, pooler = list(named_weights(model)), []
    if (stored, head) == (PRETRAINING, CLASSIFICATION):  # whose pooler is the same layer
        pooler = ["classification/pooler/kernel", "classification/pooler/bias"]
        kernel = named_weights(pretrained)["next_sentence/pooler/kernel"].numpy()
        np.testing.assert_array_equal(model.classification.pooler.kernel.numpy(), kernel)
    assert found.missing == [name for name in names if name not in {*shared, *pooler}]
    assert found.num_used == len(shared) + len(pooler)
    # A matrix that is stored twice elsewhere counts once
    assert len(found.unused) == len(named_weights(pretrained)) - found.num_used


def test_a_bare_encoder_of_hugging_face_starts_a_fine_tuning(tmp_path):
    pretrained = named_weights(make_model(PRETRAINING))
    tensors = {
        row.hugging_face.removeprefix("bert."): np.ascontiguousarray(
            pretrained[row.ours].numpy().T if row.hugging_face_transposed else pretrained[row.ours].numpy()
        )
        for row in tensor_names(CONFIG.num_hidden_layers)
        if row.hugging_face.startswith("bert.")
    }
    write_hugging_face(tmp_path / "hf", tensors, CONFIG)
    model = build_model(QUESTION_ANSWERING, CONFIG, num_outputs=2, seed=2)
    found = starting_weights.load(tmp_path / "hf", named_weights(model), CONFIG, QUESTION_ANSWERING)
    assert found.unused == ["pooler.dense.bias", "pooler.dense.weight"]
    np.testing.assert_array_equal(
        named_weights(model)["bert/layer_1/attention/key/kernel"].numpy(),
        pretrained["bert/layer_1/attention/key/kernel"].numpy(),
    )


@pytest.mark.parametrize("form", ["ours", "hf"])
@pytest.mark.parametrize(
    ("stored", "wanted"), [(CLASSIFICATION, TOKEN_CLASSIFICATION), (TOKEN_CLASSIFICATION, CLASSIFICATION)]
)
def test_labels_of_sequences_are_not_taken_for_those_of_tokens(stored, wanted, form, tmp_path):
    """They have one name and shape at Hugging Face's; only the class differs."""
    model = make_model(stored)
    save(tmp_path / "ours", model)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    assert starting_weights.stored_head(tmp_path / form) == (stored, NUM_CLASSES)
    other = build_model(wanted, CONFIG, num_outputs=NUM_CLASSES, seed=2)
    before = np.array(named_weights(other)[f"{OUTPUTS[wanted]}/kernel"])
    found = starting_weights.load(tmp_path / form, named_weights(other), CONFIG, wanted)
    assert {f"{OUTPUTS[wanted]}/kernel", f"{OUTPUTS[wanted]}/bias"} <= set(found.missing)
    unused = {"ours": f"{OUTPUTS[stored]}/kernel", "hf": "classifier.weight"}[form]
    assert unused in found.unused
    np.testing.assert_array_equal(named_weights(other)[f"{OUTPUTS[wanted]}/kernel"].numpy(), before)
    np.testing.assert_array_equal(
        named_weights(other)["bert/layer_1/attention/key/kernel"].numpy(),
        named_weights(model)["bert/layer_1/attention/key/kernel"].numpy(),
    )


def test_names_of_labels_go_out_and_come_back(tmp_path):
    """As transformers reads them, and as it writes them."""
    _, transformers = import_reference()
    save(tmp_path / "ours", make_model(TOKEN_CLASSIFICATION))
    (tmp_path / "ours" / "labels.txt").write_text("O\nB-PER\nI-PER\n")
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf", format="hf") == 0
    reference = transformers.BertForTokenClassification.from_pretrained(tmp_path / "hf")
    assert reference.config.id2label == {0: "O", 1: "B-PER", 2: "I-PER"}
    assert reference.config.label2id == {"O": 0, "B-PER": 1, "I-PER": 2}
    reference.save_pretrained(tmp_path / "theirs")
    assert starting_weights.stored_labels(tmp_path / "theirs") == ("O", "B-PER", "I-PER")
    (tmp_path / "ours" / "labels.txt").write_text("O\nO\n")
    with pytest.raises(InputError, match=r"labels.txt must name each label once. Received: 'O', 'O'"):
        starting_weights.stored_labels(tmp_path / "ours")


@pytest.mark.parametrize("num_labels", [1, 3])
def test_transformers_is_told_of_a_number_by_its_one_label(num_labels, tmp_path):
    model = build_model(CLASSIFICATION, CONFIG, num_outputs=num_labels, seed=1)
    export_formats.write_hugging_face(tmp_path, model, named_weights(model))
    assert json.loads((tmp_path / "config.json").read_text())["num_labels"] == num_labels


def test_what_is_not_finite_is_not_exported_and_a_tokenizer_knows_the_greatest_length(tmp_path, monkeypatch):
    model, given = make_model(QUESTION_ANSWERING), []
    weights = named_weights(model)
    monkeypatch.setattr(export_formats, "write_tokenizer", lambda *arguments: given.append(arguments))
    export_formats.write_hugging_face(tmp_path, model, weights, vocab_file="v.txt", do_lower_case=False)
    assert given == [(tmp_path, "v.txt", False, CONFIG.max_position_embeddings, {})]
    (tmp_path / "model.safetensors").unlink()
    bias = weights["question_answering/output/bias"]
    bias.assign([0.0, np.nan])
    with pytest.raises(NotFiniteError, match=r"Received: nan in qa_outputs\.bias of the export"):
        export_formats.write_hugging_face(tmp_path, model, weights)
    assert not (tmp_path / "model.safetensors").exists()


def test_pretraining_does_not_start_from_a_fine_tuned_model_unasked(tmp_path):
    save(tmp_path / "ours", make_model(QUESTION_ANSWERING))
    model = named_weights(make_model(PRETRAINING, seed=2))
    with pytest.raises(InputError, match="holds another model"):
        starting_weights.load(tmp_path / "ours", model, CONFIG)
    assert starting_weights.load(tmp_path / "ours", model, CONFIG, any_head=True).missing


def test_mistakes(tmp_path):
    model = make_model(CLASSIFICATION)
    save(tmp_path / "ours", model)
    two = build_model(CLASSIFICATION, CONFIG, num_outputs=2, seed=2)
    with pytest.raises(InputError, match=r"classification/classifier/.* must have shape"):
        starting_weights.load(tmp_path / "ours", named_weights(two), CONFIG, CLASSIFICATION)
    deeper = dataclasses.replace(CONFIG, num_hidden_layers=3)
    answers = build_model(QUESTION_ANSWERING, deeper, num_outputs=2, seed=2)
    with pytest.raises(InputError, match=r"num_hidden_layers must be 3. Received: 2"):
        starting_weights.load(tmp_path / "ours", named_weights(answers), deeper, QUESTION_ANSWERING)
