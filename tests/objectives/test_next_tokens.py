"""Next-token losses and perplexities against a plain loop over sequences, and what of a batch counts.

Legend: B packs per batch, S pack length, V vocabulary.
"""

import math

import numpy as np
import pytest
from keras import ops
from next_tokens import CONFIG, MAMBA2, VOCAB_SIZE, batch_of, packed_and_unpacked, random_packs

from bert_packed.architectures.packed_model import build_model
from bert_packed.objectives.next_tokens import next_token_counts, next_token_objective
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.backend import gradient

WEIGHTINGS = ("per_token", "per_sequence")
PACKS = random_packs()


@pytest.fixture
def batch():
    return batch_of(PACKS, 12, 4)


def logits_for(batch, seed=3):
    return np.random.default_rng(seed).normal(size=(*batch["token_ids"].shape, VOCAB_SIZE)).astype(np.float32)


def plain_losses(logits):
    """For every sequence the list of -log p(next token), at its place in the pack; in float64."""
    found = []
    for pack, rows in zip(PACKS, logits.astype(float), strict=True):
        start = 0
        for tokens in pack:
            losses = []
            for offset, following in enumerate(tokens[1:]):
                row = rows[start + offset]
                losses.append(-(row[following] - math.log(np.sum(np.exp(row)))))
            found.append(losses)
            start += len(tokens)
    return found


def to_floats(sums):
    return {name: float(value) for name, value in sums.items()}


@pytest.mark.both_backends
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_figures_are_those_of_a_plain_loop(batch, weighting):
    objective, logits = next_token_objective(weighting), logits_for(batch)
    sums = to_floats(objective.sums({"logits": logits}, batch))
    losses = plain_losses(logits)
    means = [np.mean(one) for one in losses if one]
    total, num_predictions = sum(map(sum, losses)), sum(map(len, losses))
    num_bytes = sum(3 * len(tokens) + slot for pack in PACKS for slot, tokens in enumerate(pack))
    assert len(means) < len(losses) == 11  # single tokens predict nothing, and count as sequences
    found = objective.means(sums)
    want = {"per_token": total / num_predictions, "per_sequence": sum(means) / len(losses)}[weighting]
    assert found["loss"] == found["lm_loss"] == pytest.approx(want, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / num_predictions), rel=1e-5)
    assert found["sequence_perplexity"] == pytest.approx(math.exp(np.mean(means)), rel=1e-5)
    assert found["byte_perplexity"] == pytest.approx(math.exp(total / num_bytes), rel=1e-5)
    assert sums["num_predictions"] == num_predictions and sums["num_predicted_sequences"] == len(means)
    assert sums["num_sequences"] == 11 and sums["num_tokens"] == sum(
        len(tokens) for pack in PACKS for tokens in pack
    )
    assert set(sums) == set(objective.sum_names)
    best = np.zeros_like(logits)
    np.put_along_axis(best, batch["label_ids"][..., None], 1.0, axis=-1)
    right = objective.means(to_floats(objective.sums({"logits": best}, batch)))
    wrong = objective.means(to_floats(objective.sums({"logits": -best}, batch)))
    assert right["lm_accuracy"] == 1 and wrong["lm_accuracy"] == 0


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_each_prediction_weighs_as_it_should(batch, weighting):
    """Gradient of the loss by each logit: (softmax - label) times a weight written out here."""
    objective, logits = next_token_objective(weighting), logits_for(batch)
    denominators = objective.denominators(objective.counts(batch))
    got = gradient(lambda x: objective.loss(objective.sums({"logits": x}, batch), denominators))
    got = np.asarray(got(ops.convert_to_tensor(logits)))
    wide = np.exp(logits.astype(float))
    want = wide / wide.sum(axis=-1, keepdims=True) - np.eye(VOCAB_SIZE)[batch["label_ids"]]
    num_predictions = np.count_nonzero(batch["label_sequences"])
    for row, pack in enumerate(PACKS):
        start = 0
        for tokens in pack:
            weight = 1 / num_predictions if weighting == "per_token" else 1 / 11 / max(len(tokens) - 1, 1)
            want[row, start : start + len(tokens) - 1] *= weight
            want[row, start + len(tokens) - 1] = 0  # the last predicts nothing
            start += len(tokens)
        want[row, start:] = 0
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_packing_adds_nothing():
    packed, unpacked = packed_and_unpacked()
    got, want = (to_floats(next_token_counts(one)) for one in (packed, unpacked))
    assert {**got, "num_bytes": 0} == {**want, "num_bytes": 0} and got["num_predictions"] == 48 - 11


def test_a_sequence_without_weight_counts_nowhere(batch):
    objective, logits = next_token_objective("per_sequence"), logits_for(batch)
    before = to_floats(objective.sums({"logits": logits}, batch))
    left_out = {**batch, "slot_weights": batch["slot_weights"].copy()}
    left_out["slot_weights"][0, 0] = 0  # five tokens, four predictions, 15 bytes
    after = to_floats(objective.sums({"logits": logits}, left_out))
    losses = plain_losses(logits)[0]
    gone = {"lm_nll": sum(losses), "lm_sequence_nll": np.mean(losses), "num_predictions": 4, "num_bytes": 15}
    gone |= {"num_sequences": 1, "num_predicted_sequences": 1}
    for name, value in gone.items():
        assert before[name] - after[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_padding_alone_teaches_nothing(batch, weighting):
    """Perplexities of nothing are NaN: 1 would be the best."""
    objective = next_token_objective(weighting)
    empty = {name: np.zeros_like(values) for name, values in batch.items()}
    denominators = objective.denominators(objective.counts(empty))
    found = gradient(lambda x: objective.loss(objective.sums({"logits": x}, empty), denominators))
    assert np.all(np.asarray(found(ops.convert_to_tensor(logits_for(batch)))) == 0)
    sums = to_floats(objective.sums({"logits": logits_for(batch)}, empty))
    assert set(sums.values()) == {0.0}
    for nothing in (sums, {}):
        means = objective.means(nothing)
        assert {name for name, value in means.items() if math.isnan(value)} == set(objective.perplexities)
        assert {value for value in means.values() if not math.isnan(value)} == {0.0}


def test_a_perplexity_too_large_for_a_float_is_infinite():
    objective = next_token_objective("per_token")
    sums = {**dict.fromkeys(objective.sum_names, 1.0), "lm_nll": 1e4}
    assert objective.means(sums)["perplexity"] == math.inf


class Counted(float):
    """A number that counts what is done to numbers of its kind."""

    done = 0

    def __add__(self, other):
        Counted.done += 1
        return Counted(float(self) + float(other))

    def __mul__(self, other):
        Counted.done += 1
        return Counted(float(self) * float(other))

    def exp(self):
        Counted.done += 1
        return Counted(math.exp(float(self)))


def mamba_state():
    """Of one state for one token, in a plain scan forward and back; sums go on from what was there before."""
    size, a, x, b, c, state, y, dy, later, dx, dsize, da, db, dc = map(Counted, range(14))
    decay = (size * a).exp()
    kept = decay * state
    state = kept + x * b
    y += c * state
    gradient = later + dy * c
    exponent = gradient * kept
    dx, dsize, da = dx + gradient * b, dsize + exponent * a, da + exponent * size
    db, dc = db + gradient * x, dc + dy * state
    return state, y, dx, dsize, da, db, dc, gradient * decay


def mamba2_state():
    """As of a Mamba; but all states of a head share the decay."""
    decay, x, b, c, state, y, dy, later, dx, ddecay, db, dc = map(Counted, range(12))
    before, state = state, decay * state + x * b
    y += c * state
    gradient = later + dy * c
    dx, ddecay = dx + gradient * b, ddecay + gradient * before
    db, dc = db + gradient * x, dc + dy * state
    return state, y, dx, ddecay, db, dc, gradient * decay


@pytest.mark.parametrize("config", [CONFIG, MAMBA2], ids=["mamba", "mamba2"])
def test_operations_are_counted_weight_by_weight(config):
    weights = build_model(CAUSAL_LM, config, 0).trainable_weights
    sizes = {weight.path.split("/", 1)[1]: math.prod(weight.shape) for weight in weights}
    kernels = sum(size for name, size in sizes.items() if name.endswith("kernel"))  # the convolution's too
    Counted.done = 0
    assert all(isinstance(one, Counted) for one in (mamba_state if config == CONFIG else mamba2_state)())
    states = config.num_hidden_layers * config.inner_size * config.state_size
    a_token = 6 * kernels + Counted.done * states
    count_flops = next_token_objective("per_token").model_flops
    assert count_flops(config, {"num_tokens": 1, "num_predictions": 0}) == a_token
    a_prediction = count_flops(config, {"num_tokens": 0, "num_predictions": 1})
    assert a_prediction == 6 * sizes["backbone/embeddings"]


def test_objective_names_what_the_model_gives(batch):
    outputs = build_model(CAUSAL_LM, CONFIG, 0)(batch)
    assert outputs.keys() == next_token_objective("per_token").outputs.keys() == {"logits"}
    assert outputs["logits"].shape == (5, 12, VOCAB_SIZE)
