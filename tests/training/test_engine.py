"""The compiled step: one trace, static shapes, the optimizer's exact number of steps, learning."""

import contextlib
import dataclasses

import keras
import next_tokens
import numpy as np
import pytest
from keras import ops
from packs import packed_and_unpacked
from tiny import CONFIG, SHALLOW, make_engine, to_floats, values_of
from uncompiled import run_uncompiled

from bert_packed.layers.dropout import Dropout
from bert_packed.objectives.objective import COUNT_NAMES, Objective
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training import engines
from bert_packed.training.backend import compiled
from bert_packed.training.engines.engine import clip
from bert_packed.training.optimization import AdamWeightDecay, Lamb, StableAdamW
from bert_packed.training.step_report import describe_step, is_static

pytestmark = pytest.mark.both_backends


def training_engine(micro_batch_size=None, config=CONFIG):
    optimizer = Lamb(0.01, weight_decay_rate=0.01)
    return make_engine(config=config, optimizer=optimizer, micro_batch_size=micro_batch_size)


@pytest.fixture(scope="module")
def batches():
    packed = [packed_and_unpacked(seed)[0] for seed in range(3)]
    return [{name: np.concatenate([values, values]) for name, values in batch.items()} for batch in packed]


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_one_trace_and_every_step_counted(batches, micro_batch_size):
    engine, losses = training_engine(micro_batch_size, SHALLOW), []
    for step in range(12):
        assert int(engine.optimizer.iterations.numpy()) == step
        sums = to_floats(engine.train_step(batches[step % 3]))
        losses.append(sums["mlm_loss"])
        # they are from the same program: no second one shows them
        ratios = [sums[f"trust_ratio_{name}"] for name in ("min", "median", "max")]
        assert sums["gradient_norm"] > 0 and 0 < ratios[0] < ratios[1] < ratios[2]
    assert engine.num_train_traces == 1
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.usefixtures("uncompiled")
def test_steps_started_ahead_are_those_waited_for(batches):
    """Bit for bit, and the sums read late: no step starts from another's weights, or has another's sums."""
    sums, weights = [], []
    for is_ahead in (False, True):
        engine = training_engine(2, SHALLOW)
        if is_ahead:
            sums.append(list(map(engine.read, [engine.start_step(batch) for batch in batches])))
            engine.write_back()
        else:
            sums.append([engine.train_step(batch) for batch in batches])
        variables = {**engine.weights(), **engine.training_state()}.values()
        weights.append([np.array(variable.numpy()).tobytes() for variable in variables])
    assert sums[0] == sums[1] and weights[0] == weights[1]


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
        state = values_of(engine.training_state())
        seeds.append({name: value.tolist() for name, value in state.items() if "seed" in name})
    assert seeds[0] and seeds[0] == seeds[1]


def test_a_compiled_step_clips_the_whole_gradient_once(batches):
    """It keeps the direction of all packs together, unlike each micro-batch's; its length is the limit."""
    # Plain descent is compared: LAMB's first step is the gradient's sign, which magnifies rounding
    limit = 0.01
    whole = make_engine(config=SHALLOW)
    gradients = [np.asarray(gradient) for gradient in whole.gradients(batches[0])[0]]
    length = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients))
    assert length > 10 * limit
    # The rate is 1 / limit: an update of 0.01 would drown in the weights' own rounding
    optimizer = keras.optimizers.SGD(1 / limit, global_clipnorm=limit)
    engine = make_engine(config=SHALLOW, optimizer=optimizer, micro_batch_size=2)
    sums = to_floats(engine.train_step(batches[0]))
    assert sums["gradient_norm"] == pytest.approx(length, rel=1e-5)  # before clipping
    pairs = zip(whole.model.trainable_variables, engine.model.trainable_variables, gradients, strict=True)
    for before, after, gradient in pairs:
        np.testing.assert_allclose(
            before.numpy() - after.numpy(), gradient / length, atol=1e-5, err_msg=before.path
        )


@pytest.mark.usefixtures("uncompiled")
def test_steps_by_stable_adamw_are_those_of_unpacked_sequences():
    """Norms and updates are clipped: both depend on the gradient of the whole step alone."""
    limit, weights = 0.5, []
    for number, kind in ((0, StableAdamW), (1, StableAdamW), (0, AdamWeightDecay)):
        # The epsilon is larger than a run's, which magnifies rounding where gradients are 0
        settings = {"beta_2": 0.98, "epsilon": 1e-3, "weight_decay_rate": 0.1, "global_clipnorm": limit}
        engine = make_engine(config=SHALLOW, optimizer=kind(0.01, **settings))
        for step in range(5):
            sums = to_floats(engine.train_step(packed_and_unpacked(step)[number]))
            assert sums["gradient_norm"] > 2 * limit
        weights.append(values_of(engine.weights()))
    packed, unpacked, without_clipping = weights
    for name, values in unpacked.items():
        np.testing.assert_allclose(packed[name], values, rtol=0, atol=1e-5, err_msg=name)
    differences = [np.abs(without_clipping[name] - values).max() for name, values in packed.items()]
    assert np.median(differences) > 1e-4


@pytest.mark.parametrize(
    ("limit", "spoiled", "value"),
    [
        *((limit, None, 0.0) for limit in (6.5, 20.0, None)),
        *((6.5, "sum", value) for value in (np.inf, -np.inf, np.nan)),
        *((None, "gradient", value) for value in (np.inf, -np.inf, np.nan)),
        (6.5, "gradient", np.nan),
    ],
)
def test_a_step_counts_where_all_of_it_is_finite(limit, spoiled, value):
    """A loss can be finite with a gradient that is not, and the other way round."""
    gradients = [np.array([3.0, -4.0], np.float32), np.array([[12.0]], np.float32)]
    if spoiled == "gradient":
        gradients[0][1] = value
    loss = np.float32(value if spoiled == "sum" else 2.0)
    given = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
    clipped, figures = clip(given, {"loss": keras.ops.convert_to_tensor(loss)}, limit)
    assert float(figures["is_skipped"]) == bool(spoiled)
    for before, after in zip(gradients, clipped, strict=True):
        wanted = np.full_like(before, np.nan) if spoiled else before * (0.5 if limit == 6.5 else 1.0)
        np.testing.assert_allclose(np.asarray(after), wanted, rtol=1e-6)
    if spoiled != "gradient":
        assert float(figures["gradient_norm"]) == 13.0


def test_a_joined_norm_is_that_of_all_values():
    """The norm of GPUs, which no other test computes; a part of a gradient that is left out shows."""
    shapes = (3,), (7, 5), (96, 60), (5001,)  # few values, and many that 1024 parts do and do not divide
    gradients = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in shapes]
    given = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
    _, figures = compiled(lambda given: clip(given, {"loss": keras.ops.sum(given[0])}, 1.0, joins=True))(
        given
    )
    wanted = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients))
    np.testing.assert_allclose(float(figures["gradient_norm"]), wanted, rtol=1e-6)


def test_weights_and_state_have_distinct_names():
    engine = training_engine()
    weights, state = engine.weights(), engine.training_state()
    assert not weights.keys() & state.keys()
    assert len(weights) == len(engine.model.weights)
    # the state is iteration, learning rate, and two moments for each trainable variable
    assert len(state) == 2 + 2 * len(engine.model.trainable_variables) + sum(
        name.startswith("dropout_seed/") for name in state
    )
    assert "bert/embeddings/word_embeddings" in weights and "lamb/iteration" in state


NUM_UNITS = 64


class Dropped(keras.Model):
    """One weight for each of 64 units, of which half are dropped: the gradient shows which."""

    def __init__(self):
        super().__init__(name="dropped")
        self.weight = self.add_weight(shape=(NUM_UNITS,), initializer="ones", name="weight")
        self.dropout = Dropout(0.5, seed=3)
        self.built = True

    def call(self, batch, training=None):
        return {"units": self.dropout(ops.ones_like(batch["rows"]) * self.weight, training=training)}


def sums_of_dropped(outputs, batch):
    return {"loss": ops.sum(outputs["units"]), **counts_of_dropped(batch)}


def counts_of_dropped(batch):
    return dict.fromkeys(COUNT_NAMES, ops.sum(batch["rows"]))


def engine_of_dropped(micro_batch_size):
    losses = {"loss": "num_sequences"}
    objective = Objective(Dropped, (), {"units": "S"}, sums_of_dropped, counts_of_dropped, losses)
    return engines.make_engine(Dropped(), objective, keras.optimizers.SGD(1.0), micro_batch_size)


ROWS = {"rows": np.ones((6, 1), np.float32)}


def steps_of(engine, number):
    """Decrease of each weight in each step: its mean over rows, 2 where a unit stays and 0 else."""
    found, before = [], np.ones(NUM_UNITS)
    for _ in range(number):
        engine.train_step(ROWS)
        after = np.asarray(engine.model.weight.numpy(), np.float64)
        found.append(before - after)
        before = after
    return found


def test_every_step_drops_other_units():
    steps = steps_of(engine_of_dropped(micro_batch_size=6), 3)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(steps[one] - steps[other]).max() > 1e-3
    assert np.mean(steps) == pytest.approx(1, abs=0.15)  # kept units count for the dropped ones


def test_every_micro_batch_drops_other_units():
    """If one mask served them all, each weight would get all or nothing."""
    (step,) = steps_of(engine_of_dropped(micro_batch_size=1), 1)
    shares = step / 2
    assert np.sum((shares > 0.1) & (shares < 0.9)) > NUM_UNITS // 2
    assert np.all(np.abs(shares * 6 - np.round(shares * 6)) < 1e-4)


def test_evaluation_drops_nothing_and_moves_no_seed():
    """Its sums are those of the same weights in a model without dropout."""
    packed, _ = packed_and_unpacked()
    rates = {"hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.4}
    configs = dataclasses.replace(SHALLOW, **rates), SHALLOW
    engine, without = (make_engine(config=config) for config in configs)
    for name, weight in without.weights().items():
        weight.assign(engine.weights()[name])
    want = to_floats(without.objective.sums(without.model(packed), packed))
    seeds = [v for v in engine.model.variables if "seed" in v.path]
    before = [seed.numpy().tolist() for seed in seeds]
    for _ in range(2):
        assert to_floats(engine.eval_step(packed)) == pytest.approx(want, rel=1e-5)
    _, sums = engine.gradients(packed, training=False)
    assert to_floats(sums) == pytest.approx(want, rel=1e-5)
    assert before == [seed.numpy().tolist() for seed in seeds]
    # they differ in training, so the comparison is of something
    assert abs(float(engine.gradients(packed)[1]["mlm_loss"]) - want["mlm_loss"]) > 1e-2


@pytest.mark.slow
def test_compiled_steps_over_rows_are_those_of_single_operations():
    """One program, of fixed shapes; micro-batches use the carried states one after the other."""
    batch = next_tokens.batch_of(next_tokens.random_packs()[:4], 12, 4)
    later = {**batch, "position_ids": batch["position_ids"] + 12}
    figures = []
    for is_compiled in (True, False):
        optimizer = Lamb(0.01)
        with contextlib.nullcontext() if is_compiled else run_uncompiled():
            engine = next_tokens.make_engine(build={"num_rows": 4}, optimizer=optimizer, micro_batch_size=2)
        figures.append([to_floats(engine.train_step(one)) for one in (batch, later)])
        carried = {n: v for n, v in values_of(engine.training_state()).items() if "carried" in n}
        if is_compiled:
            assert engine.num_train_traces == 1 and is_static(describe_step(engine.step_program(batch)))
            want = carried
    assert figures[0][1]["lm_loss"] != pytest.approx(figures[0][0]["lm_loss"], rel=1e-3)
    for one, other in zip(*figures, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for name, values in want.items():
        np.testing.assert_allclose(carried[name], values, atol=1e-4 * np.abs(values).max())
