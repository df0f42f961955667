"""Models spread over a mesh train as on one device: losses, norms, gradients, weights, dropout.

The fault that this file alone finds: a layout whose collectives, shardings or padded rows change a step.
"""

import dataclasses
import functools
import math
import re

import modern_bert_models
import numpy as np
import pytest
from layouts import (
    CLIP,
    MICRO_BATCH_SIZE,
    WIDE,
    WITH_DROPOUT,
    batch_at,
    make_devices,
    make_engine,
    needs_jax,
)
from tiny import to_floats, train_on

from bert_packed.layers import context as layers
from bert_packed.layers.dropout import is_kept
from bert_packed.layers.fast_gradients import gradients_are_for
from bert_packed.objectives.pretraining import masked_lm_objective
from bert_packed.training.optimization import StableAdamW
from bert_packed.training.program_text import COLLECTIVES, find_collectives, read_module

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
jnp = jax.numpy
pytestmark = needs_jax
NUM_STEPS = 3
# Four heads suit four devices; every kind of weight occurs; initial weights are as small as published
MODERN = dataclasses.replace(
    modern_bert_models.CONFIG,
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=48,
    norm_bias=True,
    attention_bias=True,
    mlp_bias=True,
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), 0.2),
)
# Ratios of StableAdamW's clipping are of means over all values of a weight, of which padding is none
MODELS = {
    "bert": {"config": WITH_DROPOUT},
    "modernbert": {
        "config": MODERN,
        # The batch grows: the last micro-batch of early steps is empty and skipped
        "objective": dataclasses.replace(masked_lm_objective("per_token"), skips_empty=True),
        "optimizer": StableAdamW,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh of (copies, rows, columns)."""

    model: str
    layout: str = "none"
    shape: tuple | None = None
    transport: str = "gather"

    def engine(self, **build):
        given = {**MODELS[self.model], "transport": self.transport, **build}
        return make_engine(self.layout, self.shape, **given)

    def cuts(self):
        """Parts of the packs and of the heads."""
        copies, rows, columns = self.shape
        return (copies * rows, columns) if self.layout == "optimus2d" else (copies, rows * columns)

    def __str__(self):
        return f"{self.model}-{self.layout}-{'x'.join(map(str, self.shape))}"


OPTIMUS, MEGATRON = Case("bert", "optimus2d", (1, 2, 2)), Case("bert", "megatron1d", (1, 2, 2))
MODERN_CASES = [Case("modernbert", "optimus2d", (1, 2, 2)), Case("modernbert", "megatron1d", (1, 2, 2))]
CASES = [OPTIMUS, Case("bert", "optimus2d", (2, 2, 2), "tree"), MEGATRON, *MODERN_CASES]
SLOW = [
    Case("bert", "optimus2d", (1, 4, 4)),
    Case("bert", "megatron1d", (1, 4, 4)),
    Case("bert", "megatron1d", (2, 1, 2)),
]


def each(cases, slow=()):
    marked = [pytest.param(case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize("case", [*cases, *marked], ids=str)


def batches_of(model, num_steps=NUM_STEPS):
    batches = [batch_at(step) for step in range(num_steps)]
    if model == "bert":
        return batches
    names = [feature.name for feature in MODELS[model]["objective"].features]
    batches = [{name: batch[name] for name in names} for batch in batches]
    for values in batches[1].values():
        values[MICRO_BATCH_SIZE:] = 0
    return batches


@pytest.fixture(scope="module")
def trained():
    make_devices()

    return functools.cache(lambda case: train_on(case.engine(), batches_of(case.model)))


def without_keys(name, values):
    """The values of a weight without biases of keys, whose gradient is 0 but for rounding."""
    if name.endswith("qkv/bias") or "qkv_bias" in name:
        return np.delete(values, np.s_[MODERN.hidden_size : 2 * MODERN.hidden_size])
    return values[:0] if name.endswith("key/bias") or "key_bias" in name else values


@each(CASES, SLOW)
def test_steps_are_those_of_one_device(trained, case):
    """The moments after a step from zeros are its gradient, clipped, and its square."""
    one, many = trained(Case(case.model)), trained(case)
    assert all(figures["gradient_norm"] > 2 * CLIP for figures in one.figures)  # the clip is active
    for name, want in one.start.items():
        np.testing.assert_array_equal(many.start[name], want, err_msg=name)
    held_out = batches_of(case.model)[0]
    one_evaluated, many_evaluated = (to_floats(of.engine.eval_step(held_out)) for of in (one, many))
    for want, found in zip([*one.figures, one_evaluated], [*many.figures, many_evaluated], strict=True):
        assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-6)
    moments = [name for name in one.moments if "momentum" in name]
    assert len(moments) == len(many.engine.model.trainable_variables)
    for name in moments:
        want, found = (without_keys(name, of.moments[name]) for of in (one, many))
        assert np.abs(found - want).max(initial=0) <= 1e-6 * np.abs(want).max(initial=0), name
    assert one.weights.keys() == many.weights.keys() and one.state.keys() == many.state.keys()
    for name, want in one.weights.items():
        pair = (without_keys(name, of) for of in (many.weights[name], want))
        np.testing.assert_allclose(*pair, atol=1e-5, rtol=0, err_msg=name)
    for name, want in one.state.items():
        if "seed" in name:
            np.testing.assert_array_equal(many.state[name], want)
    assert many.engine.num_train_traces == many.engine.compiled_train_step._cache_size() == 1


def test_rows_hold_different_numbers_of_predictions():
    """Otherwise a loss divided by the count of its row would pass for right."""
    used = (batch_at(0)["prediction_sequences"] > 0).sum(axis=1)
    for rows in (2, 4):
        # A row has the packs of both micro-batches
        by_row = used.reshape(2, rows, -1).sum(axis=(0, 2))
        assert len(set(by_row.tolist())) == rows, by_row


def device_shares(engine, batch):
    """The part of each weight that one device holds, by the shardings of the compiled program: dict."""
    compiled = engine.compiled_train_step.lower(*engine.step_arguments(batch)).compile()
    (arguments, _) = compiled.input_shardings
    outputs = compiled.output_shardings[0]
    shares = {}
    for kind in ("trainable", "optimizer"):
        variables = engine.model.trainable_variables if kind == "trainable" else engine.optimizer.variables
        for variable, given, made in zip(variables, arguments[0][kind], outputs[kind], strict=True):
            shape = variable.shape
            assert given.is_equivalent_to(made, len(shape)), variable.path  # or the next step would differ
            shares[variable.path] = np.prod(given.shard_shape(shape)) / max(np.prod(shape), 1)
    return shares


# Megatron splits these, by the end of the name; moments are as their weights
SPLIT = {
    "bert": r"word_embeddings|(query|key|value|intermediate).(kernel|bias)|layer.*output.kernel",
    "modernbert": r"token_embeddings|(qkv|intermediate).(kernel|bias)|layer.*output.kernel",
}


@each(CASES, SLOW)
def test_each_device_holds_its_part_of_every_matrix(trained, case):
    """It does of moments, too. Optimus spreads all, Megatron the matrices of blocks and the vocabulary."""
    parts = case.shape[1] * case.shape[2]
    split = re.compile(f"({SPLIT[case.model]}|predictions.output_bias)(_momentum|_velocity)?$")
    for path, share in device_shares(trained(case).engine, batches_of(case.model)[0]).items():
        if path.endswith(("iteration", "learning_rate")):
            continue
        if case.layout == "optimus2d":
            is_vector = re.search(r"(bias|gamma|beta)(_momentum|_velocity)?$", path)
            assert share == 1 / (case.shape[2] if is_vector else parts), path
        else:
            assert share == (1 / parts if split.search(path) else 1), path


@each(CASES[:3], SLOW)
def test_logits_of_the_vocabulary_are_nowhere_whole(trained, case):
    """31 tokens are 32 with what is added; of a micro-batch's 8 x 12 predictions a row has its part."""
    program = trained(case).engine.step_program(batch_at(0))
    module = read_module(program.text)
    layout, (copies, rows, columns) = case.layout, case.shape
    predictions = 8 // copies // (rows if layout == "optimus2d" else 1) * 12
    parts = columns if layout == "optimus2d" else rows * columns
    sizes = [shape.sizes for instruction in module.instructions for shape in instruction.shapes]
    padded = -(-31 // parts) * parts
    own = [one for one in sizes if one and one[-1] == padded // parts and np.prod(one[:-1]) == predictions]
    assert own  # each device has its part of the logits
    assert not [one for one in sizes if np.prod(one) >= predictions * 31 and one[-1] in (31, padded)]


@each(CASES[:2])
def test_gradients_are_in_blocks_between_micro_batches(trained, case):
    program = trained(case).engine.step_program(batch_at(0))
    sizes = {
        shape.sizes
        for instruction in read_module(program.text).instructions
        for shape in instruction.shapes
        if instruction.opcode == "while"
    }
    side = case.shape[1]
    assert (48 // side, 96 // side) in sizes
    assert not {(48, 96), (96, 48), (48, 48)} & sizes


@each([], [OPTIMUS, MEGATRON])
def test_in_bfloat16_it_is_one_device_but_for_rounding(trained, case):
    engines = (of.engine(dtype="mixed_bfloat16") for of in (Case("bert"), case))
    want, found = (to_floats(engine.train_step(batch_at(0))) for engine in engines)
    assert {name: found[name] for name in want} == pytest.approx(want, rel=2e-2)
    assert want["mlm_loss"] != trained(Case("bert")).figures[0]["mlm_loss"]


@each([OPTIMUS, MEGATRON], MODERN_CASES)
def test_what_is_computed_again_leaves_out_the_last_product(trained, case):
    """Section 3.2.3, point 3, in the program: a block's last product is missing from what is repeated."""
    counts, batch = {}, batches_of(case.model)[0]
    for remat in (False, True):
        engine = case.engine(remat=remat)
        program = engine.step_program(batch)
        kinds = [one.kind for one in find_collectives(read_module(program.text))]
        counts[remat] = kinds.count("all-gather" if case.layout == "optimus2d" else "all-reduce")
    figures, want = to_floats(engine.train_step(batch)), trained(Case(case.model)).figures[0]
    assert {name: figures[name] for name in want} == pytest.approx(want, rel=1e-6)
    # A block gathers inputs and kernels of three of four products again; or adds up once more, of two times
    again = WITH_DROPOUT.num_hidden_layers * (6 if case.layout == "optimus2d" else 1)
    assert case.model != "bert" or counts[True] - counts[False] == again


@pytest.mark.usefixtures("trained")
def test_forms_for_cpus_are_taken_without_a_layout_alone(monkeypatch):
    """Operations that XLA would have to divide among devices between a layout's products stay as they are."""
    taken, attention_scores = [], layers.attention_scores
    monkeypatch.setattr(
        layers,
        "attention_scores",
        lambda *of: taken.append(gradients_are_for("cpu")) or attention_scores(*of),
    )
    for case in (Case("bert"), OPTIMUS, MEGATRON):
        engine = case.engine()
        taken.clear()
        engine.compiled_train_step.trace(*engine.step_arguments(batch_at(0)))
        assert taken and set(taken) == {case.layout == "none"}


def attend_plainly(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
    """The result of a fused kernel."""
    scores_BNSS = jnp.einsum("bsnh,btnh->bnst", query_BSNH, key_BSNH)
    is_own_B1SS = (sequence_ids_BS[:, :, None] == sequence_ids_BS[:, None, :])[:, None]
    shares_BNSS = jax.nn.softmax(jnp.where(is_own_B1SS, scores_BNSS, -1e9), axis=-1)
    if dropout is not None:
        words = (words_BNS[..., None] for words_BNS in dropout[1:])
        is_kept_BNSS = is_kept(dropout.rate, *words, jnp.arange(shares_BNSS.shape[-1], dtype="uint32"))
        shares_BNSS = jnp.where(is_kept_BNSS, shares_BNSS / (1 - dropout.rate), 0.0)
    return jnp.einsum("bnst,btnh->bsnh", shares_BNSS, value_BSNH)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (OPTIMUS, WITH_DROPOUT),
        (MEGATRON, WITH_DROPOUT),
        (MEGATRON, WIDE),
        *(pytest.param(case, MODERN, marks=pytest.mark.slow) for case in MODERN_CASES),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_a_fused_kernel_gets_the_heads_of_its_device(case, config):
    config = dataclasses.replace(config, num_hidden_layers=1)
    batch, seen = batches_of(case.model)[0], set()
    want, _ = Case(case.model).engine(config=config).gradients(batch)

    def attend(query_BSNH, *arguments, **dropout):
        seen.add((len(query_BSNH), query_BSNH.shape[2]))
        return attend_plainly(query_BSNH, *arguments, **dropout)

    engine = case.engine(config=config, attend=attend)
    found, _ = engine.gradients(batch)
    of_packs, of_heads = case.cuts()
    assert seen == {(MICRO_BATCH_SIZE // of_packs, config.num_attention_heads // of_heads)}
    for variable, one, other in zip(engine.model.trainable_variables, want, found, strict=True):
        other = np.asarray(other)[tuple(map(slice, one.shape))]
        assert np.abs(one - other).max() <= 2e-6 * np.abs(one).max() + 1e-9, variable.path


@each(MODERN_CASES)
def test_attention_exchanges_nothing_but_parts_of_kernels(trained, case):
    """A device has all that its heads of its packs need, in bands and in whole sequences."""
    program = trained(case).engine.step_program(batches_of(case.model)[0])
    largest = 0
    for instruction in read_module(program.text).instructions:
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            # One of the collectives has no name under JAX 0.12
            (name,) = re.findall(r'op_name="([^"]*)"', instruction.attributes) or [""]
            if "/attention/" in name and "/shard_map/" not in name.partition("/layer_")[2]:
                shapes = [shape.sizes for operand in instruction.operands for shape in operand.shapes]
                largest = max(largest, sum(math.prod(sizes) for sizes in shapes))
    share = 3 * MODERN.hidden_size**2 // 4  # of a joined kernel that a device holds
    queries = MICRO_BATCH_SIZE * 24 * MODERN.hidden_size // 4  # as it holds of each micro-batch
    assert 0 < largest <= share < queries
