"""Checkpoints of Hugging Face and Google: every tensor in its place, or named."""

import dataclasses
import json
import re
import struct

import numpy as np
import pytest
from foreign_checkpoints import ONE_LAYER, WIDTH, make_tensors, write_google, write_hugging_face
from packs import VOCAB_SIZE
from tiny import make_engine, write_data

from bert_packed import cli
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.checkpoints import checkpoint, pretrained_files, starting_weights
from bert_packed.core import command_line
from bert_packed.core.settings import InputError
from bert_packed.runs.pretraining_config import PretrainingConfig


@pytest.fixture
def weights():
    return make_engine(config=ONE_LAYER).weights()


def assert_loaded(weights, tensors):
    assert weights.keys() == tensors.keys()
    for name, variable in weights.items():
        np.testing.assert_array_equal(variable.numpy(), tensors[name], err_msg=name)


def test_the_test_knows_every_tensor(weights):
    ours, theirs, google = make_tensors()
    assert len(ours) == len(theirs) == len(google) == len(weights)


def test_hugging_face(tmp_path, weights):
    ours, theirs, _ = make_tensors()
    theirs["cls.predictions.decoder.weight"] = theirs["bert.embeddings.word_embeddings.weight"].copy()
    theirs["cls.predictions.decoder.bias"] = theirs["cls.predictions.bias"].copy()
    theirs["bert.embeddings.position_ids"] = np.arange(24)[None]
    theirs["qa_outputs.weight"] = np.zeros((2, WIDTH), np.float32)
    found = starting_weights.load(write_hugging_face(tmp_path, theirs), weights, ONE_LAYER)
    assert_loaded(weights, ours)
    assert (found.num_used, found.missing) == (len(ours), [])
    assert found.unused == ["bert.embeddings.position_ids", "qa_outputs.weight"]
    assert "bert.embeddings.position_ids, qa_outputs.weight" in "\n".join(found.lines())


def test_output_bias_beside_the_tied_matrix_only(tmp_path, weights):
    ours, theirs, _ = make_tensors()
    theirs["cls.predictions.decoder.bias"] = theirs.pop("cls.predictions.bias")
    found = starting_weights.load(write_hugging_face(tmp_path, theirs), weights, ONE_LAYER)
    assert_loaded(weights, ours)
    assert (found.unused, found.missing) == ([], [])


def test_another_architecture_with_the_same_names_is_refused(tmp_path, weights):
    """RoBERTa's tensors fit; its positions start at 2."""
    _, theirs, _ = make_tensors()
    write_hugging_face(tmp_path, theirs)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "roberta"}))
    with pytest.raises(
        InputError, match=r"config\.json: model_type must be .* or modernbert\. Received: roberta"
    ):
        starting_weights.load(tmp_path, weights, ONE_LAYER)


@pytest.mark.parametrize("change", [{"layer_norm_eps": 1e-3}, {"ablation_no_attention_mask": True}])
def test_settings_of_our_own_checkpoint_must_be_the_models(tmp_path, weights, change):
    checkpoint.save_weights(tmp_path, weights, ONE_LAYER)
    (name,) = change
    with pytest.raises(InputError, match=f"holds another model: {name} must be {change[name]}"):
        starting_weights.load(tmp_path, weights, dataclasses.replace(ONE_LAYER, **change))
    other = dataclasses.replace(ONE_LAYER, hidden_dropout_prob=0.3)
    assert starting_weights.load(tmp_path, weights, other).num_used == len(weights)


def test_bare_encoder_of_the_oldest_form(tmp_path, weights):
    """Without `bert.`, with gamma and beta, in half precision; heads keep their initial values, by name."""
    ours, theirs, _ = make_tensors()
    before = {name: variable.numpy() for name, variable in weights.items()}
    bare = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): values.astype(np.float16)
        for name, values in theirs.items()
        if name.startswith("bert.")
    }
    folder = write_hugging_face(tmp_path, bare)
    read = pretrained_files.HuggingFaceCheckpoint(folder).read(ONE_LAYER, PRETRAINING)
    assert {values.dtype.name for values in read.tensors.values()} == {"float32"}
    found = starting_weights.load(folder, weights, ONE_LAYER)
    heads = [name for name in weights if name.startswith(("predictions/", "next_sentence/classifier/"))]
    assert found.missing == heads and len(heads) == 7 and found.unused == []
    halves = {name: values.astype(np.float16) for name, values in ours.items()}
    assert_loaded(weights, {name: (before if name in heads else halves)[name] for name in weights})
    assert ", ".join(heads) in found.lines()[-1]


@pytest.mark.parametrize("form", ["prefix", "folder", "saved_model"])
def test_google(tmp_path, weights, form):
    ours, _, google = make_tensors()
    google |= {"global_step": np.int64(7), "bert/pooler/dense/bias/adam_m": np.zeros(WIDTH, np.float32)}
    google["_CHECKPOINTABLE_OBJECT_GRAPH"] = np.zeros(1, np.float32)  # no tensor that a user would miss
    prefix = path = write_google(tmp_path / "google", google)
    if form == "folder":
        path = prefix.parent
    elif form == "saved_model":
        path = prefix.parent
        (path / "variables").mkdir()
        for file in path.glob("bert_model.ckpt*"):
            file.rename(path / "variables" / file.name.replace("bert_model.ckpt", "variables"))
    found = starting_weights.load(path, weights, ONE_LAYER)
    assert_loaded(weights, ours)
    assert found.unused == ["bert/pooler/dense/bias/adam_m", "global_step"]
    assert starting_weights.read_config(path) == ONE_LAYER
    # What the tensors are checked by, one folder up for a SavedModel
    google = pretrained_files.GoogleCheckpoint(pretrained_files.find_google(path))
    read = google.read(ONE_LAYER, PRETRAINING)
    assert read.config == ONE_LAYER


def test_a_checkpoint_without_config(tmp_path):
    google = make_tensors()[2]
    with pytest.raises(InputError, match=r"must hold bert_config\.json or config\.json"):
        starting_weights.read_config(write_google(tmp_path / "google", google, config=None))


def test_the_head_of_a_task_goes_before_those_of_pretraining(tmp_path):
    """As in a file of a program that kept them."""
    write_hugging_face(tmp_path, {"cls.seq_relationship.bias": np.zeros(2, np.float32)})
    assert starting_weights.stored_head(tmp_path) == ("pretraining", 2)
    for name, head in (("qa_outputs.bias", "question_answering"), ("classifier.bias", "classification")):
        tensors = {"cls.seq_relationship.bias": np.zeros(2, np.float32), name: np.zeros(3, np.float32)}
        write_hugging_face(tmp_path, tensors)
        assert starting_weights.stored_head(tmp_path) == (head, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act must be relu. Received: gelu"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps must be 1e-06. Received: 1e-12"),
        ({"num_attention_heads": 4}, "num_attention_heads must be 4. Received: 2"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 2. Received: 1"),
        ({"vocab_size": 30}, r"word_embeddings\S*, which is bert/embeddings/word_embeddings .* \(31, 16\)"),
        ({"intermediate_size": 31}, r"intermediate.dense.*31.*Received: .*32"),
    ],
)
@pytest.mark.parametrize("form", ["hugging_face", "google"])
def test_another_model_is_refused_and_nothing_assigned(tmp_path, form, change, message):
    _, theirs, google = make_tensors()
    config = dataclasses.replace(ONE_LAYER, **change)
    write = {"hugging_face": (write_hugging_face, theirs), "google": (write_google, google)}
    path = write[form][0](tmp_path, write[form][1])
    weights = make_engine(config=config).weights()
    before = {name: variable.numpy() for name, variable in weights.items()}
    with pytest.raises(InputError, match=message):
        starting_weights.load(path, weights, config)
    assert_loaded(weights, before)


def test_a_file_of_others_that_is_not_finite_is_refused_and_nothing_assigned(tmp_path, weights):
    _, theirs, _ = make_tensors()
    before = {name: variable.numpy() for name, variable in weights.items()}
    name = "bert.encoder.layer.0.output.dense.bias"
    theirs[name] = np.where(np.arange(WIDTH) == 3, np.nan, theirs[name]).astype(np.float32)
    with pytest.raises(InputError, match=r"Received: nan in bert/layer_0/feed_forward/output/bias of .*hf"):
        starting_weights.load(write_hugging_face(tmp_path / "hf", theirs), weights, ONE_LAYER)
    assert_loaded(weights, before)


def test_missing_tensor_of_the_encoder_is_named(tmp_path, weights):
    _, _, google = make_tensors()
    del google["bert/encoder/layer_0/output/dense/bias"]
    with pytest.raises(InputError, match="has no tensor for bert/layer_0/feed_forward/output/bias"):
        starting_weights.load(write_google(tmp_path, google, config=None), weights, ONE_LAYER)


def test_mistakes_in_files_are_named(tmp_path, weights):
    _, theirs, google = make_tensors()
    untied = {**theirs, "cls.predictions.decoder.weight": np.zeros((VOCAB_SIZE, WIDTH), np.float32)}
    twice = {**theirs, "embeddings.word_embeddings.weight": np.zeros((VOCAB_SIZE, WIDTH), np.float32)}
    other_bias = {**theirs, "cls.predictions.decoder.bias": np.zeros(VOCAB_SIZE, np.float32)}
    for tensors, message in (
        (untied, "decoder.weight equal to"),
        (other_bias, "decoder.bias equal to"),
        (twice, "must hold each tensor once"),
    ):
        with pytest.raises(InputError, match=message):
            starting_weights.load(write_hugging_face(tmp_path / "hf", tensors), weights, ONE_LAYER)
    damaged = write_hugging_face(tmp_path / "hf", theirs) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(InputError, match="must be a complete safetensors file"):
        starting_weights.load(tmp_path / "hf", weights, ONE_LAYER)
    assert pretrained_files.is_hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").unlink()
    assert not pretrained_files.is_hugging_face(tmp_path / "hf")  # one of ours may be damaged too
    write_hugging_face(tmp_path / "other", theirs)
    (tmp_path / "other" / "config.json").unlink()
    with pytest.raises(InputError, match=r"must hold config\.json beside model\.safetensors"):
        starting_weights.load(tmp_path / "other", weights, ONE_LAYER)
    prefix = write_google(tmp_path / "google", google)
    data = prefix.with_name(prefix.name + ".data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:-99])
    with pytest.raises(InputError, match="must be a complete TensorFlow checkpoint"):
        starting_weights.load(prefix, weights, ONE_LAYER)
    (tmp_path / "google" / "second.index").touch()
    with pytest.raises(InputError, match="must name one of several checkpoints"):
        starting_weights.load(prefix.parent, weights, ONE_LAYER)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (
                {"weight_map": {"t": name}},
                f"must name a .safetensors file beside it for t. Received: {name!r}.",
            )
            for name in (
                "../x.safetensors",
                "/x.safetensors",
                "..",
                "",
                "a\0.safetensors",
                None,
                5,
                {},
                ["x"],
            )
        ),
        *(
            ({"weight_map": places}, f"must have a weight_map, an object. Received: {places!r}.")
            for places in (None, 5, "x", ["x"])
        ),
        ({}, "must have a weight_map, an object. Received: None."),
        ([], "must hold a JSON object. Received: list."),
    ],
)
def test_an_index_names_files_beside_it_only(tmp_path, content, message):
    """A path would be read wherever it leads, and what is no text is no name."""
    index = write_hugging_face(tmp_path, {}) / "model.safetensors.index.json"
    (tmp_path / "model.safetensors").unlink()
    index.write_text(json.dumps(content))
    for read in (starting_weights.stored_head, lambda path: starting_weights.load(path, {}, ONE_LAYER)):
        with pytest.raises(InputError, match=re.escape(f"{index} {message}")):
            read(tmp_path)


def quantized(values, type_name):
    """Safetensors of one type, also of those that NumPy has not, in the place of the tensors of a dict."""
    header, data = {}, b""
    for name, each in values.items():
        size = each.size * (8 if type_name == "I64" else 1)
        header[name] = {
            "dtype": type_name,
            "shape": each.shape,
            "data_offsets": [len(data), len(data) + size],
        }
        data += bytes(size)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


@pytest.mark.parametrize("type_name", ["I8", "U8", "I64", "BOOL", "F8_E4M3", "F8_E5M2"])
def test_quantized_weights_are_refused_and_nothing_assigned(tmp_path, weights, type_name):
    """Read as numbers, without their scales, they would start a model of noise."""
    _, theirs, google = make_tensors()
    before = {name: variable.numpy() for name, variable in weights.items()}
    foreign = write_hugging_face(tmp_path / "hf", theirs)
    (foreign / "model.safetensors").write_bytes(quantized(theirs, type_name))
    own = tmp_path / "own"
    checkpoint.save_weights(own, weights, ONE_LAYER)
    (own / checkpoint.WEIGHTS).write_bytes(quantized(before, type_name))
    folders = [foreign, own]
    if type_name == "I8":
        integers = {name: values.astype(np.int8) for name, values in google.items()}
        folders.append(write_google(tmp_path / "google", integers))
    for folder in folders:
        with pytest.raises(InputError, match=r"must hold \S+ in floats of .* Received: \w*8|I64|BOOL\."):
            starting_weights.load(folder, weights, ONE_LAYER)
    assert_loaded(weights, before)


@pytest.mark.usefixtures("uncompiled")
def test_a_run_starts_from_a_foreign_checkpoint(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data")
    _, theirs, _ = make_tensors()
    folder = write_hugging_face(tmp_path / "hf", theirs)
    flags = {
        "input_file": f"{tmp_path}/data/*.tfrecord",
        "output_dir": tmp_path / "run",
        "bert_config_file": folder / "config.json",
        "init_checkpoint": folder,
        "train_batch_size": 2,
        "num_train_steps": 1,
    }
    argv = ["run_pretraining.py", *(f"--{name}={value}" for name, value in flags.items())]
    assert command_line.run(cli.pretrain, PretrainingConfig, argv) == 0
    assert f"starts from {len(theirs)} tensors of {folder}/model.safetensors" in capsys.readouterr().out


def test_labels_of_a_run_are_those_of_its_checkpoints(tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "labels.txt").write_text("O\nB-X\n")
    for name in ("", "checkpoint-4"):
        assert starting_weights.stored_labels(tmp_path / name) == ("O", "B-X")
    (tmp_path / "model").mkdir()
    assert starting_weights.stored_labels(tmp_path / "model") == ()
    for content, message in (
        ('{"id2label": {"0": "O", "2": "B-X"}}', "must hold id2label from 0 on"),
        ('{"id2label": {"0": "O", "1": ""}}', "must name each label once. Received: 'O', ''"),
    ):
        (tmp_path / "model" / "config.json").write_text(content)
        with pytest.raises(InputError, match=message):
            starting_weights.stored_labels(tmp_path / "model")
