"""Losses: the weights of Listing 1, sums against a plain loop, and the averages that would be wrong."""

import functools

import numpy as np
import pytest
from keras import ops
from packs import packed_and_unpacked
from scipy.special import log_softmax, softmax

from bert_packed.objectives.objective import add_sums, nll_and_right
from bert_packed.objectives.pretraining import prediction_weights, pretraining_objective, pretraining_sums
from bert_packed.training.backend import gradient

pytestmark = pytest.mark.both_backends


@pytest.fixture(scope="module")
def packed():
    return packed_and_unpacked()[0]


@pytest.fixture(scope="module")
def outputs(packed):
    rng = np.random.default_rng(5)
    return {
        "mlm_logits": rng.normal(size=(*packed["prediction_ids"].shape, 31)).astype(np.float32),
        "nsp_logits": rng.normal(size=(*packed["nsp_labels"].shape, 2)).astype(np.float32),
    }


def sequence_losses(outputs, batch):
    """Mean loss, accuracy and next-sentence loss of each sequence, one after the other."""
    found = []
    for row in range(len(batch["slot_weights"])):
        for slot in range(int(batch["sequence_ids"][row].max())):
            mine = np.flatnonzero(batch["prediction_sequences"][row] == slot + 1)
            logits, labels = outputs["mlm_logits"][row, mine], batch["prediction_ids"][row, mine]
            nll = -log_softmax(logits, axis=-1)[np.arange(len(mine)), labels]
            right = logits.argmax(-1) == labels
            nsp = -log_softmax(outputs["nsp_logits"][row, slot])[batch["nsp_labels"][row, slot]]
            found.append((nll, right, nsp))
    return found


def test_weights_of_listing_1():
    """Of the first slot as of the last."""
    sequences = np.array([[1, 1, 1, 2, 0], [1, 2, 2, 2, 2]], np.float32)
    per_sequence = prediction_weights(sequences, 2, "per_sequence")
    thirds, quarters = [1 / 3, 1 / 3, 1 / 3, 1, 0], [1, 1 / 4, 1 / 4, 1 / 4, 1 / 4]
    np.testing.assert_allclose(per_sequence, [thirds, quarters], rtol=1e-6)
    np.testing.assert_array_equal(prediction_weights(sequences, 2, "per_token"), sequences > 0)


@pytest.mark.parametrize("mlm_loss", ["per_sequence", "per_token"])
def test_sums_equal_a_plain_loop(packed, outputs, mlm_loss):
    sums = {name: float(value) for name, value in pretraining_sums(outputs, packed, mlm_loss).items()}
    sequences = sequence_losses(outputs, packed)
    reduce = np.mean if mlm_loss == "per_sequence" else np.sum
    with_predictions = [(nll, right) for nll, right, _ in sequences if len(nll)]
    assert sums["mlm_loss"] == pytest.approx(sum(reduce(nll) for nll, _ in with_predictions), rel=1e-5)
    assert sums["nsp_loss"] == pytest.approx(sum(nsp for _, _, nsp in sequences), rel=1e-5)
    assert sums["mlm_correct"] == sum(right.sum() for _, right in with_predictions)
    assert sums["mlm_sequence_accuracy"] == pytest.approx(sum(right.mean() for _, right in with_predictions))
    assert sums["num_predictions"] == sum(len(nll) for nll, _ in with_predictions)
    assert sums["num_predicted_sequences"] == pytest.approx(len(with_predictions))
    assert sums["num_sequences"] == len(sequences) == 11
    assert sums["num_tokens"] == np.count_nonzero(packed["sequence_ids"])


@pytest.mark.parametrize("mlm_loss", ["per_sequence", "per_token"])
def test_means_and_the_minimised_loss_equal_a_plain_loop(packed, outputs, mlm_loss):
    objective = pretraining_objective(mlm_loss)
    # Random logits are hardly ever right: of half of the classes the label's is made the largest
    is_label = np.arange(31) == packed["prediction_ids"][..., None]
    lift = 9.0 * is_label * (packed["prediction_ids"] % 2)[..., None]
    outputs = {**outputs, "mlm_logits": outputs["mlm_logits"] + lift.astype(np.float32)}
    sums = objective.sums(outputs, packed)
    sequences = sequence_losses(outputs, packed)
    predicted = [(nll, right) for nll, right, _ in sequences if len(nll)]
    nll, right = (np.concatenate(parts) for parts in zip(*predicted, strict=True))
    per_sequence = sum(own.mean() for own, _ in predicted) / len(sequences)
    want = {
        "mlm_loss": nll.mean() if mlm_loss == "per_token" else per_sequence,
        "nsp_loss": np.mean([nsp for _, _, nsp in sequences]),
        "mlm_accuracy": np.mean([own.mean() for _, own in predicted]),
        "mlm_token_accuracy": right.mean(),
    }
    want["loss"] = want["mlm_loss"] + want["nsp_loss"]
    means = objective.means({name: float(value) for name, value in sums.items()})
    assert {name: means[name] for name in want} == pytest.approx(want, rel=1e-5)
    minimised = objective.loss(sums, objective.denominators(objective.counts(packed)))
    assert float(minimised) == pytest.approx(want["loss"], rel=1e-5)
    assert abs(nll.mean() - per_sequence) > 1e-2 and 0.2 < want["mlm_accuracy"] < 0.8


def test_a_sequence_without_predictions_adds_zero_but_counts(packed, outputs):
    sums = {name: float(value) for name, value in pretraining_sums(outputs, packed, "per_sequence").items()}
    assert sums["num_predicted_sequences"] == pytest.approx(10) and sums["num_sequences"] == 11
    assert pretraining_objective("per_sequence").means(sums)["mlm_loss"] == pytest.approx(
        sums["mlm_loss"] / 11
    )


def test_other_averages_are_others(packed, outputs):
    """Per-pack, per-slot and per-micro-batch means differ here: the equality tests could catch them."""
    sequences = sequence_losses(outputs, packed)
    exact = np.sum([nll.mean() for nll, _, _ in sequences if len(nll)]) / len(sequences)
    sums = pretraining_sums(outputs, packed, "per_sequence")
    objective = pretraining_objective("per_sequence")
    ours = float(sums["mlm_loss"]) / float(objective.denominators(objective.counts(packed))["mlm_loss"])
    assert ours == pytest.approx(exact, rel=1e-5)

    rows = [{name: values[i : i + 1] for name, values in packed.items()} for i in range(5)]
    logits = [{name: values[i : i + 1] for name, values in outputs.items()} for i in range(5)]
    per_pack = []
    for row, row_logits in zip(rows, logits, strict=True):
        row_sums = pretraining_sums(row_logits, row, "per_sequence")
        per_pack.append(float(row_sums["mlm_loss"]) / float(row_sums["num_sequences"]))
    assert abs(np.mean(per_pack) - exact) > 1e-3


@pytest.mark.parametrize("mlm_loss", ["per_sequence", "per_token"])
def test_sums_add_up_over_micro_batches(packed, outputs, mlm_loss):
    sums = functools.partial(pretraining_sums, mlm_loss=mlm_loss)
    total = {}
    for part in (slice(0, 2), slice(2, 5)):
        cut = [{name: values[part] for name, values in side.items()} for side in (outputs, packed)]
        total = add_sums(total, sums(*cut))
    whole = {name: float(value) for name, value in sums(outputs, packed).items()}
    assert total == pytest.approx(whole, rel=1e-5)
    means = pretraining_objective(mlm_loss).means
    assert means(total) == pytest.approx(means(whole), rel=1e-5)


def test_means_of_nothing_are_zero():
    objective = pretraining_objective("per_token")
    assert set(objective.means(dict.fromkeys(objective.sum_names, 0.0)).values()) == {0.0}


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
