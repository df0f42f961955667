"""Configs of other programs: both forms of a published one, and what no model here computes is refused.

This file alone catches a setting of theirs that is read as another value, or passed over.
"""

import dataclasses
import json

import pytest
from checkpoint_cases import GROUPS

from bert_packed.architectures.registry import MODEL_SIZES, config_json, load_model_config
from bert_packed.core.settings import InputError

# The hub has these configs, less what only tokenizers read
MODERN_BERT = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "position_embedding_type": "absolute",
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "tie_word_embeddings": True,
    "vocab_size": 50368,
}
MAMBA2 = {**config_json(GROUPS), "num_heads": 6, "time_step_limit": [0.3, 1.5]}
for ours in ("time_step_limit_min", "time_step_limit_max"):
    del MAMBA2[ours]


def read(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    return load_model_config(tmp_path / "config.json")


def test_both_forms_of_the_published_config_are_the_base_model(tmp_path):
    base = MODEL_SIZES["modernbert-base"]
    assert read(tmp_path, MODERN_BERT) == base
    older = ("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")
    newer = {name: value for name, value in MODERN_BERT.items() if name not in older}
    newer["layer_types"] = base.layer_types
    thetas = {"full_attention": 80000, "sliding_attention": 30.5}
    newer["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
    }
    want = dataclasses.replace(base, global_rope_theta=80000.0, local_rope_theta=30.5)
    assert read(tmp_path, newer) == want
    every_second = ["full_attention", "sliding_attention"] * 11
    assert read(tmp_path, {**newer, "layer_types": every_second}).global_attn_every_n_layers == 2
    assert read(tmp_path, config_json(want)) == want


def test_limits_of_steps_are_two_numbers_there(tmp_path):
    assert read(tmp_path, MAMBA2) == GROUPS
    assert read(tmp_path, {**MAMBA2, "time_step_limit": [0.0, 3.4028235e38]}).time_step_limit_max == 0


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        (MODERN_BERT, {"tie_word_embeddings": False}, "tie_word_embeddings must be True. Received: False"),
        (MODERN_BERT, {"rope_scaling": {"type": "linear"}}, "rope_scaling must be None. Received: {'type'"),
        (
            MODERN_BERT,
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4}}},
            "a rope_type of default and a rope_theta, and nothing else. Received: {'full_attention': {",
        ),
        (
            MODERN_BERT,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters must give full_attention and sliding_attention a rope_type of default and",
        ),
        (
            MODERN_BERT,
            {"layer_types": ["sliding_attention"] * 22},
            "layer_types must be full_attention in the first and",
        ),
        (MODERN_BERT, {"hidden_activation": "silu"}, "must be one of gelu, gelu_new, relu. Received:"),
        (MODERN_BERT, {"num_attention_heads": 5}, "`num_attention_heads` must divide `hidden_size`"),
        (MODERN_BERT, {"num_attention_heads": 256}, "must divide `hidden_size` into even widths."),
        (MODERN_BERT, {"local_attention": 0}, "`local_attention` must be at least 1. Received: 0"),
        (MAMBA2, {"num_heads": 3}, "num_heads must be expand times hidden_size / head_dim, 6. Received: 3."),
        (MAMBA2, {"head_dim": 5}, "`head_dim` must divide expand times hidden_size"),
        (MAMBA2, {"n_groups": 4}, "`n_groups` the heads. Received: head_dim=4, n_groups=4"),
        (MAMBA2, {"n_groups": None}, "n_groups. Received: no n_groups"),
        (MAMBA2, {"time_step_limit": [0.1]}, "must be two numbers, the second above 0. Received: [0.1]"),
        (MAMBA2, {"time_step_limit": [0.1, 0]}, "two numbers, the second above 0. Received: [0.1, 0]"),
        (MAMBA2, {"time_step_limit": [2, 1]}, "`time_step_limit_min` must be at most time_step_limit_max"),
        (MAMBA2, {"hidden_act": "gelu"}, "hidden_act must be silu. Received: gelu"),
        (MAMBA2, {"residual_in_fp32": False}, "residual_in_fp32 must be True. Received: False"),
    ],
)
def test_what_no_model_computes_is_refused_in_one_line(tmp_path, content, change, message):
    changed = {name: value for name, value in {**content, **change}.items() if value is not None}
    with pytest.raises(InputError) as error:
        read(tmp_path, changed)
    assert message in str(error.value) and "\n" not in str(error.value)
