"""Packed Mambas: padding anywhere, ablations, states handed on from pack to pack, and counted operations."""

import dataclasses
import math

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from keras import ops
from next_tokens import CONFIG, MAMBA2, batch_of, packed_and_unpacked, random_packs

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import ablate
from bert_packed.objectives.pretraining import next_token_objective
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.backend import gradient

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
MAMBAS = ["mamba", "mamba2"]


def encoded(model, batch):
    return np.asarray(model.encode(batch))


@pytest.mark.parametrize("name", MAMBAS)
def test_an_ablated_mamba_takes_a_pack_for_one_sequence(name):
    batch = packed_and_unpacked()[0]
    one = {**batch, "position_ids": np.tile(np.arange(12, dtype=np.int32), (5, 1))}
    sound = ARCHITECTURES[name].model()
    config = ablate(sound.config, "no_position_reset")
    broken = dataclasses.replace(ARCHITECTURES[name], config=config).model()
    found, want, apart = (encoded(*of) for of in ((broken, batch), (sound, one), (sound, batch)))
    np.testing.assert_allclose(found, want, atol=1e-6)
    assert np.abs(found - apart).max() > 1e-3


def cut(batch, side):
    """The tokens of a part of every pack."""
    return {name: batch[name][:, side] for name in ("token_ids", "sequence_ids", "position_ids")}


@pytest.mark.parametrize("name", MAMBAS)
def test_rows_go_on_from_pack_to_pack(name):
    """Cut every 6 tokens, states handed on: hidden states of whole sequences, in each micro-batch."""
    whole = batch_of(random_packs([[9, 3, 6], [18], [2, 16], [7, 11]]), 18, 3)
    want = encoded(ARCHITECTURES[name].model(), whole)
    model, found = ARCHITECTURES[name].model(num_rows=4), np.zeros_like(want)
    for _ in range(2):  # the second time the rows start with what the first has left, which must not count
        found[:] = 0
        for start in range(0, 18, 6):
            for rows in (slice(0, 2), slice(2, 4)):  # two micro-batches of a step
                part = cut({key: values[rows] for key, values in whole.items()}, slice(start, start + 6))
                found[rows, start : start + 6] = np.asarray(model.encode(part, training=True))
        np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())
    # Evaluation hands on nothing
    carried = [np.array(queue.value) for of_block in model.backbone.carried for queue in of_block]
    assert all(np.abs(values).max() > 0 for values in carried)
    part = cut({key: values[:2] for key, values in whole.items()}, slice(6, 12))
    once, again = (np.asarray(model.encode(part, training=False)) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    after = [np.array(queue.value) for of_block in model.backbone.carried for queue in of_block]
    for one, other in zip(carried, after, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", MAMBAS)
def test_no_gradient_crosses_a_cut(name):
    """States handed on are numbers: no loss moves the weights by way of an earlier pack."""
    model = ARCHITECTURES[name].model(num_rows=1)
    whole = batch_of(random_packs([[12]]), 12, 1)
    first, second = cut(whole, slice(6)), cut(whole, slice(6, 12))

    def target(hidden_BSD):
        model.backbone.run_blocks(hidden_BSD, first["position_ids"], training=True)
        after = model.backbone.run_blocks(model.embed(second), second["position_ids"], training=True)
        return ops.sum(ops.square(after))

    def stateless(hidden_BSD):
        mapping = [(variable, variable.value) for variable in model.variables]
        with keras.StatelessScope(state_mapping=mapping):
            return target(hidden_BSD)

    target_of_backend = stateless if keras.backend.backend() == "jax" else target
    assert np.all(np.asarray(gradient(target_of_backend)(model.embed(first))) == 0)


@pytest.mark.parametrize("name", MAMBAS)
def test_padding_may_stand_anywhere_in_a_mamba(name):
    batch = packed_and_unpacked([[5, 1, 2], [3, 3]])[0]
    moved = {name: values.copy() for name, values in batch.items()}
    order = np.array([8, 9, 0, 1, 2, 3, 4, 10, 5, 6, 7, 11])  # padding first, between and last
    for key in ("token_ids", "sequence_ids", "position_ids"):
        moved[key][0] = batch[key][0, order]
    model = ARCHITECTURES[name].model()
    found = [encoded(model, one) for one in (batch, moved)]
    np.testing.assert_allclose(found[1][0][2:11][[0, 1, 2, 3, 4, 6, 7, 8]], found[0][0][:8], atol=1e-5)
    junk = {**batch, "token_ids": np.where(batch["sequence_ids"] > 0, batch["token_ids"], 9)}
    real = batch["sequence_ids"] > 0
    np.testing.assert_array_equal(encoded(model, junk)[real], found[0][real])


@pytest.mark.parametrize("name", MAMBAS)
def test_a_pack_that_is_not_finite_hands_on_zeros(name):
    """Only its own row is affected: the step is skipped, and those after it go on."""
    whole = batch_of(random_packs([[12], [12]]), 12, 1)
    whole["token_ids"][:] = np.where(whole["token_ids"] == 30, 29, whole["token_ids"])
    first, second = cut(whole, slice(6)), cut(whole, slice(6, 12))
    first["token_ids"][0, 5] = 30  # the last token alone reaches the tail as well as the states
    model = ARCHITECTURES[name].model(num_rows=2)
    want = encoded(ARCHITECTURES[name].model(), whole)[1, 6:]
    table = model.backbone.embeddings_VD
    sound = table.numpy()
    table.assign(np.where(np.arange(31)[:, None] == 30, np.nan, sound))
    model.encode(first, training=True)
    table.assign(sound)
    for queue in (queue for of_block in model.backbone.carried for queue in of_block):
        bad, good = queue.numpy()
        assert not bad.any() and good.any() and np.all(np.isfinite(good))
    found = np.asarray(model.encode(second, training=True))
    assert np.all(np.isfinite(found[0]))
    np.testing.assert_allclose(found[1], want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("config", "per_state"), [(CONFIG, 7 + 14), (MAMBA2, 5 + 11)])
def test_operations_are_counted_weight_by_weight(config, per_state):
    """Those of a state are counted by hand, forward and backward; the comments in `count_flops` name them."""
    weights = build_model(CAUSAL_LM, config, 0).trainable_weights
    sizes = {weight.path.split("/", 1)[1]: math.prod(weight.shape) for weight in weights}
    kernels = sum(size for name, size in sizes.items() if name.endswith("kernel"))  # the convolution's too
    states = config.num_hidden_layers * config.inner_size * config.state_size
    a_token = 6 * kernels + per_state * states
    count_flops = next_token_objective("per_token").model_flops
    assert count_flops(config, {"num_tokens": 1, "num_predictions": 0}) == a_token
    a_prediction = count_flops(config, {"num_tokens": 0, "num_predictions": 1})
    assert a_prediction == 6 * sizes["backbone/embeddings"]
