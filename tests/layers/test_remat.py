"""Rematerialised blocks give the same losses and gradients, dropout included."""

import dataclasses
import re

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from tiny import CONFIG, to_floats

from bert_packed.layers.context import PackContext
from bert_packed.layers.rematerialisation import run_blocks
from bert_packed.training.optimization import Lamb

# These are queries, keys, values, scores, context, its output, and the first layer of the feed-forward
# network; the second is not needed again
PRODUCTS_PER_BLOCK = 7
BERT = ARCHITECTURES["bert"].with_dropout(0.2)


def seeds_of(model):
    return [v.numpy().tolist() for v in model.variables if "seed" in v.path]


def assert_same_gradients(variables, got, want):
    for variable, one, other in zip(variables, got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.abs(other).max() > 0, variable.path
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max() + 1e-6, variable.path


@pytest.mark.both_backends
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("name", "rate", "micro_batch_size"),
    [("bert", 0.2, 2), ("modernbert", 0.1, 4), ("mamba", 0.0, 4), ("mamba2", 0.0, 4)],
)
def test_gradients_are_the_same(name, rate, micro_batch_size):
    """A second call draws other seeds, the same in both, and a Mamba takes over what the first has left."""
    architecture = ARCHITECTURES[name].with_dropout(rate)
    packed = {name: values[:4] for name, values in architecture.batches()[0].items()}
    options = {"num_rows": 4} if name.startswith("mamba") else {}
    plain, again = (
        architecture.engine({"remat": remat, **options}, micro_batch_size=micro_batch_size)
        for remat in (False, True)
    )
    for call in range(2):
        batch = {**packed, "position_ids": packed["position_ids"] + call * bool(options)}
        want, want_sums = plain.gradients(batch, training=True)
        got, got_sums = again.gradients(batch, training=True)
        assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-6)
        assert_same_gradients(plain.model.trainable_variables, got, want)
    assert seeds_of(plain.model) == seeds_of(again.model)


@pytest.mark.both_backends
def test_evaluation_draws_no_seeds():
    """Otherwise a run that evaluates in between would train on with other dropout than one that does not."""
    packed, _ = BERT.batches()
    model = BERT.model(remat=True)
    states = [seeds_of(model)]
    for training in (False, True):
        model.encode(packed, training=training)
        states.append(seeds_of(model))
    assert states[0] == states[1] != states[2]


@pytest.mark.both_backends
def test_what_a_block_makes_of_the_context_stays_in_it():
    """Under a compiler a mask made in one block's program means nothing in another's."""
    masks = []

    class Block(keras.layers.Layer):
        def call(self, hidden_BSD, context, training=None):
            masks.append(context.mask_B1SS)
            return hidden_BSD

    packed, _ = BERT.batches()
    context = PackContext(keras.ops.convert_to_tensor(packed["sequence_ids"]), None)
    run_blocks([Block(), Block()], keras.ops.ones((5, 24, 2)), context, remat=True)
    assert len({id(mask) for mask in [*masks, context.mask_B1SS]}) == 3


@pytest.mark.slow  # CI runs all of this file fully optimised
@pytest.mark.both_backends
def test_compiled_steps_are_the_same():
    """They move by the gradients, with dropout."""
    packed, _ = BERT.batches()
    moves = []
    for remat in (False, True):
        engine = BERT.engine({"remat": remat}, optimizer=keras.optimizers.SGD(1.0))
        before = [weight.numpy() for weight in engine.model.trainable_variables]
        engine.train_step(packed)
        assert engine.num_train_traces == 1
        after = [weight.numpy() for weight in engine.model.trainable_variables]
        moves.append([one - other for one, other in zip(after, before, strict=True)])
    assert_same_gradients(engine.model.trainable_variables, *moves)


def optimised_program(engine, batch):
    """XLA's optimised program of the training step, as text."""
    if keras.backend.backend() == "jax":
        return engine.compiled_train_step.lower(engine.state(), batch).compile().as_text()
    return engine.compiled_train_step.experimental_get_compiler_ir(batch)(stage="optimized_hlo")


@pytest.mark.slow
@pytest.mark.both_backends
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_compiled_steps_compute_each_block_again(micro_batch_size):
    """The optimised program counts: XLA can merge what is computed again with the first time."""
    packed, _ = BERT.batches()
    counts = []
    for remat in (False, True):
        engine = BERT.engine({"remat": remat}, optimizer=Lamb(0.01), micro_batch_size=micro_batch_size)
        counts.append(len(re.findall(r" dot\(", optimised_program(engine, packed))))
    assert counts[1] - counts[0] == PRODUCTS_PER_BLOCK * CONFIG.num_hidden_layers


@pytest.mark.both_backends
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
def test_compiled_steps_need_less_memory():
    packed, _ = BERT.batches()
    many = {name: np.tile(values, (8, *[1] * (values.ndim - 1))) for name, values in packed.items()}
    deep = dataclasses.replace(BERT, config=dataclasses.replace(BERT.config, num_hidden_layers=6))
    sizes = []
    for remat in (False, True):
        engine = deep.engine({"remat": remat}, optimizer=Lamb(0.01))
        sizes.append(engine.step_program(many).temporary_bytes)
    assert sizes[1] < sizes[0] / 2
