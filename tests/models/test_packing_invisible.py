"""Packing is invisible: losses, accuracies and all gradients equal those of unpacked sequences.

`test_numpy_bert.py` compares the outputs.
"""

import numpy as np
import pytest
from keras import ops
from packs import VOCAB_SIZE, packed_and_unpacked
from tiny import CONFIG, make_engine, to_floats

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.layers.context import PackContext
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training.backend import gradient

MLM_LOSSES = ("per_sequence", "per_token")
# `test_engine.py` compares compiled steps with these; here they would compile for longer than they run
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(scope="module")
def batches():
    packed, unpacked = packed_and_unpacked()
    assert packed["sequence_ids"].max(axis=1).tolist() == [4, 3, 1, 2, 1]
    assert unpacked["sequence_ids"].max(axis=1).tolist() == [1] * 11
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


@pytest.mark.parametrize("mlm_loss", MLM_LOSSES)
def test_losses_and_accuracies(batches, mlm_loss):
    engine = make_engine(mlm_loss)
    packed, unpacked = (to_floats(engine.eval_step(batch)) for batch in batches)
    assert packed["num_sequences"] == unpacked["num_sequences"] == 11
    assert packed["num_predicted_sequences"] == pytest.approx(10)
    assert packed == pytest.approx(unpacked, rel=1e-5)
    means = pretraining_objective(mlm_loss).means
    assert means(packed) == pytest.approx(means(unpacked), rel=1e-5)


@pytest.mark.both_backends
@pytest.mark.parametrize("mlm_loss", MLM_LOSSES)
def test_all_gradients(batches, mlm_loss):
    packed, unpacked = batches
    engine = make_engine(mlm_loss)
    got, _ = engine.gradients(packed)
    want, _ = engine.gradients(unpacked)
    assert_gradients_equal(engine.model, got, want)


@pytest.mark.both_backends
def test_neighbours_see_nothing(batches):
    """New tokens in one sequence leave the others' hidden states untouched, bit for bit."""
    packed, _ = batches
    model = build_model(PRETRAINING, CONFIG, seed=1)
    before = np.asarray(model.encode(packed))
    changed_slots = 0
    for row in range(4):
        for slot in range(1, int(packed["sequence_ids"][row].max()) + 1):
            mine = packed["sequence_ids"] == slot
            mine[np.arange(len(mine)) != row] = False
            tokens = np.where(mine, packed["token_ids"] % (VOCAB_SIZE - 1) + 1, packed["token_ids"])
            after = np.asarray(model.encode({**packed, "token_ids": tokens}))
            assert np.array_equal(after[~mine], before[~mine])
            assert np.abs(after[mine] - before[mine]).max() > 1e-3
            changed_slots += 1
    assert changed_slots == 10


@pytest.mark.both_backends
def test_cross_gradient_is_exactly_zero(batches):
    """The gradient of one sequence's outputs by its neighbours' embeddings is 0, not small."""
    packed, _ = batches
    model = build_model(PRETRAINING, CONFIG, seed=1)
    encoder = model.bert
    ids = packed["sequence_ids"]
    embedded = encoder.embeddings(packed["token_ids"], packed["token_type_ids"], packed["position_ids"])
    for row, slot in ((0, 1), (0, 3), (1, 2), (3, 2)):
        mine = np.zeros(ids.shape, np.float32)
        mine[row] = ids[row] == slot

        def target(hidden, mine=mine):
            for block in encoder.blocks:
                hidden = block(hidden, context=PackContext(ids, packed["position_ids"]))
            # Weighted, since layer norm makes a plain sum of outputs constant
            weights = np.linspace(-1, 1, hidden.shape[-1], dtype=np.float32)
            return ops.sum(hidden * weights * mine[..., None])

        found = np.asarray(gradient(target)(embedded))
        assert np.abs(found[mine > 0]).max() > 1e-3
        assert np.all(found[mine == 0] == 0)


@pytest.mark.parametrize("mlm_loss", MLM_LOSSES)
@pytest.mark.parametrize("micro_batch_size", [1, pytest.param(5, marks=pytest.mark.both_backends), 10])
def test_micro_batches_equal_one(batches, mlm_loss, micro_batch_size):
    packed, _ = batches
    doubled = {name: np.concatenate([values, values[::-1]]) for name, values in packed.items()}
    whole, parts = make_engine(mlm_loss), make_engine(mlm_loss, micro_batch_size=micro_batch_size)
    want, want_sums = whole.gradients(doubled)
    got, got_sums = parts.gradients(doubled)
    assert_gradients_equal(whole.model, got, want)
    assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-5)


@pytest.mark.both_backends
def test_empty_packs_change_nothing(batches):
    packed, _ = batches
    engine = make_engine()
    filled = {name: np.concatenate([values, np.zeros_like(values)]) for name, values in packed.items()}
    with_empty, without = to_floats(engine.eval_step(filled)), to_floats(engine.eval_step(packed))
    assert with_empty == pytest.approx(without, rel=1e-6)
    nothing = {name: np.zeros_like(values) for name, values in packed.items()}
    gradients, sums = engine.gradients(nothing)
    assert float(sums["num_sequences"]) == 0
    assert all(np.all(np.asarray(values) == 0) for values in gradients)
