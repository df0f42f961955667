"""Next-token prediction: tokens of a batch that count, and the operations of a step, weight by weight."""

import math

import numpy as np
import plain_losses
import pytest
from next_tokens import CONFIG, MAMBA2, VOCAB_SIZE, batch_of, packed_and_unpacked, random_packs

from bert_packed.architectures.packed_model import build_model
from bert_packed.objectives.pretraining import next_token_counts, next_token_objective
from bert_packed.schema import CAUSAL_LM


@pytest.fixture
def batch():
    return batch_of(random_packs(), 12, 4)


def test_packing_adds_nothing():
    found = [next_token_counts(batch) for batch in packed_and_unpacked()]
    got, want = ({name: float(value) for name, value in counts.items()} for counts in found)
    assert {**got, "num_bytes": 0} == {**want, "num_bytes": 0} and got["num_predictions"] == 48 - 11


def test_a_sequence_without_weight_counts_nowhere(batch):
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
