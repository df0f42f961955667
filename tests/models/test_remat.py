"""Rematerialised blocks give the same losses and gradients, dropout included."""

import dataclasses
import re

import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG, to_floats

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.layers.context import PackContext
from bert_packed.layers.rematerialisation import run_rematerialised
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training.engines import make_engine
from bert_packed.training.optimization import Lamb

# Queries, keys, values, scores, context, its output, and the first layer of the feed-forward network; the
# second is not needed again
PRODUCTS_PER_BLOCK = 7
WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)


def make_remat_engine(remat, config, **kwargs):
    return make_engine(
        build_model(PRETRAINING, config, 1, remat=remat), pretraining_objective("per_sequence"), **kwargs
    )


@pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, marks=pytest.mark.slow), WITH_DROPOUT], ids=["sound", "dropout"]
)
@pytest.mark.parametrize(
    "micro_batch_size",
    [pytest.param(5, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.both_backends)],
)
def test_gradients_are_the_same(config, micro_batch_size):
    packed, _ = packed_and_unpacked()
    plain, again = (make_remat_engine(r, config, micro_batch_size=micro_batch_size) for r in (False, True))
    for _ in range(2):  # the second call draws other seeds, the same in both
        want, want_sums = plain.gradients(packed)
        got, got_sums = again.gradients(packed)
        assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-6)
        for variable, one, other in zip(plain.model.trainable_variables, got, want, strict=True):
            one, other = np.asarray(one), np.asarray(other)
            assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max() + 1e-6, variable.path
    seeds = [[v.numpy().tolist() for v in e.model.variables if "seed" in v.path] for e in (plain, again)]
    assert seeds[0] == seeds[1]


@pytest.mark.both_backends
def test_evaluation_draws_no_seeds():
    """Or a run that evaluates in between would train on with other dropout than one that does not."""
    packed, _ = packed_and_unpacked()
    model = build_model(PRETRAINING, WITH_DROPOUT, 1, remat=True)
    states = []
    for training in (None, False, True):  # None: as it was built
        if training is not None:
            model.encode(packed, training=training)
        states.append([v.numpy().tolist() for v in model.variables if "seed" in v.path])
    assert states[0] == states[1] != states[2]


@pytest.mark.both_backends
def test_what_a_block_makes_of_the_context_stays_in_it():
    """Under a compiler a mask made in one block's program means nothing in another's."""
    masks = []

    class Block(keras.layers.Layer):
        def call(self, hidden_BSD, context, training=None):
            masks.append(context.mask_B1SS)
            return hidden_BSD

    packed, _ = packed_and_unpacked()
    context = PackContext(keras.ops.convert_to_tensor(packed["sequence_ids"]), None)
    run_rematerialised([Block(), Block()], keras.ops.ones((5, 24, 2)), context)
    assert len({id(mask) for mask in [*masks, context.mask_B1SS]}) == 3


@pytest.mark.slow  # CI runs all of this file fully optimised
@pytest.mark.both_backends
def test_compiled_steps_are_the_same():
    packed, _ = packed_and_unpacked()
    engines = [make_remat_engine(r, WITH_DROPOUT, optimizer=Lamb(0.01)) for r in (False, True)]
    for engine in engines:
        engine.train_step(packed)
        assert engine.num_train_traces == 1
    for one, other in zip(*(engine.model.weights for engine in engines), strict=True):
        # Key biases: of a gradient that is 0 but for rounding, LAMB makes a step of any direction
        if not one.path.endswith("key/bias"):
            np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-4, err_msg=one.path)


def optimised_program(engine, batch):
    """XLA's optimised program of the training step, as text."""
    if keras.backend.backend() == "jax":
        return engine.compiled_train_step.lower(engine.state(), batch).compile().as_text()
    return engine.compiled_train_step.experimental_get_compiler_ir(batch)(stage="optimized_hlo")


@pytest.mark.slow
@pytest.mark.both_backends
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_compiled_steps_compute_each_block_again(micro_batch_size):
    """In the optimised program: XLA can merge what is computed again with the first time, for nothing."""
    packed, _ = packed_and_unpacked()
    counts = []
    for remat in (False, True):
        engine = make_remat_engine(
            remat, WITH_DROPOUT, optimizer=Lamb(0.01), micro_batch_size=micro_batch_size
        )
        counts.append(len(re.findall(r" dot\(", optimised_program(engine, packed))))
    assert counts[1] - counts[0] == PRODUCTS_PER_BLOCK * CONFIG.num_hidden_layers


@pytest.mark.both_backends
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
def test_compiled_steps_need_less_memory():
    packed, _ = packed_and_unpacked()
    many = {name: np.tile(values, (8, *[1] * (values.ndim - 1))) for name, values in packed.items()}
    config = dataclasses.replace(WITH_DROPOUT, num_hidden_layers=6)
    sizes = []
    for remat in (False, True):
        engine = make_remat_engine(remat, config, optimizer=Lamb(0.01))
        sizes.append(engine.step_programs(many)[0].temporary_bytes)
    assert sizes[1] < sizes[0] / 2
