"""A Mamba-2's checkpoints, ours and Hugging Face's: every tensor and setting in its place, or refused."""

import dataclasses
import json
import types

import keras
import numpy as np
import pytest
from exports import run_export
from next_tokens import packed_and_unpacked
from reference import import_reference
from reference_models import random_reference
from safetensors.numpy import load_file

from bert_packed.architectures.mamba.config import MambaConfig
from bert_packed.architectures.mamba2 import checkpoint_names as mamba2_names
from bert_packed.architectures.mamba2.config import Mamba2Config
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MODEL_SIZES, load_model_config
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
CONFIG = Mamba2Config(
    vocab_size=31,
    hidden_size=12,
    num_hidden_layers=1,
    state_size=5,
    head_dim=4,
    n_groups=3,
    use_bias=True,
    tie_word_embeddings=False,
    time_step_limit_min=0.25,
    time_step_limit_max=1.5,
)


def theirs(**changes):
    """The same settings by transformers' names."""
    settings = {
        **dataclasses.asdict(CONFIG),
        "num_heads": 6,
        "time_step_limit": (0.25, 1.5),
        **changes,
    }
    ours_alone = ("ablation_no_position_reset", "time_step_limit_min", "time_step_limit_max")
    return {name: value for name, value in settings.items() if name not in ours_alone}


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "use_bias": False, "time_step_limit": (0.0, float("inf"))}]
)
def test_a_folder_of_transformers_comes_back_as_it_was(tmp_path, changes):
    """Read, exported, opened there: every tensor bit for bit, and every setting."""
    _, transformers = import_reference()
    config = transformers.Mamba2Config(**theirs(**changes))
    random_reference("Mamba2ForCausalLM", config).save_pretrained(tmp_path / "theirs")
    assert run_export(init_checkpoint=tmp_path / "theirs", output_dir=tmp_path / "again") == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name)
    _, info = transformers.Mamba2ForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    read = transformers.Mamba2Config.from_pretrained(tmp_path / "again")
    least, most = theirs(**changes)["time_step_limit"]
    assert tuple(read.time_step_limit) == (least, min(most, np.finfo(np.float32).max))
    for name in theirs().keys() - {"time_step_limit"}:
        assert getattr(read, name) == getattr(config, name), name
    ours = starting_weights.read_config(tmp_path / "theirs")
    assert ours == starting_weights.read_config(tmp_path / "again")
    assert ours.time_step_limit_max == (0 if changes else 1.5)
    assert changes or ours == CONFIG


def test_a_checkpoint_of_ours(tmp_path):
    """Another length of chunks is the same model."""
    weights = named_weights(build_model(CAUSAL_LM, CONFIG, seed=2))
    checkpoint.save_weights(tmp_path / "run" / "checkpoint-3", weights, CONFIG)
    assert starting_weights.read_config(tmp_path / "run") == CONFIG
    again = named_weights(build_model(CAUSAL_LM, CONFIG, seed=1))
    other = dataclasses.replace(CONFIG, chunk_size=7)
    assert starting_weights.load(tmp_path / "run", again, other).num_used == len(weights)
    for name, variable in weights.items():
        np.testing.assert_array_equal(again[name].numpy(), variable.numpy(), err_msg=name)


def test_keras_opens_an_export(tmp_path):
    model = build_model(CAUSAL_LM, CONFIG, seed=2)
    checkpoint.save_weights(tmp_path / "ours", named_weights(model), CONFIG)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "keras", format="keras") == 0
    opened = keras.saving.load_model(tmp_path / "keras" / "model.keras")
    assert opened.config == CONFIG
    batch = packed_and_unpacked()[0]
    np.testing.assert_array_equal(*(np.asarray(one(batch)["logits"]) for one in (model, opened)))


@pytest.mark.parametrize("is_so", [True, False])
def test_the_table_names_every_tensor_of_each_model_once(is_so):
    changes = dict.fromkeys(("use_bias", "use_conv_bias", "tie_word_embeddings"), is_so)
    config = dataclasses.replace(CONFIG, **changes)
    rows = [row.ours for row in mamba2_names.tensor_names(config)]
    assert sorted(rows) == sorted(named_weights(build_model(CAUSAL_LM, config, seed=1)))


def test_a_published_size_has_the_published_number_of_parameters():
    torch, transformers = import_reference()
    size = types.SimpleNamespace(config=MODEL_SIZES["mamba2-130m"])
    settings = mamba2_names.NAMES.hugging_face_config(size)
    with torch.device("meta"):
        model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**settings))
    assert sum(parameter.numel() for parameter in model.parameters()) == 128_989_632


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, r"num_heads must be expand times hidden_size / head_dim, 6\. Received: 3\."),
        ({"head_dim": 5}, r"`head_dim` must divide expand times hidden_size.* head_dim=5, n_groups=3 for 24"),
        ({"n_groups": 4}, r"`n_groups` the heads\. Received: head_dim=4, n_groups=4"),
        ({"n_groups": None}, r"must have .*, n_groups\. Received: no n_groups"),
        ({"time_step_limit": [0.1]}, r"must be two numbers, the second above 0\. Received: \[0\.1\]"),
        ({"time_step_limit": [0.1, 0]}, r"must be two numbers, the second above 0\. Received: \[0\.1, 0\]"),
        ({"time_step_limit": [2, 1]}, r"`time_step_limit_min` must be at most .*Received: 2\.0 and 1\.0\."),
        ({"hidden_act": "gelu"}, r"hidden_act must be silu\. Received: gelu"),
        ({"residual_in_fp32": False}, r"residual_in_fp32 must be True\. Received: False"),
    ],
)
def test_what_it_cannot_compute_is_refused(tmp_path, change, message):
    content = {"model_type": "mamba2", **theirs(**change)}
    content = {name: value for name, value in content.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        # All shapes are those of 3 groups of 5 states
        (dataclasses.replace(CONFIG, n_groups=1, state_size=15), r"n_groups must be 1\. Received: 3"),
        (dataclasses.replace(CONFIG, time_step_limit_max=0.0), r"limit_max must be 0\.0\. Received: 1\.5"),
        (
            MambaConfig(vocab_size=31, hidden_size=12, num_hidden_layers=1),
            r"model_type must be mamba\. Received: mamba2\.",
        ),
    ],
)
def test_another_model_is_refused(tmp_path, other, message):
    _, transformers = import_reference()
    reference = random_reference("Mamba2ForCausalLM", transformers.Mamba2Config(**theirs()))
    reference.save_pretrained(tmp_path)
    weights = named_weights(build_model(CAUSAL_LM, other, seed=1))
    with pytest.raises(InputError, match=message):
        starting_weights.load(tmp_path, weights, other)
