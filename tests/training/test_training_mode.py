"""Training drops units, others in every step and micro-batch; whatever does not train drops none."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine, to_floats

from bert_packed.layers.dropout import Dropout
from bert_packed.objectives.objective import COUNT_NAMES, Objective
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training import engines

pytestmark = pytest.mark.both_backends
WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.4, attention_probs_dropout_prob=0.4)
WIDTH = 64


class Dropped(keras.Model):
    """One weight for each of 64 units, of which half are dropped: the gradient shows which."""

    def __init__(self):
        super().__init__(name="dropped")
        self.weight = self.add_weight(shape=(WIDTH,), initializer="ones", name="weight")
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
    found, before = [], np.ones(WIDTH)
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
    """Of one mask for all of them each weight would get all or nothing."""
    (step,) = steps_of(engine_of_dropped(micro_batch_size=1), 1)
    shares = step / 2
    assert np.sum((shares > 0.1) & (shares < 0.9)) > WIDTH // 2
    assert np.all(np.abs(shares * 6 - np.round(shares * 6)) < 1e-4)


def test_every_part_of_the_model_draws_in_every_micro_batch():
    """The embeddings, and in each block the shares of attention, its output and the feed-forward network."""
    engine = make_engine(config=WITH_DROPOUT, micro_batch_size=1, optimizer=keras.optimizers.SGD(0.0))
    seeds = [v for name, v in engine.training_state().items() if name.startswith("dropout_seed/")]
    assert len(seeds) == 1 + 3 * CONFIG.num_hidden_layers
    start = [np.array(seed.numpy()) for seed in seeds]
    batch = {name: np.repeat(values[:1], 2, axis=0) for name, values in packed_and_unpacked()[0].items()}
    sums = [float(engine.gradients(batch)[1]["mlm_loss"]) for _ in range(2)]
    assert abs(sums[0] - sums[1]) > 1e-3
    for seed, first in zip(seeds, start, strict=True):
        assert seed.numpy().tolist() == [first[0], first[1] + 4]


@pytest.mark.usefixtures("uncompiled")
def test_micro_batches_that_are_skipped_move_the_seeds_too():
    """A batch that grows draws, at any step, what it would if all of its micro-batches were computed."""
    batch = {name: np.repeat(values[:1], 3, axis=0) for name, values in packed_and_unpacked()[0].items()}
    for values in batch.values():
        values[1:] = 0  # two of three micro-batches are empty
    moved = []
    for skips_empty in (False, True):
        objective = dataclasses.replace(pretraining_objective("per_token"), skips_empty=skips_empty)
        model = objective.build_model(WITH_DROPOUT, 1)
        engine = engines.make_engine(model, objective, keras.optimizers.SGD(0.0), micro_batch_size=1)
        engine.train_step(batch)
        state = engine.training_state().items()
        moved.append({name: v.numpy().tolist() for name, v in state if name.startswith("dropout_seed/")})
    assert moved[0] == moved[1] and len(moved[0]) > 1


def test_evaluation_drops_nothing_and_moves_no_seed():
    """Its sums are those of the same weights in a model without dropout."""
    packed, _ = packed_and_unpacked()
    configs = (dataclasses.replace(config, num_hidden_layers=1) for config in (WITH_DROPOUT, CONFIG))
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
    # and in training they are others: the comparison is of something
    assert abs(float(engine.gradients(packed)[1]["mlm_loss"]) - want["mlm_loss"]) > 1e-2
