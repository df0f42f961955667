"""Initial values of every kind of weight, defaults of configs, and seeds that leave all other draws alone."""

import dataclasses
import random
from importlib.util import find_spec

import keras
import numpy as np
import pytest
from tiny import CONFIG

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.architectures.bert.model import PackedBertForPretraining
from bert_packed.architectures.mamba.config import MambaConfig
from bert_packed.architectures.mamba2.config import Mamba2Config
from bert_packed.architectures.modern_bert.config import ModernBertConfig
from bert_packed.architectures.packed_model import build_model, seeded
from bert_packed.architectures.registry import FAMILIES, FINETUNING_HEADS, MASKED_LM, PRETRAINING, model_type
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
BERT = ModelConfig(
    vocab_size=500,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=96,
    initializer_range=0.3,
)
DEPTH = 3
STATES = {
    "vocab_size": 500,
    "hidden_size": 128,
    "num_hidden_layers": DEPTH,
    "state_size": 5,
    "use_bias": True,
}
MAMBA = MambaConfig(**STATES)
MAMBA2 = Mamba2Config(**STATES, head_dim=4, tie_word_embeddings=False)
INNER, RANK = 256, 8
MODERN_BERT = ModernBertConfig(
    vocab_size=500,
    hidden_size=64,
    num_hidden_layers=DEPTH,
    num_attention_heads=2,
    intermediate_size=96,
    mlp_bias=True,
    norm_bias=True,
)


def values_of(head, config):
    weights = named_weights(build_model(head, config, 3, num_outputs=3))
    return {name: np.asarray(weight.value, np.float64) for name, weight in weights.items()}


def assert_spread(name, values, deviation, largest=np.inf):
    """A mean of 0 and a standard deviation, within four standard errors; nothing beyond the largest."""
    error = 4 * deviation / np.sqrt(values.size)
    assert abs(values.mean()) < error and abs(values.std() - deviation) < error, name
    assert np.abs(values).max() <= largest, name


def assert_steps(name, values):
    """Softplus of the biases is log-uniform in [0.001, 0.1]."""
    sizes, error = np.log10(np.log1p(np.exp(values))), 4 / np.sqrt(values.size)
    assert sizes.min() >= -3.001 and sizes.max() <= -0.999, name
    np.testing.assert_allclose(np.quantile(sizes, [0.25, 0.5, 0.75]), [-2.5, -2, -1.5], atol=error)


def constant(number):
    def check(name, values):
        assert np.all(values == number), name

    return check


def normal(stddev):
    def check(name, values):
        assert_spread(name, values, stddev)
        assert np.abs(values).max() > 3 * stddev, name  # not cut off

    return check


def cut_off(stddev):
    """Normal, cut off at two standard deviations, which leaves 0.8796 of one."""

    def check(name, values):
        assert_spread(name, values, 0.8796 * stddev, 2 * stddev)
        if values.size > 10_000:
            # A uniform distribution within the same limits would have 0.68 of its values in their inner 0.68
            inner = np.abs(values) < 2 * stddev * 0.68
            assert inner.mean() == pytest.approx(0.866, abs=0.015), name

    return check


def uniform(largest, middle=0):
    def check(name, values):
        assert_spread(name, values - middle, largest / np.sqrt(3), largest)
        if values.size > 500:
            assert np.abs(values - middle).max() > 0.99 * largest, name

    return check


STATE_SPACE = {
    "backbone/embeddings": normal(0.02),
    **dict.fromkeys(("RMSNorm/scale", "mixer/D"), constant(1)),
    **dict.fromkeys(("in_proj/bias", "out_proj/bias", "conv1d_bias"), constant(0)),
    "in_proj/kernel": uniform(128**-0.5),
    "conv1d_kernel": uniform(4**-0.5),
    "out_proj/kernel": uniform((INNER * DEPTH) ** -0.5),  # residuals of the blocks add up
}
# Each part of a name of a weight has its check
INITIAL = {
    "bert": {
        **{"LayerNorm/gamma": constant(1), "LayerNorm/beta": constant(0), "bias": constant(0)},
        **dict.fromkeys(("kernel", "embeddings"), cut_off(0.3)),
    },
    # `state-spaces/mamba` has these: PyTorch's linear layers, and Section 3.6 of the paper
    "mamba": {
        **STATE_SPACE,
        "x_proj/kernel": uniform(INNER**-0.5),
        "dt_proj/kernel": uniform(RANK**-0.5),
        "A_log": lambda name, values: np.testing.assert_allclose(
            np.exp(values), np.tile([1, 2, 3, 4, 5], (INNER, 1)), rtol=1e-6
        ),
        "dt_proj/bias": assert_steps,
    },
    "mamba2": {
        **STATE_SPACE,
        "lm_head": normal(0.02),
        "A_log": lambda name, values: uniform(7.5, middle=8.5)(name, np.exp(values)),  # from 1 to 16
        "dt_bias": assert_steps,
    },
    # transformers has these
    "modernbert": {
        **{"LayerNorm/gamma": constant(1), "LayerNorm/beta": constant(0), "bias": constant(0)},
        **dict.fromkeys(("token_embeddings", "qkv/kernel", "intermediate/kernel"), cut_off(0.02)),
        # Residuals of two layers a block add up
        **dict.fromkeys(("output/kernel", "transform/kernel"), cut_off(0.02 * (2 * DEPTH) ** -0.5)),
        "classifier/kernel": cut_off(64**-0.5),
    },
}
assert INITIAL.keys() == FAMILIES.keys()


def name_of(one):
    return one if isinstance(one, str) else model_type(one)


MODELS = [
    *((BERT, head) for head in (PRETRAINING, *FINETUNING_HEADS)),
    *((MAMBA, CAUSAL_LM), (MAMBA2, CAUSAL_LM), (MODERN_BERT, MASKED_LM), (MODERN_BERT, "classification")),
]


@pytest.mark.parametrize(("config", "head"), MODELS, ids=name_of)
def test_initial_weights_by_width_and_depth(config, head):
    """The fault that this alone finds: last layers that do not shrink with the number of blocks."""
    checks, seen, weights = INITIAL[model_type(config)], set(), values_of(head, config)
    kernels = [values.tobytes() for name, values in weights.items() if name.endswith("kernel")]
    assert len({*kernels}) == len(kernels)
    for name, values in weights.items():
        part = max((part for part in checks if name.endswith(part)), key=len)
        checks[part](name, values)
        seen.add(part)
    assert len(checks.keys() - seen) <= (head == MASKED_LM)  # there is no classifier


def test_no_initial_step_of_a_mamba_is_below_the_floor():
    low = dataclasses.replace(MAMBA, time_step_floor=0.05)
    bias = values_of(CAUSAL_LM, low)["backbone/layers_0/mixer/dt_proj/bias"]
    assert np.log1p(np.exp(bias)).min() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(("config", "head"), [MODELS[0], *MODELS[5:8]], ids=name_of)
def test_weights_are_counted_before_they_are_made(config, head):
    """Their memory is never overestimated, and few are left out."""
    found = 4 * sum(values.size for values in values_of(head, config).values())
    assert 0.8 * found <= config.weight_bytes <= found


def test_defaults_are_those_of_the_references():
    """google-research/bert's and transformers', for configs that leave them out."""
    of_bert = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    of_bert |= {"intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512}
    of_bert |= {"type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12}
    of_bert |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1)
    of_mamba = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "state_size": 16}
    of_mamba |= {"expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
    of_mamba |= {"layer_norm_epsilon": 1e-5, "time_step_min": 0.001, "time_step_max": 0.1}
    of_mamba |= {"time_step_floor": 1e-4, "initializer_range": 0.02}
    for config, defaults in ((ModelConfig(), of_bert), (MambaConfig(), of_mamba)):
        found = dataclasses.asdict(config)
        assert found == {**found, **defaults}


def restart():
    """Bring every generator of the process to one state."""
    keras.utils.set_random_seed(5)
    if find_spec("tensorflow"):
        import tensorflow as tf

        tf.random.get_global_generator().reset_from_seed(5)


def draw():
    """The next numbers of every generator that is not anybody's own."""
    found = [random.random(), np.random.random(), *np.asarray(keras.random.uniform((2,))).tolist()]
    if find_spec("tensorflow"):
        import tensorflow as tf

        found += tf.random.uniform((2,)).numpy().tolist()
        found += tf.random.get_global_generator().uniform((2,)).numpy().tolist()
    return found


def test_random_numbers_of_the_caller_go_on():
    restart()
    first, want = draw(), draw()
    restart()
    assert draw() == first
    build_model(PRETRAINING, CONFIG, seed=1)
    with pytest.raises(ZeroDivisionError), seeded(3):
        random.random() / 0
    assert draw() == want != first


def test_weights_and_dropout_seeds_are_those_of_set_random_seed():
    keras.utils.set_random_seed(7)
    want = PackedBertForPretraining(CONFIG)
    want.build()
    got, other = build_model(PRETRAINING, CONFIG, seed=7), build_model(PRETRAINING, CONFIG, seed=8)
    assert len(want.variables) == len(got.variables)
    for one, two in zip(want.variables, got.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy(), err_msg=one.path)
    tables = [model.bert.embeddings.word_embeddings_VD.numpy() for model in (got, other)]
    assert np.any(tables[0] != tables[1])
