"""Packing is invisible in every architecture: losses and gradients equal those of unpacked sequences.

`test_numpy_models.py` compares the outputs with another implementation.
"""

import dataclasses

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from keras import ops
from next_tokens import batch_of, packed_and_unpacked, random_packs
from packs import VOCAB_SIZE
from tiny import to_floats

from bert_packed.config import ablate
from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training.backend import gradient

# `test_engine.py` compares compiled steps with these; here they would compile for longer than they run
pytestmark = pytest.mark.usefixtures("uncompiled")
MICRO_BATCHES = [1, pytest.param(5, marks=pytest.mark.both_backends), 10]
MAMBAS = ["mamba", "mamba2"]
OBJECTIVES = {
    "bert": [pretraining_objective("per_sequence"), pretraining_objective("per_token")],
    "modernbert": [ARCHITECTURES["modernbert"].objective],
    "mamba": [next_token_objective("per_sequence"), next_token_objective("per_token")],
    "mamba2": [next_token_objective("per_sequence")],
}


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return ARCHITECTURES[request.param]


@pytest.fixture(params=[(name, one) for name, of in OBJECTIVES.items() for one in range(len(of))], ids=str)
def weighted(request):
    name, number = request.param
    return dataclasses.replace(ARCHITECTURES[name], objective=OBJECTIVES[name][number])


def batches_of(architecture):
    packed, unpacked = architecture.batches()
    assert (packed["sequence_ids"].max(axis=1) > 1).sum() >= 3
    assert unpacked["sequence_ids"].max(axis=1).tolist() == [1] * 11
    if "sequence_bytes" in packed:  # which depend on the slot
        unpacked["sequence_bytes"][:, 0] = packed["sequence_bytes"][packed["slot_weights"] > 0]
    return packed, unpacked


def assert_gradients_equal(model, got, want):
    """Design decision 4: within 1e-5 of the tensor's largest gradient; key biases within 1e-6 of zero."""
    for variable, one, other in zip(model.trainable_variables, got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if variable.path.endswith("key/bias"):
            assert np.abs(one).max() <= 1e-6 and np.abs(other).max() <= 1e-6, variable.path
            continue
        scale = np.abs(other).max()
        assert scale > 0, f"{variable.path} has no gradient: the comparison would be empty"
        assert np.abs(one - other).max() <= 1e-5 * scale, variable.path


@pytest.mark.both_backends
def test_losses_figures_and_gradients(weighted):
    packed, unpacked = batches_of(weighted)
    engine = weighted.engine()
    sums = [to_floats(engine.eval_step(batch)) for batch in (packed, unpacked)]
    assert sums[0]["num_sequences"] == 11 and sums[0] == pytest.approx(sums[1], rel=1e-5)
    means = [weighted.objective.means(of) for of in sums]
    assert means[0] == pytest.approx(means[1], rel=1e-5)
    got, want = (engine.gradients(batch)[0] for batch in (packed, unpacked))
    assert_gradients_equal(engine.model, got, want)


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_neighbours_see_nothing(architecture, dtype):
    """New tokens in one sequence leave the others' hidden states untouched, bit for bit."""
    packed, _ = batches_of(architecture)
    model = architecture.model(dtype=dtype)
    before = encoded(model, packed)
    counts = packed["sequence_ids"].max(axis=1)
    crowded = np.flatnonzero(counts > 1)
    for row, slot in [*zip(crowded, counts[crowded], strict=True), (crowded[0], 1)]:
        mine = packed["sequence_ids"] == slot
        mine[np.arange(len(mine)) != row] = False
        tokens = np.where(mine, packed["token_ids"] % (VOCAB_SIZE - 1) + 1, packed["token_ids"])
        after = encoded(model, {**packed, "token_ids": tokens})
        assert np.array_equal(after[~mine], before[~mine])
        assert np.abs(after[mine] - before[mine]).max() > 1e-3


def encoded(model, batch):
    return np.asarray(ops.convert_to_numpy(ops.cast(model.encode(batch), "float32")))


@pytest.mark.both_backends
def test_the_gradient_across_sequences_is_exactly_zero(architecture):
    """Of one sequence's outputs by its neighbours' embeddings: 0, not small."""
    packed, _ = batches_of(architecture)
    model, ids = architecture.model(), packed["sequence_ids"]
    embedded = model.embed(packed)
    for row, slot in ((0, 3), (1, 2)):
        mine = np.zeros(ids.shape, np.float32)
        mine[row] = ids[row] == slot

        def target(hidden, mine=mine):
            hidden = model.encode_embedded(hidden, packed)
            # Weighted, since layer norm makes a plain sum of outputs constant
            weights = np.linspace(-1, 1, hidden.shape[-1], dtype=np.float32)
            return ops.sum(hidden * weights * mine[..., None])

        found = np.asarray(gradient(target)(embedded))
        assert np.abs(found[mine > 0]).max() > 1e-3
        assert np.all(found[mine == 0] == 0)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("micro_batch_size", MICRO_BATCHES)
def test_micro_batches_equal_one(number, micro_batch_size):
    bert = dataclasses.replace(ARCHITECTURES["bert"], objective=OBJECTIVES["bert"][number])
    packed, _ = batches_of(bert)
    doubled = {name: np.concatenate([values, values[::-1]]) for name, values in packed.items()}
    whole, parts = bert.engine(), bert.engine(micro_batch_size=micro_batch_size)
    want, want_sums = whole.gradients(doubled)
    got, got_sums = parts.gradients(doubled)
    assert_gradients_equal(whole.model, got, want)
    assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-5)


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_empty_packs_change_nothing(architecture, dtype):
    """Nor is there a NaN, in packs that end in padding or are nothing else."""
    packed, _ = batches_of(architecture)
    engine = architecture.engine({"dtype": dtype})
    filled = {name: np.concatenate([values, np.zeros_like(values)]) for name, values in packed.items()}
    with_empty, without = to_floats(engine.eval_step(filled)), to_floats(engine.eval_step(packed))
    assert with_empty == pytest.approx(without, rel=1e-6 if dtype == "float32" else 1e-3)
    nothing = {name: np.zeros_like(values) for name, values in packed.items()}
    gradients, sums = engine.gradients(nothing)
    assert float(sums["num_sequences"]) == 0
    assert all(np.all(np.asarray(values) == 0) for values in gradients)


@pytest.mark.both_backends
@pytest.mark.parametrize("name", MAMBAS)
def test_an_ablated_mamba_takes_a_pack_for_one_sequence(name):
    batch = batches_of(ARCHITECTURES[name])[0]
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


@pytest.mark.both_backends
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
    # In training alone
    carried = [np.array(queue.value) for of_block in model.backbone.carried for queue in of_block]
    assert all(np.abs(values).max() > 0 for values in carried)
    part = cut({key: values[:2] for key, values in whole.items()}, slice(6, 12))
    once, again = (np.asarray(model.encode(part, training=False)) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    after = [np.array(queue.value) for of_block in model.backbone.carried for queue in of_block]
    for one, other in zip(carried, after, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.both_backends
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


@pytest.mark.both_backends
@pytest.mark.parametrize("name", MAMBAS)
def test_padding_may_stand_anywhere_in_a_mamba(name):
    batch = packed_and_unpacked([[5, 1, 2], [3, 3]])[0]
    moved = {name: values.copy() for name, values in batch.items()}
    order = np.array([8, 9, 0, 1, 2, 3, 4, 10, 5, 6, 7, 11])  # padding first, between and last
    for name in ("token_ids", "sequence_ids", "position_ids"):
        moved[name][0] = batch[name][0, order]
    model = ARCHITECTURES[name].model()
    found = [encoded(model, one) for one in (batch, moved)]
    np.testing.assert_allclose(found[1][0][2:11][[0, 1, 2, 3, 4, 6, 7, 8]], found[0][0][:8], atol=1e-5)
    junk = {**batch, "token_ids": np.where(batch["sequence_ids"] > 0, batch["token_ids"], 9)}
    real = batch["sequence_ids"] > 0
    np.testing.assert_array_equal(encoded(model, junk)[real], found[0][real])


@pytest.mark.both_backends
@pytest.mark.parametrize("name", MAMBAS)
def test_a_pack_that_is_not_finite_hands_on_zeros(name):
    """In its own row: the step is skipped, and those after it go on."""
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
