"""Losses, figures and gradients by the logits equal a plain loop's, in both engines and micro-batches."""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import next_tokens
import numpy as np
import plain_losses
import pytest
from finetuning_batches import packed_and_unpacked as finetuning_batches
from keras import ops
from packs import VOCAB_SIZE, packed_and_unpacked
from scipy.special import log_softmax, softmax
from tiny import to_floats

from bert_packed.objectives.objective import Objective, add_sums, nll_and_right
from bert_packed.objectives.pretraining import (
    masked_lm_objective,
    next_token_objective,
    prediction_weights,
    pretraining_objective,
)
from bert_packed.tasks.classify.losses import classes_objective, numbers_objective, several_objective
from bert_packed.tasks.ner.task import tags_objective
from bert_packed.tasks.squad.task import answers_objective
from bert_packed.training import engines
from bert_packed.training.backend import gradient

pytestmark = pytest.mark.both_backends


class Kind(NamedTuple):
    """An objective, and the loop of `plain_losses` that it must equal."""

    objective: Objective
    plain: Callable
    options: tuple = ()  # of the loop
    batches: Callable = finetuning_batches
    labels: str = "labels"  # the array of the batch that has them


KINDS = {
    "answers": Kind(answers_objective(), plain_losses.answers),
    "classes": Kind(classes_objective(3), plain_losses.classes),
    "weighted": Kind(classes_objective(3, np.float32([0.5, 2, 1])), plain_losses.classes, ([0.5, 2, 1],)),
    "several": Kind(several_objective(3), plain_losses.several, labels="bits"),
    "numbers": Kind(numbers_objective(), plain_losses.numbers, labels="scores"),
}
for weighting in ("per_sequence", "per_token"):
    mlm_nsp, mlm, tokens = (
        objective_of(weighting)
        for objective_of in (pretraining_objective, masked_lm_objective, next_token_objective)
    )
    of_tokens = next_tokens.packed_and_unpacked
    KINDS |= {
        weighting: Kind(mlm_nsp, plain_losses.pretraining, (weighting,), packed_and_unpacked),
        f"mlm alone {weighting}": Kind(mlm, plain_losses.masked_lm, (weighting,), packed_and_unpacked),
        f"tags {weighting}": Kind(tags_objective(3, weighting), plain_losses.tags, (weighting,)),
        f"next tokens {weighting}": Kind(tokens, plain_losses.next_tokens, (weighting,), of_tokens),
    }
COMPILED = ("per_sequence", "answers", "tags per_sequence", "next tokens per_token")
LAST_AXES = {"mlm_logits": (VOCAB_SIZE,), "nsp_logits": (2,), "start_logits": (), "end_logits": ()}


def batch_of(kind):
    """Eight packs of one to four sequences, the last three of them empty."""
    batch = KINDS[kind].batches()[0]
    if "labels" in batch:
        batch = {**batch, "labels": batch[KINDS[kind].labels]}
    batch = {name: np.concatenate([values, np.zeros_like(values[:3])]) for name, values in batch.items()}
    assert sorted(batch["sequence_ids"].max(axis=1).tolist()) == [0, 0, 0, 1, 1, 2, 3, 4]
    return {**batch, "rows": np.arange(8, dtype=np.int32)[:, None]}


def logits_of(kind, batch):
    """Random logits for a batch, also where nothing is to be learnt."""
    rng, objective, found = np.random.default_rng(3), KINDS[kind].objective, {}
    for name, letter in objective.outputs.items():
        like = {"S": "token_ids", "P": "prediction_ids", "K": "slot_weights"}[letter]
        last = LAST_AXES.get(name, (objective.num_outputs or VOCAB_SIZE,))
        found[name] = (3 * rng.normal(size=(*batch[like].shape, *last))).astype(np.float32)
    for name, labels in (("mlm_logits", "prediction"), ("logits", "label")):
        if name in found and f"{labels}_ids" in batch:  # some are right, or accuracies would be compared at 0
            for row, place in np.argwhere(batch[f"{labels}_sequences"] > 0)[::3]:
                found[name][row, place, batch[f"{labels}_ids"][row, place]] = 20
    return found


def plain_of(kind, logits, batch):
    return KINDS[kind].plain(logits, batch, *KINDS[kind].options)


class Logits(keras.Model):
    """A model whose weights are its outputs: their gradient is the loss's by the logits, row by row.

    Batches tell by `rows`, int32 `[B, 1]`, which rows they are. In training it doubles its logits, so that a
    step that evaluates in training mode, or trains without, shows.
    """

    def __init__(self, values):
        super().__init__(name="logits")
        self.tables = {
            name: self.add_weight(shape=v.shape, initializer=keras.initializers.Constant(v), name=name)
            for name, v in values.items()
        }
        self.built = True

    def call(self, batch, training=None):
        scale = 2.0 if training else 1.0
        rows = batch["rows"][:, 0]
        return {name: scale * ops.take(table, rows, axis=0) for name, table in self.tables.items()}


def engine_of(kind, logits, **more):
    return engines.make_engine(Logits(logits), KINDS[kind].objective, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_the_logits(kind):
    """They are of the whole step's loss: the denominators are those of all micro-batches."""
    batch = batch_of(kind)
    logits = logits_of(kind, batch)
    engine = engine_of(kind, logits, micro_batch_size=2)
    for training, scale in ((False, 1), (True, 2)):
        want = plain_of(kind, {name: scale * values for name, values in logits.items()}, batch)
        gradients, sums = engine.gradients(batch, training=training)
        assert to_floats(sums) == pytest.approx(want.sums, rel=1e-5)
        for variable, found in zip(engine.model.trainable_variables, gradients, strict=True):
            expected = scale * want.gradients[variable.path.split("/")[-1]]
            largest = np.abs(expected).max()
            assert np.abs(np.asarray(found) - expected).max() <= 1e-5 * largest, variable.path
            unused = batch["sequence_ids"] == 0 if kind == "answers" else expected == 0
            assert unused.any() and np.all(np.asarray(found)[unused] == 0)


@pytest.mark.parametrize("kind", COMPILED)
def test_a_step_goes_down_that_gradient(kind):
    """The compiled programs: the step's update, and the sums and figures of both."""
    batch = batch_of(kind)
    logits = logits_of(kind, batch)
    engine = engine_of(kind, logits, optimizer=keras.optimizers.SGD(1.0))
    evaluated, want = to_floats(engine.eval_step(batch)), plain_of(kind, logits, batch)
    assert evaluated == pytest.approx(want.sums, rel=1e-5)
    assert engine.objective.means(evaluated) == pytest.approx(want.means, rel=1e-5)
    want = plain_of(kind, {name: 2 * values for name, values in logits.items()}, batch)
    sums = to_floats(engine.train_step(batch))
    assert {name: sums[name] for name in want.sums} == pytest.approx(want.sums, rel=1e-5)
    for variable in engine.model.trainable_variables:
        name = variable.path.split("/")[-1]
        step = 2 * want.gradients[name]
        np.testing.assert_allclose(logits[name] - variable.numpy(), step, atol=3e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_batches_are_those_of_all_sequences(kind):
    """Added up over unequal parts: a mean over parts would differ."""
    batch = batch_of(kind)
    logits = logits_of(kind, batch)
    objective = KINDS[kind].objective
    total, parts = {}, []
    for part in (slice(0, 1), slice(1, 5)):
        cut = [{name: values[part] for name, values in side.items()} for side in (logits, batch)]
        sums = to_floats(objective.sums(*cut))
        total = add_sums(total, sums)
        parts.append(objective.means(sums))
    want = plain_of(kind, logits, batch).means
    assert objective.means(total) == pytest.approx(want, rel=1e-5)
    assert all(abs((parts[0][name] + parts[1][name]) / 2 - value) > 1e-4 for name, value in want.items())


@pytest.mark.parametrize("kind", KINDS)
def test_padding_alone_teaches_nothing(kind):
    """No mean is one of nothing: a step of empty packs, and an evaluation of none."""
    batch = batch_of(kind)
    empty = {name: np.zeros_like(values) for name, values in batch.items()} | {"rows": batch["rows"]}
    engine = engine_of(kind, logits_of(kind, batch))
    gradients, sums = engine.gradients(empty, training=True)
    assert set(to_floats(sums).values()) == {0.0}
    assert all(np.all(np.asarray(values) == 0) for values in gradients)
    for nothing in (to_floats(sums), {}):
        means = engine.objective.means(nothing)
        assert set(means) == set(engine.objective.figures)
        # A perplexity of 1 would be the best
        assert {name for name, value in means.items() if np.isnan(value)} == {*engine.objective.perplexities}
        assert {value for value in means.values() if not np.isnan(value)} == {0.0}


def test_weights_of_listing_1():
    """The first slot has the same weights as the last."""
    sequences = np.array([[1, 1, 1, 2, 0], [1, 2, 2, 2, 2]], np.float32)
    per_sequence = prediction_weights(sequences, 2, "per_sequence")
    thirds, quarters = [1 / 3, 1 / 3, 1 / 3, 1, 0], [1, 1 / 4, 1 / 4, 1 / 4, 1 / 4]
    np.testing.assert_allclose(per_sequence, [thirds, quarters], rtol=1e-6)
    np.testing.assert_array_equal(prediction_weights(sequences, 2, "per_token"), sequences > 0)


def test_nll_is_that_of_a_softmax_and_so_is_its_gradient():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 5, 7)).astype(np.float32)
    logits[0, 0] += 1e4  # exp of it is no float32
    logits[0, 1, 3] = 1e4
    logits[1, 4] = [1000, *[988] * 6]  # a likelihood so near 1 that log(sum) + 1000 would round it away
    labels = rng.integers(0, 7, (2, 5))
    labels[0, 2], labels[0, 3], labels[1, 4] = logits[0, 2].argmax(), logits[0, 3].argmin(), 0
    nll, right = nll_and_right(ops.convert_to_tensor(logits), labels)
    one_hot = np.eye(7)[labels]
    want = -np.sum(log_softmax(logits.astype(np.float64), axis=-1) * one_hot, axis=-1)
    np.testing.assert_allclose(nll, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(right, logits.argmax(-1) == labels)
    assert right[0, 2] == 1
    assert right[0, 3] == 0
    found = gradient(lambda values: ops.sum(nll_and_right(values, labels)[0]))(ops.convert_to_tensor(logits))
    want = softmax(logits.astype(np.float64), axis=-1) - one_hot
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)


def test_of_equal_logits_each_is_right():
    _, right = nll_and_right(ops.convert_to_tensor(np.float32([[2, 2, 1], [2, 2, 1]])), np.array([1, 2]))
    np.testing.assert_array_equal(right, [1, 0])


def test_a_sequence_without_weight_counts_nowhere():
    batch = next_tokens.packed_and_unpacked()[0]
    logits = np.random.default_rng(3).normal(size=(5, 12, VOCAB_SIZE)).astype(np.float32)
    left_out = {**batch, "slot_weights": batch["slot_weights"].copy()}
    left_out["slot_weights"][0, 0] = 0  # five tokens, four predictions, 15 bytes
    sums = next_token_objective("per_sequence").sums({"logits": logits}, left_out)
    without = {**left_out, "label_sequences": left_out["label_sequences"].copy()}
    without["label_sequences"][0, :4] = 0
    want = plain_losses.next_tokens({"logits": logits}, without, "per_sequence").sums
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(want, rel=1e-5)


def test_a_perplexity_too_large_for_a_float_is_infinite():
    objective = next_token_objective("per_token")
    sums = {**dict.fromkeys(objective.sum_names, 1.0), "lm_nll": 1e4}
    assert objective.means(sums)["perplexity"] == math.inf
