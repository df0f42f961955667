"""Checkpoints of every form that may not start a model: one clear line, and nothing assigned.

This file alone catches weights that start a model which computes something else with them.
"""

import dataclasses
import itertools
import json
import struct

import foreign_checkpoints
import numpy as np
import pytest
from checkpoint_cases import BERT, MAMBA, MODERN_BERT, make_model, write_model
from foreign_checkpoints import ONE_LAYER, google_tensors, write_google
from packs import VOCAB_SIZE
from safetensors.numpy import load_file, save_file

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import QUESTION_ANSWERING, ablate, model_type
from bert_packed.checkpoints import pretrained_files, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
FORMS = ("ours", "hf", "google")
ZEROS = np.zeros((VOCAB_SIZE, 16), np.float32)


@pytest.fixture(scope="module")
def models():
    made = {ONE_LAYER: foreign_checkpoints.make_model(), MAMBA: make_model("mamba")}
    return {config: named_weights(model) for config, model in made.items()}


def write(folder, form, config=ONE_LAYER, **changes):
    """Write a checkpoint of one of `FORMS`; `changes` are parts of its `config.json`."""
    if form == "google":
        return write_google(folder, google_tensors())
    model = make_model("mamba") if config == MAMBA else foreign_checkpoints.make_model()
    write_model(folder, model, form)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def assert_refused(path, weights, config, message, **options):
    before = {name: variable.numpy() for name, variable in weights.items()}
    with pytest.raises(InputError, match=message) as caught:
        starting_weights.load(path, weights, config, **options)
    assert "\n" not in str(caught.value)
    for name, values in before.items():
        np.testing.assert_array_equal(weights[name].numpy(), values, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, r"hidden_act must be relu\. Received: gelu"),
        ({"layer_norm_eps": 1e-6}, r"layer_norm_eps must be 1e-06\. Received: 1e-12"),
        ({"num_attention_heads": 4}, r"num_attention_heads must be 4\. Received: 2"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers must be 2\. Received: 1"),
        ({"hidden_size": 8}, r"hidden_size must be 8\. Received: 16"),
        ({"vocab_size": 30}, r"(vocab_size must be 30|word_embeddings\S*, which is .* \(30, 16\))"),
        ({"intermediate_size": 31}, r"inter.*31.*Received: .*32"),
    ],
)
def test_another_bert_is_refused(tmp_path, form, change, message):
    config = dataclasses.replace(ONE_LAYER, **change)
    weights = named_weights(build_model("pretraining", config, seed=1))
    assert_refused(write(tmp_path, form), weights, config, f"holds another model: .*{message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ablation_no_position_reset": True}, r"ablations must be none\. Received: no_position_reset"),
        ({"hidden_act": "gelu"}, r"config\.json: hidden_act must be silu\. Received: gelu"),
        ({"intermediate_size": 20}, r"config\.json: intermediate_size must be expand times hidden_size"),
        ({"tie_word_embeddings": False}, r"config\.json: tie_word_embeddings must be True\. Received: False"),
        ({"model_type": "gpt2"}, r"config\.json: model_type must be .* or modernbert\. Received: gpt2"),
    ],
)
def test_another_mamba_is_refused(tmp_path, models, change, message):
    assert_refused(write(tmp_path, "hf", MAMBA, **change), models[MAMBA], MAMBA, message)


def test_an_ablated_checkpoint_starts_no_task(tmp_path):
    model = make_model("bert")
    model.config = ablate(BERT, "no_attention_mask")
    folder = write_model(tmp_path, model, "ours")
    weights = named_weights(build_model(QUESTION_ANSWERING, BERT, num_outputs=2, seed=1))
    message = r"ablations must be none\. Received: no_attention_mask"
    assert_refused(folder, weights, BERT, message, head=QUESTION_ANSWERING)


def test_settings_that_may_differ_are_named(tmp_path):
    """A context of 1,024 tokens becomes one of 8,192 by larger angles; dropout is of training alone."""
    folder = write_model(tmp_path, make_model("modernbert"), "ours")
    longer = dataclasses.replace(MODERN_BERT, global_rope_theta=160000.0, max_position_embeddings=512)
    weights = named_weights(make_model("modernbert", seed=2))
    assert starting_weights.load(folder, weights, longer).lines()[1:] == [
        "  settings that are not the checkpoint's: max_position_embeddings 512 (trained with 64), "
        "global_rope_theta 160000.0 (trained with 5000.0)"
    ]
    dropped = dataclasses.replace(MODERN_BERT, attention_dropout=0.3, initializer_range=0.1)
    assert starting_weights.load(folder, weights, dropped).changed == []


@pytest.mark.parametrize("any_head", [None, True])
@pytest.mark.parametrize(
    ("stored", "wanted", "form"),
    [
        *((ONE_LAYER, MAMBA, form) for form in (*FORMS, "google without config")),
        *((MAMBA, ONE_LAYER, form) for form in ("ours", "hf")),
    ],
)
def test_one_architecture_does_not_start_another(tmp_path, models, stored, wanted, form, any_head):
    form, _, is_without_config = form.partition(" ")
    path = write(tmp_path, form, stored)
    message = f"model_type must be {model_type(wanted)}. Received: {model_type(stored)}."
    if is_without_config:
        (tmp_path / "bert_config.json").unlink()
        message = "has no tensor for backbone/embeddings"
    assert_refused(path, models[wanted], wanted, f"another model: .*{message}", any_head=any_head)


LAYER = "bert.encoder.layer.0"
MIXER = "backbone.layers.0.mixer"


@pytest.mark.parametrize(
    ("config", "name", "change", "message"),
    [
        (MAMBA, f"{MIXER}.conv1d.weight", lambda one: one[:, :, :3], r"\S* must have shape \(4, 24\)"),
        (MAMBA, f"{MIXER}.conv1d.weight", lambda one: one[:, 0], r"\(4, 24\)\. Received: \(24, 4\)"),
        (MAMBA, f"{MIXER}.A_log", lambda one: one.T, r"\(24, 5\)\. Received: \(5, 24\)"),
        (MAMBA, f"{MIXER}.D", lambda one: np.full_like(one, np.nan), "Received: nan in"),
        (MAMBA, f"{MIXER}.dt_proj.bias", None, "no tensor for backbone/layers_0/mixer/dt_proj/bias"),
        (MAMBA, "lm_head.weight", np.zeros((31, 12), np.float32), "the two are one tensor here"),
        (
            ONE_LAYER,
            f"{LAYER}.output.dense.bias",
            None,
            "no tensor for bert/layer_0/feed_forward/output/bias",
        ),
        (
            ONE_LAYER,
            f"{LAYER}.output.dense.bias",
            lambda one: np.where(np.arange(16) == 3, np.nan, one).astype(np.float32),
            "Received: nan in bert/layer_0/feed_forward/output/bias of ",
        ),
        (ONE_LAYER, "cls.predictions.decoder.weight", ZEROS, "decoder.weight equal to"),
        (ONE_LAYER, "cls.predictions.decoder.bias", ZEROS[:, 0].copy(), "decoder.bias equal to"),
        (ONE_LAYER, "embeddings.word_embeddings.weight", ZEROS, "must hold each tensor once"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path, models, config, name, change, message):
    path = write(tmp_path, "hf", config) / "model.safetensors"
    theirs = load_file(path)
    values = theirs.pop(name, None)
    if change is not None:
        theirs[name] = np.ascontiguousarray(change(values) if callable(change) else change)
    save_file(theirs, path)
    assert_refused(tmp_path, models[config], config, message)


def cut(path, size=9):
    path.write_bytes(path.read_bytes()[:-size])


def test_damaged_files_are_named(tmp_path, models):
    weights = models[ONE_LAYER]
    folder = write(tmp_path / "hf", "hf")
    cut(folder / "model.safetensors")
    assert_refused(folder, weights, ONE_LAYER, "must be a complete safetensors file")
    assert pretrained_files.is_hugging_face(folder)
    (folder / "config.json").unlink()
    assert not pretrained_files.is_hugging_face(folder)  # one of ours may be damaged too
    (write(tmp_path / "other", "hf") / "config.json").unlink()
    assert_refused(
        tmp_path / "other", weights, ONE_LAYER, r"must hold config\.json beside model\.safetensors"
    )
    prefix = write(tmp_path / "google", "google")
    cut(prefix.with_name(f"{prefix.name}.data-00000-of-00001"), 99)
    assert_refused(prefix, weights, ONE_LAYER, "must be a complete TensorFlow checkpoint")
    (prefix.parent / "second.index").touch()
    assert_refused(prefix.parent, weights, ONE_LAYER, "must name one of several checkpoints")
    nothing = r"`init_checkpoint` must be a folder with model\.safetensors"
    assert_refused(tmp_path / "nowhere", weights, ONE_LAYER, nothing)


def quantized(values, type_name):
    header, data = {}, b""
    for name, each in values.items():
        size = each.size * (8 if type_name == "I64" else 1)
        place = [len(data), len(data) + size]
        header[name] = {"dtype": type_name, "shape": each.shape, "data_offsets": place}
        data += bytes(size)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


@pytest.mark.parametrize(
    ("form", "type_name"),
    [*itertools.product(["ours", "hf"], ["I8", "I64", "BOOL", "F8_E4M3"]), ("google", "int8")],
)
def test_quantized_weights_are_refused(tmp_path, models, form, type_name):
    """Read as numbers, without their scales, they would start a model of noise."""
    if form == "google":
        path = write_google(tmp_path, {name: one.astype(type_name) for name, one in google_tensors().items()})
    else:
        file = write(tmp_path, form) / "model.safetensors"
        path = file.parent
        file.write_bytes(quantized(load_file(file), type_name))
    message = rf"must hold \S+ in floats of .* Received: {type_name}\."
    assert_refused(path, models[ONE_LAYER], ONE_LAYER, message)
