"""A packed ModernBERT spread over a mesh trains as on one device, and no device holds a whole matrix."""

import dataclasses
import functools
import math
import re

import numpy as np
import pytest
from layouts import MICRO_BATCH_SIZE, batch_at, make_devices, make_engine, needs_jax, values_of
from modern_bert_models import CONFIG
from tiny import to_floats

from bert_packed.objectives.pretraining import masked_lm_objective
from bert_packed.training.optimization import StableAdamW
from bert_packed.training.program_text import COLLECTIVES, read_module

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
pytestmark = needs_jax
OBJECTIVE = masked_lm_objective("per_token")
# Four heads for four devices; every kind of weight; initial weights as small as the published model's
WIDE = dataclasses.replace(
    CONFIG,
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=48,
    norm_bias=True,
    attention_bias=True,
    mlp_bias=True,
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), 0.2),
)
ONE_DEVICE = ("none", None)
CASES = [("optimus2d", (1, 2, 2)), ("megatron1d", (1, 2, 2)), ("megatron1d", (2, 1, 2))]
each_case = pytest.mark.parametrize(
    "case", [*CASES[:2], pytest.param(CASES[2], marks=pytest.mark.slow)], ids=str
)


@pytest.fixture(scope="module", autouse=True)
def devices():
    make_devices()


def engine_of(case, config=WIDE, **build):
    return make_engine(*case, config=config, objective=OBJECTIVE, optimizer=StableAdamW, **build)


def batches(num_steps):
    names = [feature.name for feature in OBJECTIVE.features]
    return [{name: batch_at(step)[name] for name in names} for step in range(num_steps)]


@functools.cache
def trained(case, num_steps=3):
    """The engine, and figures, moments after the first step, weights at the end."""
    engine, figures = engine_of(case), []
    for batch in batches(num_steps):
        figures.append(to_floats(engine.train_step(batch)))
        if len(figures) == 1:
            moments = values_of(engine.training_state())
    return engine, figures, moments, values_of(engine.weights())


def largest_difference(want, found):
    """Of two dicts of arrays, relative to the largest number of each."""
    assert want.keys() == found.keys()
    return max(np.abs(found[name] - of).max() / (np.abs(of).max() + 1e-30) for name, of in want.items())


@each_case
def test_steps_are_those_of_one_device(case):
    _, want, moments, weights = trained(ONE_DEVICE)
    engine, found, its_moments, its_weights = trained(case)
    for one, other in zip(want, found, strict=True):
        assert {name: other[name] for name in one} == pytest.approx(one, rel=1e-6)
    gradients = [{k: v for k, v in of.items() if "momentum" in k} for of in (moments, its_moments)]
    assert len(gradients[0]) == len(engine.model.trainable_variables)
    for name, gradient in gradients[0].items():
        difference = np.abs(gradients[1][name] - gradient).max()
        assert difference <= 1e-6 * np.abs(gradient).max(), name
    keys = np.s_[WIDE.hidden_size : 2 * WIDE.hidden_size]
    for name, values in weights.items():
        pair = its_weights[name], values
        if name.endswith("qkv/bias"):  # the gradient of the keys' is 0 but for rounding
            pair = (np.delete(of, keys) for of in pair)
        np.testing.assert_allclose(*pair, atol=1e-5, rtol=0, err_msg=name)
    assert engine.num_train_traces == 1


@each_case
def test_each_device_holds_its_part_of_every_large_matrix(case):
    layout, (_, rows, columns) = case
    for variable in trained(case)[0].model.trainable_variables:
        held = np.prod(variable.value.sharding.shard_shape(variable.shape)) / np.prod(variable.shape)
        name = variable.path
        if name.endswith(("qkv/kernel", "intermediate/kernel", "output/kernel", "token_embeddings")):
            assert held == 1 / (rows * columns), name
        elif layout == "optimus2d":
            assert held == 1 / (rows * columns if name.endswith("kernel") else columns), name


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_attention_exchanges_nothing_but_parts_of_kernels(case):
    """In bands and in whole sequences: a device has all that its heads of its packs need."""
    (program,) = trained(case)[0].step_programs(batches(1)[0])
    largest = 0
    for instruction in read_module(program.text).instructions:
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            # Under JAX 0.12 one of the collectives has no name
            (name,) = re.findall(r'op_name="([^"]*)"', instruction.attributes) or [""]
            if "/attention/" in name and "/shard_map/" not in name.partition("/layer_")[2]:
                shapes = [shape.sizes for operand in instruction.operands for shape in operand.shapes]
                largest = max(largest, sum(math.prod(sizes) for sizes in shapes))
    share = 3 * WIDE.hidden_size**2 // 4  # of a joined kernel that a device holds
    queries = MICRO_BATCH_SIZE * 24 * WIDE.hidden_size // 4  # as it holds of each micro-batch
    assert 0 < largest <= share < queries


@each_case
def test_a_fused_kernel_gets_the_heads_and_packs_of_its_device(case):
    seen = set()

    def attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
        seen.add((len(query_BSNH), query_BSNH.shape[2]))
        return value_BSNH

    engine = engine_of(case, attend=attend)
    engine.compiled_train_step.trace(*engine.step_arguments(batches(1)[0]))
    layout, (copies, rows, columns) = case
    cut = (rows, columns) if layout == "optimus2d" else (1, rows * columns)
    assert seen == {(MICRO_BATCH_SIZE // copies // cut[0], WIDE.num_attention_heads // cut[1])}


@each_case
def test_the_first_weights_are_those_of_one_device(case):
    one, many = (engine_of(each) for each in (ONE_DEVICE, case))
    assert largest_difference(values_of(one.weights()), values_of(many.weights())) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_blocks_that_are_computed_again(case):
    found = to_floats(engine_of(case, remat=True).train_step(batches(1)[0]))
    want = trained(ONE_DEVICE)[1][0]
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-6)
