"""A Mamba's checkpoints, ours and Hugging Face's: every tensor in its place, or named."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from foreign_checkpoints import ONE_LAYER, write_google
from foreign_checkpoints import make_tensors as make_bert_tensors
from foreign_checkpoints import write_hugging_face as write_bert
from foreign_mamba import CONFIG, make_tensors, write_hugging_face
from safetensors.numpy import save_file

from bert_packed.architectures.mamba.checkpoint_names import tensor_names
from bert_packed.architectures.packed_model import build_model
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends


@pytest.fixture(scope="module")
def shared_weights():
    return named_weights(build_model(CAUSAL_LM, CONFIG, seed=1))


@pytest.fixture
def weights(shared_weights):
    for variable in shared_weights.values():
        variable.assign(np.full(variable.shape, 0.5, np.float32))
    return shared_weights


def assert_loaded(weights, tensors):
    assert weights.keys() == tensors.keys()
    for name, variable in weights.items():
        np.testing.assert_array_equal(variable.numpy(), tensors[name], err_msg=name)


def assert_untouched(weights):
    assert all((variable.numpy() == 0.5).all() for variable in weights.values())


def test_hugging_face(tmp_path, weights):
    ours, theirs = make_tensors()
    theirs["lm_head.weight"] = theirs["backbone.embeddings.weight"].copy()
    theirs["score.weight"] = np.zeros((2, 12), np.float32)
    found = starting_weights.load(write_hugging_face(tmp_path, theirs), weights, CONFIG)
    assert_loaded(weights, ours)
    assert (found.num_used, found.missing, found.unused) == (len(ours), [], ["score.weight"])
    assert starting_weights.read_config(tmp_path) == CONFIG
    assert starting_weights.stored_head(tmp_path) == (CAUSAL_LM, 31)


def test_bare_model_of_the_oldest_form_in_half_precision(tmp_path, weights):
    ours, theirs = make_tensors()
    bare = {name.removeprefix("backbone."): values.astype(np.float16) for name, values in theirs.items()}
    bare["embedding.weight"] = bare.pop("embeddings.weight")
    found = starting_weights.load(write_hugging_face(tmp_path, bare), weights, CONFIG)
    assert (found.missing, found.unused) == ([], [])
    assert_loaded(weights, {name: values.astype(np.float16) for name, values in ours.items()})
    assert starting_weights.stored_head(tmp_path)[0] == CAUSAL_LM


def test_embeddings_under_the_name_of_the_output_matrix_only(tmp_path, weights):
    ours, theirs = make_tensors()
    theirs["lm_head.weight"] = theirs.pop("backbone.embeddings.weight")
    found = starting_weights.load(write_hugging_face(tmp_path, theirs), weights, CONFIG)
    assert_loaded(weights, ours)
    assert (found.missing, found.unused) == ([], [])


def split_in_two(folder, tensors):
    """The folder of `write_hugging_face` as transformers writes large models: two files and an index."""
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    places = {name: names[number % 2] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / names[1]


def test_weights_in_several_files(tmp_path, weights):
    ours, theirs = make_tensors()
    second = split_in_two(write_hugging_face(tmp_path, theirs), theirs)
    assert starting_weights.stored_head(tmp_path) == (CAUSAL_LM, 31)
    found = starting_weights.load(tmp_path, weights, CONFIG)
    assert_loaded(weights, ours)
    assert found.path.name == "model.safetensors.index.json"
    second.unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors must be a complete"):
        starting_weights.load(tmp_path, weights, CONFIG)
    found.path.write_text("[]")
    with pytest.raises(InputError, match=r"index\.json must hold a JSON object\. Received: list"):
        starting_weights.load(tmp_path, weights, CONFIG)


def test_a_checkpoint_of_ours(tmp_path, weights):
    other = named_weights(build_model(CAUSAL_LM, CONFIG, seed=2))
    checkpoint.save_weights(tmp_path / "run" / "checkpoint-3", other, CONFIG)
    assert starting_weights.read_config(tmp_path / "run") == CONFIG
    assert starting_weights.stored_head(tmp_path / "run") == (CAUSAL_LM, 31)
    # What only initial weights follow from
    changes = {"time_step_min": 2e-3, "time_step_max": 0.2, "time_step_floor": 1e-3, "initializer_range": 1}
    found = starting_weights.load(tmp_path / "run", weights, dataclasses.replace(CONFIG, **changes))
    assert found.num_used == len(weights)
    assert_loaded(weights, {name: variable.numpy() for name, variable in other.items()})


def test_a_rank_may_be_given_or_left_to_the_width(tmp_path):
    given, left = (dataclasses.replace(CONFIG, time_step_rank=rank) for rank in (1, 0))
    checkpoint.save_weights(tmp_path, named_weights(build_model(CAUSAL_LM, given, seed=1)), given)
    weights = named_weights(build_model(CAUSAL_LM, left, seed=2))
    assert starting_weights.load(tmp_path, weights, left).num_used == len(weights)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("use_conv_bias", [True, False])
def test_the_table_names_every_tensor_of_each_model_once(use_bias, use_conv_bias):
    config = dataclasses.replace(CONFIG, use_bias=use_bias, use_conv_bias=use_conv_bias)
    rows = [row.ours for row in tensor_names(config)]
    assert sorted(rows) == sorted(named_weights(build_model(CAUSAL_LM, config, seed=1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon must be 1e-05\. Received: 1e-06"),
        ({"use_bias": False}, r"use_bias must be True\. Received: False"),
        ({"use_conv_bias": False}, r"use_conv_bias must be True\. Received: False"),
        ({"num_hidden_layers": 1}, r"num_hidden_layers must be 2\. Received: 1"),
        ({"ablation_no_position_reset": True}, r"ablations must be none\. Received: no_position_reset"),
        ({"hidden_act": "gelu"}, r"config\.json: hidden_act must be silu\. Received: gelu"),
        ({"intermediate_size": 20}, r"config\.json: intermediate_size must be expand times hidden_size"),
        ({"tie_word_embeddings": False}, r"config\.json: tie_word_embeddings must be True\. Received: False"),
        ({"model_type": "gpt2"}, r"config\.json: model_type must be .* or modernbert\. Received: gpt2"),
    ],
)
def test_settings_of_another_model_are_refused(tmp_path, weights, change, message):
    write_hugging_face(tmp_path, make_tensors()[1], **change)
    with pytest.raises(InputError, match=message):
        starting_weights.load(tmp_path, weights, CONFIG)
    assert_untouched(weights)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "backbone.layers.1.mixer.conv1d.weight",
            lambda values: values[:, :, :3],
            r"conv1d.weight, which is backbone/layers_1/mixer/conv1d_kernel here, must have shape \(4, 24\)",
        ),
        (
            "backbone.layers.0.mixer.conv1d.weight",
            lambda values: values[:, 0],
            r"must have shape \(4, 24\)\. Received: \(24, 4\)",
        ),
        ("backbone.layers.0.mixer.A_log", lambda values: values.T, r"\(24, 5\)\. Received: \(5, 24\)"),
        ("backbone.layers.0.mixer.D", lambda values: np.full_like(values, np.nan), "Received: nan in"),
        ("backbone.layers.1.mixer.dt_proj.bias", None, "no tensor for backbone/layers_1/mixer/dt_proj/bias"),
        ("lm_head.weight", lambda values: np.zeros((31, 12), np.float32), "the two are one tensor here"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path, weights, name, change, message):
    _, theirs = make_tensors()
    values = theirs.pop(name, None)
    if change:
        theirs[name] = np.ascontiguousarray(change(values))
    with pytest.raises(InputError, match=message):
        starting_weights.load(write_hugging_face(tmp_path, theirs), weights, CONFIG)
    assert_untouched(weights)


def make_bert():
    """The weights of a BERT of one layer, without its model."""
    return {name: keras.Variable(values) for name, values in make_bert_tensors()[0].items()}


@pytest.mark.parametrize("form", ["ours", "hugging_face", "google", "google_without_config"])
@pytest.mark.parametrize("any_head", [None, True])
def test_a_bert_does_not_start_a_mamba(tmp_path, weights, form, any_head):
    _, theirs, google = make_bert_tensors()
    if form == "ours":
        checkpoint.save_weights(tmp_path / "bert", make_bert(), ONE_LAYER)
    elif form == "hugging_face":
        write_bert(tmp_path / "bert", theirs)
    else:
        write_google(tmp_path / "bert", google, **({"config": None} if "without" in form else {}))
    message = r"holds another model: model_type must be mamba\. Received: bert\."
    if "without" in form:
        message = "holds another model: the file has no tensor for backbone/embeddings"
    with pytest.raises(InputError, match=message):
        starting_weights.load(tmp_path / "bert", weights, CONFIG, any_head=any_head)
    assert_untouched(weights)


@pytest.mark.parametrize("form", ["ours", "hugging_face"])
@pytest.mark.parametrize("any_head", [None, True])
def test_a_mamba_does_not_start_a_bert(tmp_path, weights, form, any_head):
    if form == "ours":
        checkpoint.save_weights(tmp_path, weights, CONFIG)
    else:
        write_hugging_face(tmp_path, make_tensors()[1])
    with pytest.raises(InputError, match=r"another model: model_type must be bert\. Received: mamba\."):
        starting_weights.load(tmp_path, make_bert(), ONE_LAYER, any_head=any_head)
