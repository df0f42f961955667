"""LAMB and StableAdamW against golden steps of their authors; exclusions, schedule and packing correction."""

import contextlib
import dataclasses
import json
from pathlib import Path

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import FAMILIES, LEAST_EPSILON
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.optimization import (
    OPTIMIZERS,
    AdamWeightDecay,
    Lamb,
    StableAdamW,
    WarmupStableDecay,
    _median,
    build_optimizer,
    build_schedule,
    correct_betas,
    optimizer_settings,
    trust_ratios,
)

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "lamb_tfa_golden.json").read_text())
OPTIMI = json.loads((DATA / "stable_adamw_optimi_golden.json").read_text())
pytestmark = pytest.mark.both_backends


def make_variable(path, value, undecayed=("bias",)):
    """A variable whose `path` is given, not decayed where it contains one of some words."""
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        variable = keras.Variable(np.array(value, np.float32), name=name)
    variable.is_decayed = not any(word in path for word in undecayed)
    return variable


@pytest.mark.parametrize("run", GOLDEN["runs"], ids=range(len(GOLDEN["runs"])))
def test_lamb_equals_tensorflow_addons(run):
    config = dict(run["config"])
    excluded = config.pop("exclude_from_weight_decay") or ()
    assert (config.pop("exclude_from_layer_adaptation") or excluded) == excluded
    optimizer = Lamb(weight_decay_rate=config.pop("weight_decay"), **config)
    variables = {name: make_variable(name, value, excluded) for name, value in GOLDEN["init"].items()}
    assert [variable.path for variable in variables.values()] == list(GOLDEN["shapes"])
    for gradients, expected in zip(GOLDEN["gradients"], run["params"], strict=True):
        optimizer.apply([np.array(gradients[name], np.float32) for name in variables], variables.values())
        for name, variable in variables.items():
            got, want = np.array(variable.numpy()), np.array(expected[name], np.float32)
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-7, err_msg=name)


def optimi_steps(run, make):
    """Parameters after each golden step by one of ours, and by torch-optimi: pairs of dicts."""
    config = dict(run["config"])
    decay = config.pop("weight_decay")
    if config.pop("decouple_lr", False):
        decay /= max(OPTIMI["rates"])
    excluded = OPTIMI["not_decayed"]
    optimizer = make(weight_decay_rate=decay, **config)
    variables = {name: make_variable(name, value, excluded) for name, value in OPTIMI["init"].items()}
    for rate, gradients, expected in zip(OPTIMI["rates"], OPTIMI["gradients"], run["params"], strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([np.array(gradients[name], np.float32) for name in variables], variables.values())
        got = {name: np.array(variable.numpy()) for name, variable in variables.items()}
        yield got, {name: np.array(values) for name, values in expected.items()}


@pytest.mark.parametrize("run", OPTIMI["runs"], ids=range(len(OPTIMI["runs"])))
def test_stable_adamw_equals_torch_optimi(run):
    for got, expected in optimi_steps(run, StableAdamW):
        for name, values in expected.items():
            np.testing.assert_allclose(got[name], values, rtol=0, atol=1e-6, err_msg=name)
    # The steps must be able to fail: without the clipping, which is all that differs, each tensor does
    for name in OPTIMI["init"]:
        pairs = optimi_steps(run, AdamWeightDecay)
        assert max(np.abs(got[name] - expected[name]).max() for got, expected in pairs) > 1e-3


def test_the_smallest_epsilon_divides_no_0_by_0():
    """Gradient and second moment of a token that no step has seen are 0."""
    variable = make_variable("a/kernel", [1.0, 2.0])
    optimizer = StableAdamW(0.1, epsilon=LEAST_EPSILON)
    optimizer.apply([np.float32([0.0, 0.5])], [variable])
    np.testing.assert_allclose(variable.numpy(), [1.0, 1.9], rtol=1e-6)


EVERY_HEAD = [(name, head) for name, family in FAMILIES.items() for head in family.heads]


@pytest.mark.parametrize(("name", "head"), EVERY_HEAD)
def test_matrices_and_tables_are_decayed_and_adapted(name, head):
    """No bias, no scale or shift of a norm, and not the decays and skips of a Mamba's states."""
    config = dataclasses.replace(ARCHITECTURES[name].config, num_hidden_layers=1)
    weights = named_weights(build_model(head, config, 0, num_outputs=3))
    decayed = [key for key, weight in weights.items() if len(weight.shape) > 1 and not key.endswith("A_log")]
    assert [key for key, weight in weights.items() if weight.is_decayed] == decayed
    assert len(weights) > len(decayed) > 3


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (WarmupStableDecay(4.0, 6, 2), [2, 4, 4, 3, 2, 1, 0]),
        (WarmupStableDecay(4.0, 2, 4), [1, 2, 3]),  # cut short
        (WarmupStableDecay(1.0, 4, end=0.2, power=2.0), [1.0, 0.65, 0.4, 0.25, 0.2]),
        (WarmupStableDecay(4.0, 7, 2, end=1.0, num_decay_steps=3), [2, 4, 4, 4, 4, 3, 2, 1]),
        (
            WarmupStableDecay(4.0, 6, 2, decay_type="1-sqrt"),
            [2, 4, 4, 2, 4 * (1 - 0.5**0.5), 4 * (1 - 0.75**0.5), 0],
        ),
        (
            WarmupStableDecay(4.0, 9, 2, end=1.0, num_decay_steps=4, decay_type="1-sqrt"),
            [2, 4, 4, 4, 4, 4, 2.5, 4 - 3 * 0.5**0.5, 4 - 3 * 0.75**0.5, 1, 1],
        ),
    ],
)
def test_a_schedule_rises_stays_and_decays(schedule, rates):
    again = type(schedule).from_config(schedule.get_config())
    for one in (schedule, again):
        np.testing.assert_allclose([float(one(step)) for step in range(len(rates))], rates, rtol=1e-6)


def test_a_schedule_begins_after_the_steps_of_its_moments():
    config = PretrainingConfig(
        input_file="x", output_dir="y", learning_rate=4.0, num_train_steps=6, num_warmup_steps=2
    )
    optimizer = build_optimizer(config, steps_before=3)
    rates = [float(optimizer._learning_rate(step)) for step in range(3, 10)]
    assert rates == [float(build_schedule(config)(step)) for step in range(7)]
    assert rates == [2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    copy = WarmupStableDecay.from_config(optimizer._learning_rate.get_config())
    assert [float(copy(step)) for step in range(3, 10)] == rates


def test_settings_of_a_run_reach_the_optimizer():
    betas = {"beta_1": 0.9, "beta_2": 0.7, "packing_correction": "betas"}
    given = {"input_file": "x", "output_dir": "y", "epsilon": 1e-3, "weight_decay": 0.2, "max_grad_norm": 0.5}
    config = PretrainingConfig(**given, **betas)
    assert {*OPTIMIZERS} == {*PretrainingConfig.__dataclass_fields__["optimizer"].metadata["choices"]}
    for name, kind in OPTIMIZERS.items():
        optimizer = build_optimizer(dataclasses.replace(config, optimizer=name), packing_factor=2.0)
        assert type(optimizer) is kind
        assert (optimizer.beta_1, optimizer.beta_2) == pytest.approx((0.81, 0.49))
        assert (optimizer.epsilon, optimizer.weight_decay_rate) == (1e-3, 0.2)
        assert optimizer.global_clipnorm == 0.5
        plain = kind(0.1, **optimizer_settings(config)).get_config()
        assert kind.from_config(plain).get_config() == plain
    plain = dataclasses.replace(config, packing_correction="none", max_grad_norm=0.0, optimizer="adam")
    optimizer = build_optimizer(plain, packing_factor=2.0)
    assert (optimizer.beta_1, optimizer.beta_2, optimizer.corrects_bias) == (0.9, 0.7, True)
    assert optimizer.global_clipnorm is None
    assert correct_betas(0.81, 0.9, 2) == pytest.approx((0.6561, 0.81))
    steps = {"num_train_steps": 6, "num_warmup_steps": 2, "learning_rate": 4.0}
    root = dataclasses.replace(config, decay_type="1-sqrt", **steps)
    assert float(build_schedule(root)(4)) == pytest.approx(4 * (1 - 0.5**0.5))


def test_packed_step_moves_moments_like_p_steps():
    """Theorem of Section D: one step with beta^p on a gradient equals p steps on it, for the moments."""
    variable, corrected = make_variable("w", [1.0, -2.0]), make_variable("w", [1.0, -2.0])
    single = Lamb(0.0, beta_1=0.9, beta_2=0.99)
    packed = Lamb(0.0, beta_1=0.9**3, beta_2=0.99**3)
    gradient = np.array([0.5, 0.25], np.float32)
    for _ in range(3):
        single.apply([gradient], [variable])
    packed.apply([gradient], [corrected])
    for one, other in zip(single.variables[2:], packed.variables[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("corrects_bias", [True, False])
def test_adam_with_weight_decay_equals_a_loop(corrects_bias):
    rng = np.random.default_rng(0)
    values = {"dense/kernel": rng.normal(size=(3, 2)), "dense/bias": rng.normal(size=2)}
    variables = {name: make_variable(name, value) for name, value in values.items()}
    optimizer = AdamWeightDecay(
        0.05,
        corrects_bias,
        beta_1=0.8,
        beta_2=0.9,
        weight_decay_rate=0.3,
    )
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in values.items()}
    for step in range(1, 6):
        gradients = {name: rng.normal(size=value.shape) for name, value in values.items()}
        optimizer.apply([np.float32(gradient) for gradient in gradients.values()], variables.values())
        for name, gradient in gradients.items():
            m, v = moments[name]
            m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
            moments[name] = m, v
            scale = (1 - 0.8**step, 1 - 0.9**step) if corrects_bias else (1, 1)
            decay = 0.0 if name.endswith("bias") else 0.3
            values[name] = values[name] - 0.05 * (
                m / scale[0] / (np.sqrt(v / scale[1]) + 1e-6) + decay * values[name]
            )
            np.testing.assert_allclose(variables[name].numpy(), values[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_a_gradient_that_is_nan_changes_nothing(kind):
    """The other variables move as if it were not there."""
    start = {"a/kernel": [[1.0, -2.0]], "b/kernel": [[0.5, 3.0]]}
    spoiled, clean = ([make_variable(*pair) for pair in start.items()] for _ in range(2))
    optimizers = kind(0.1, weight_decay_rate=0.1), kind(0.1, weight_decay_rate=0.1)
    good = np.float32([[0.3, -0.7]])
    for optimizer, variables in zip(optimizers, (spoiled, clean), strict=True):
        optimizer.apply([good, good], variables)
    before = [np.array(of.numpy()) for of in (spoiled[0], *(of[0] for of in moments_of(optimizers[0])))]
    optimizers[0].apply([np.float32([[np.nan, 1.0]]) * np.nan, good], spoiled)
    optimizers[1].apply([good, good], clean)
    after = [np.array(of.numpy()) for of in (spoiled[0], *(of[0] for of in moments_of(optimizers[0])))]
    np.testing.assert_array_equal(after, before)
    assert np.all(np.array(before) != 0)
    pairs = [(spoiled, clean), *zip(*map(moments_of, optimizers), strict=True)]
    for one, other in pairs:
        np.testing.assert_array_equal(one[1].numpy(), other[1].numpy())


def moments_of(optimizer):
    """First and second moments, a list of variables each."""
    return zip(*(optimizer.moments_of(index) for index in range(2)), strict=True)


def test_trust_ratios_are_those_of_the_last_update():
    rng = np.random.default_rng(3)
    scales = {"a/kernel": 1.0, "b/kernel": 9.0, "c/kernel": 0.1, "d/kernel": 3.0, "a/bias": 50.0}
    values = {name: np.float32(scale * rng.normal(size=(3, 2))) for name, scale in scales.items()}
    variables = [make_variable(name, value) for name, value in values.items()]
    optimizer = Lamb(0.0, weight_decay_rate=0.2)
    optimizer.build(variables)
    assert optimizer.trust_ratios() == {}  # nothing was updated yet
    for _ in range(2):
        gradients = [np.float32(rng.normal(size=(3, 2))) for _ in variables]
        optimizer.apply(gradients, variables)
        found = {name: float(value) for name, value in optimizer.trust_ratios().items()}
        assert optimizer.trust_ratios() == {}
    # a rate of 0 leaves the weights as they were; the moments are of two gradients, so they are read
    want = []
    for name, value in list(values.items())[:-1]:
        place = list(values).index(name)
        m, v = (np.array(moments[place]) for moments in (optimizer._momentums, optimizer._velocities))
        update = (m / (1 - 0.9**2)) / (np.sqrt(v / (1 - 0.999**2)) + 1e-6) + 0.2 * value
        want.append(np.linalg.norm(value) / np.linalg.norm(update))
    statistics = {"min": min(want), "median": np.median(want), "max": max(want)}
    assert found == pytest.approx({f"trust_ratio_{name}": v for name, v in statistics.items()}, rel=1e-4)
    assert max(want) > 10 * min(want)
    assert trust_ratios(optimizer) == trust_ratios(AdamWeightDecay(0.1)) == {}
    assert Lamb(0.1).trust_ratios() == {}


@pytest.mark.parametrize("values", [[3.0], [2.0, 5.0], [4.0, 1.0, 1.0], [1.0] * 4, [7.0, -1.0, 2.0, 2.0]])
def test_the_median_without_sorting(values):
    assert float(_median(keras.ops.convert_to_tensor(values))) == np.median(values)
