"""The compiled step: one trace, static shapes, the optimizer's exact number of steps, learning."""

import dataclasses
import itertools
import re

import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine, to_floats

from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training import engines
from bert_packed.training.engines.engine import clip
from bert_packed.training.optimization import AdamWeightDecay, Lamb, StableAdamW

pytestmark = pytest.mark.both_backends


# Half the time to compile
SHALLOW = dataclasses.replace(CONFIG, num_hidden_layers=1)


def training_engine(micro_batch_size=None, config=CONFIG):
    optimizer = Lamb(0.01, weight_decay_rate=0.01)
    return make_engine(config=config, optimizer=optimizer, micro_batch_size=micro_batch_size)


@pytest.fixture(scope="module", params=[None, 2])
def engine(request):
    """In a fresh state for the first test alone."""
    return training_engine(request.param, SHALLOW)


@pytest.fixture(scope="module")
def batches():
    packed = [packed_and_unpacked(seed)[0] for seed in range(3)]
    return [{name: np.concatenate([values, values]) for name, values in batch.items()} for batch in packed]


def test_one_trace_and_every_step_counted(batches, engine):
    losses = []
    for step in range(12):
        assert int(engine.optimizer.iterations.numpy()) == step
        sums = to_floats(engine.train_step(batches[step % 3]))
        losses.append(sums["mlm_loss"])
        # from the same program: no second one shows them
        ratios = [sums[f"trust_ratio_{name}"] for name in ("min", "median", "max")]
        assert sums["gradient_norm"] > 0 and 0 < ratios[0] < ratios[1] < ratios[2]
    assert engine.num_train_traces == 1
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def program_of(engine, batch):
    """The training step's program as XLA's text."""
    if keras.backend.backend() == "jax":
        return engine.compiled_train_step.lower(engine.state(), batch).as_text(dialect="hlo")
    return engine.compiled_train_step.experimental_get_compiler_ir(batch)(stage="hlo")


def test_no_dynamic_dimension_in_the_program(batches, engine):
    program = program_of(engine, batches[0])
    assert "ENTRY" in program
    assert engine._micro_batch_size is None or "while" in program
    assert re.findall(r"\[[^\]]*<=[^\]]*\]", program) == []
    assert not re.search(r"set-dimension-size|get-dimension-size|f32\[\?", program)


def test_compiled_step_equals_the_plain_gradient(batches):
    """The program's update is the update by the gradients that the equality tests compare."""
    # Plain descent: LAMB's first step is the gradient's sign, which magnifies rounding
    compiled, plain = (
        make_engine(config=SHALLOW, optimizer=keras.optimizers.SGD(1.0), micro_batch_size=2) for _ in range(2)
    )
    before = [variable.numpy() for variable in plain.model.trainable_variables]
    sums = to_floats(compiled.train_step(batches[0]))
    gradients, _ = plain.gradients(batches[0])
    gradients = [np.asarray(gradient) for gradient in gradients]
    length = np.sqrt(sum(np.sum(np.square(gradient, dtype=np.float64)) for gradient in gradients))
    assert sums["gradient_norm"] == pytest.approx(length, rel=1e-5)
    variables = zip(compiled.model.trainable_variables, before, gradients, strict=True)
    for variable, start, gradient in variables:
        scale = max(np.abs(gradient).max(), 1e-1)
        np.testing.assert_allclose(
            start - variable.numpy(), gradient, atol=1e-5 * scale, err_msg=variable.path
        )


def test_evaluation_is_without_dropout_and_each_training_step_drops_other_units(batches):
    """With a rate of 0 the weights stay: what differs from step to step is dropout alone."""
    config = dataclasses.replace(SHALLOW, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    engine = make_engine(config=config, optimizer=keras.optimizers.SGD(0.0), micro_batch_size=5)
    want = to_floats(engine.objective.sums(engine.model(batches[0], training=False), batches[0]))
    losses = []
    for _ in range(3):
        assert to_floats(engine.eval_step(batches[0])) == pytest.approx(want, rel=1e-5)
        losses.append(float(engine.train_step(batches[0])["mlm_loss"]))
    losses.append(want["mlm_loss"])
    assert min(abs(one - other) for one, other in itertools.combinations(losses, 2)) > 1e-3


@pytest.mark.usefixtures("uncompiled")
def test_seeds_of_dropout_move_on_for_what_is_skipped(batches):
    """Micro-batches at the end without a sequence, or all of a step: later steps drop the same units."""
    config = dataclasses.replace(SHALLOW, hidden_dropout_prob=0.3)
    batch = {name: np.concatenate([values, 0 * values]) for name, values in batches[0].items()}
    size = len(batches[0]["token_ids"]) // 2
    seeds = []
    for skips_empty in (True, False):
        objective = dataclasses.replace(pretraining_objective("per_sequence"), skips_empty=skips_empty)
        given = {"optimizer": keras.optimizers.SGD(0.0), "micro_batch_size": size}
        engine = engines.make_engine(objective.build_model(config, 1), objective, **given)
        engine.train_step(batch)
        engine.train_step({name: 0 * values for name, values in batch.items()})
        found = {name: value.numpy() for name, value in engine.training_state().items() if "seed" in name}
        seeds.append({name: np.array(value).tolist() for name, value in found.items()})
    assert seeds[0] and seeds[0] == seeds[1]


@pytest.mark.usefixtures("uncompiled")
def test_the_whole_gradient_is_clipped_once(batches):
    """Not each micro-batch's: it keeps the direction of all packs together, its length is the limit."""
    limit = 0.01
    whole = make_engine()
    gradients = [np.asarray(gradient) for gradient in whole.gradients(batches[0])[0]]
    length = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients))
    assert length > 10 * limit
    # A step of 1 / limit: an update of 0.01 would drown in the weights' own rounding
    optimizer = keras.optimizers.SGD(1 / limit, global_clipnorm=limit)
    engine = make_engine(optimizer=optimizer, micro_batch_size=2)
    sums = to_floats(engine.train_step(batches[0]))
    assert sums["gradient_norm"] == pytest.approx(length, rel=1e-5)  # before clipping
    pairs = zip(whole.model.trainable_variables, engine.model.trainable_variables, gradients, strict=True)
    for before, after, gradient in pairs:
        np.testing.assert_allclose(
            before.numpy() - after.numpy(), gradient / length, atol=1e-5, err_msg=before.path
        )


@pytest.mark.usefixtures("uncompiled")
def test_steps_by_stable_adamw_are_those_of_unpacked_sequences():
    """With norms and updates clipped: both depend on the gradient of the whole step alone."""
    limit, weights = 0.5, []
    for number, kind in ((0, StableAdamW), (1, StableAdamW), (0, AdamWeightDecay)):
        # A larger epsilon than a run's, which magnifies rounding where gradients are 0
        optimizer = kind(
            0.01,
            beta_2=0.98,
            epsilon=1e-3,
            weight_decay_rate=0.1,
            global_clipnorm=limit,
        )
        engine = make_engine(config=SHALLOW, optimizer=optimizer)
        for step in range(5):
            assert (
                to_floats(engine.train_step(packed_and_unpacked(step)[number]))["gradient_norm"] > 2 * limit
            )
        weights.append({name: np.array(weight.numpy()) for name, weight in engine.weights().items()})
    packed, unpacked, without_clipping = weights
    for name, values in unpacked.items():
        np.testing.assert_allclose(packed[name], values, rtol=0, atol=1e-5, err_msg=name)
    differences = [np.abs(without_clipping[name] - values).max() for name, values in packed.items()]
    assert np.median(differences) > 1e-4


@pytest.mark.parametrize("limit", [6.5, 20.0, None])
@pytest.mark.parametrize("spoiled", [None, "sum", "gradient"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_step_counts_where_all_of_it_is_finite(limit, spoiled, value):
    """A loss can be finite with a gradient that is not, and the other way round."""
    gradients = [np.array([3.0, -4.0], np.float32), np.array([[12.0]], np.float32)]
    sums = {"loss": np.float32(2.0), "num_sequences": np.float32(1.0)}
    if spoiled == "sum":
        sums["loss"] = np.float32(value)
    elif spoiled == "gradient":
        gradients[0][1] = value
    clipped, figures = clip(
        [keras.ops.convert_to_tensor(gradient) for gradient in gradients],
        {name: keras.ops.convert_to_tensor(total) for name, total in sums.items()},
        limit,
    )
    assert float(figures["is_skipped"]) == bool(spoiled)
    for before, after in zip(gradients, clipped, strict=True):
        wanted = np.full_like(before, np.nan) if spoiled else before * (0.5 if limit == 6.5 else 1.0)
        np.testing.assert_allclose(np.asarray(after), wanted, rtol=1e-6)
    if spoiled != "gradient":
        assert float(figures["gradient_norm"]) == 13.0


def test_weights_and_state_have_distinct_names():
    engine = training_engine()
    weights, state = engine.weights(), engine.training_state()
    assert not weights.keys() & state.keys()
    assert len(weights) == len(engine.model.weights)
    # iteration, learning rate, and two moments for each trainable variable
    assert len(state) == 2 + 2 * len(engine.model.trainable_variables) + sum(
        name.startswith("dropout_seed/") for name in state
    )
    assert "bert/embeddings/word_embeddings" in weights and "lamb/iteration" in state
