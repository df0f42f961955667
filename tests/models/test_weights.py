"""Initial values of every kind of weight, defaults of configs, and what the optimizer decays."""

import dataclasses

import numpy as np
import pytest
from keras import ops

from bert_packed.config import CLASSIFICATION, PRETRAINING, QUESTION_ANSWERING, TOKEN_CLASSIFICATION
from bert_packed.model_configs.bert import ModelConfig
from bert_packed.model_configs.mamba import MambaConfig
from bert_packed.models.packed_model import build_model
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.optimization import EXCLUDED_FROM_DECAY, AdamWeightDecay

pytestmark = pytest.mark.both_backends
BERT = ModelConfig(
    vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96
)
MAMBA = MambaConfig(vocab_size=500, hidden_size=128, num_hidden_layers=2, state_size=5, use_bias=True)
INNER, RANK = 256, 8


def values_of(head, config):
    weights = named_weights(build_model(head, config, 3, num_outputs=3))
    return {name: np.asarray(weight.value, np.float64) for name, weight in weights.items()}


def assert_spread(name, values, deviation, largest=np.inf):
    """A mean of 0 and a standard deviation, within four standard errors; nothing beyond the largest."""
    error = 4 * deviation / np.sqrt(values.size)
    assert abs(values.mean()) < error and abs(values.std() - deviation) < error, name
    assert np.abs(values).max() <= largest, name


def assert_uniform(name, values, largest):
    assert_spread(name, values, largest / np.sqrt(3), largest)
    if values.size > 500:
        assert np.abs(values).max() > 0.99 * largest, name


@pytest.mark.parametrize("head", [PRETRAINING, QUESTION_ANSWERING, CLASSIFICATION, TOKEN_CLASSIFICATION])
@pytest.mark.parametrize("initializer_range", [None, 0.3])
def test_weights_of_a_bert(head, initializer_range):
    """Matrices are normal, cut off at two standard deviations, which leaves 0.8796 of one."""
    config = dataclasses.replace(BERT, initializer_range=initializer_range) if initializer_range else BERT
    stddev = initializer_range or 0.02
    found = values_of(head, config)
    for name, values in found.items():
        if name.endswith("LayerNorm/gamma"):
            assert np.all(values == 1), name
        elif name.endswith(("bias", "LayerNorm/beta")):
            assert np.all(values == 0), name
        else:
            assert values.ndim == 2, name
            assert_spread(name, values, 0.8796 * stddev, 2 * stddev)
    # A uniform distribution within the same limits would have 0.68 of its values in their inner 0.68
    inner = np.abs(found["bert/embeddings/word_embeddings"]) < 2 * stddev * 0.68
    assert inner.mean() == pytest.approx(0.866, abs=0.01)
    name = "bert/layer_0/attention"
    assert np.any(found[f"{name}/query/kernel"] != found[f"{name}/key/kernel"])
    assert np.any(found[f"{name}/query/kernel"] != found["bert/layer_1/attention/query/kernel"])


def test_weights_of_a_mamba():
    """Those of `state-spaces/mamba`: PyTorch's linear layers, and Section 3.6 of the paper."""
    found = values_of(CAUSAL_LM, MAMBA)
    embeddings = found.pop("backbone/embeddings")
    assert_spread("embeddings", embeddings, 0.02)
    assert np.abs(embeddings).max() > 0.06  # not cut off
    assert np.all(found.pop("backbone/RMSNorm/scale") == 1)
    ones, zeros = ("RMSNorm/scale", "mixer/D"), ("in_proj/bias", "out_proj/bias", "conv1d_bias")
    uniform = {
        "in_proj/kernel": 128**-0.5,
        "conv1d_kernel": 4**-0.5,
        "x_proj/kernel": INNER**-0.5,
        "dt_proj/kernel": RANK**-0.5,
        "out_proj/kernel": (INNER * 2) ** -0.5,  # residuals of two blocks add up
    }
    for name, values in found.items():
        part = next(
            part for part in (*ones, *zeros, *uniform, "A_log", "dt_proj/bias") if name.endswith(part)
        )
        if part in uniform:
            assert_uniform(name, values, uniform[part])
        elif part == "A_log":
            np.testing.assert_allclose(np.exp(values), np.tile([1, 2, 3, 4, 5], (INNER, 1)), rtol=1e-6)
        elif part == "dt_proj/bias":  # its softplus is log-uniform in [0.001, 0.1]
            sizes = np.log10(np.log1p(np.exp(values)))
            assert sizes.min() >= -3.001 and sizes.max() <= -0.999
            np.testing.assert_allclose(np.quantile(sizes, [0.25, 0.5, 0.75]), [-2.5, -2, -1.5], atol=0.15)
        else:
            assert np.all(values == (part in ones)), name
    assert len(found) == 2 * 12
    low = dataclasses.replace(MAMBA, time_step_floor=0.05)
    bias = values_of(CAUSAL_LM, low)["backbone/layers_0/mixer/dt_proj/bias"]
    assert np.log1p(np.exp(bias)).min() == pytest.approx(0.05, rel=1e-3)


def test_defaults():
    """BERT-base of google-research/bert, and `MambaConfig` of transformers."""
    assert dataclasses.asdict(ModelConfig()) == {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        **dict.fromkeys(["ablation_no_attention_mask", "ablation_no_position_reset"], False),
        "ablation_no_next_sentence": False,
    }
    assert dataclasses.asdict(MambaConfig()) == {
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "time_step_rank": 0,
        "use_bias": False,
        "use_conv_bias": True,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        "ablation_no_position_reset": False,
    }


@pytest.mark.parametrize(
    ("head", "config", "decayed"),
    [
        (PRETRAINING, BERT, ("kernel", "embeddings")),
        (CAUSAL_LM, MAMBA, ("kernel", "embeddings")),
    ],
)
def test_matrices_alone_are_decayed(head, config, decayed):
    """Neither biases and norms, nor the decays and skips of a Mamba's states."""
    model = build_model(head, config, 3)
    for variable in model.trainable_variables:
        variable.assign(np.ones(variable.shape))
    optimizer = AdamWeightDecay(0.5, weight_decay_rate=0.1, exclude_from_weight_decay=EXCLUDED_FROM_DECAY)
    gradients = [ops.zeros(variable.shape) for variable in model.trainable_variables]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    for variable in model.trainable_variables:
        want = 0.95 if variable.path.endswith(decayed) else 1.0
        np.testing.assert_allclose(variable.numpy(), want, rtol=1e-6, err_msg=variable.path)
