"""Packing is invisible in every architecture: losses and gradients equal those of unpacked sequences.

`test_numpy_models.py` compares the outputs with another implementation.
"""

import dataclasses

import numpy as np
import pytest
from architectures import ARCHITECTURES
from keras import ops
from packs import VOCAB_SIZE
from tiny import to_floats

from bert_packed.objectives.pretraining import next_token_objective, pretraining_objective
from bert_packed.training.backend import gradient

# `test_engine.py` compares compiled steps with these; here they would compile for longer than they run
pytestmark = pytest.mark.usefixtures("uncompiled")
OBJECTIVES = {
    "bert": [pretraining_objective("per_sequence"), pretraining_objective("per_token")],
    "modernbert": [ARCHITECTURES["modernbert"].objective],
    "mamba": [next_token_objective("per_sequence"), next_token_objective("per_token")],
    "mamba2": [next_token_objective("per_sequence")],
}


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return ARCHITECTURES[request.param]


BY_OBJECTIVE = [
    pytest.param(name, number, marks=pytest.mark.slow if name == "mamba" and number else ())
    for name, objectives in OBJECTIVES.items()
    for number in range(len(objectives))
]
# The simplest has both precisions, and each of the others one
each_precision = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("bert", "float32"), ("bert", "mixed_bfloat16"), ("modernbert", "mixed_bfloat16")),
        *(("mamba", "float32"), ("mamba2", "mixed_bfloat16")),
    ],
)


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
@pytest.mark.parametrize(("name", "number"), BY_OBJECTIVE)
def test_losses_figures_and_gradients(name, number):
    weighted = dataclasses.replace(ARCHITECTURES[name], objective=OBJECTIVES[name][number])
    packed, unpacked = batches_of(weighted)
    engine = weighted.engine()
    (got, sums), (want, want_sums) = (engine.gradients(batch) for batch in (packed, unpacked))
    sums, want_sums = to_floats(sums), to_floats(want_sums)
    assert sums["num_sequences"] == 11 and sums == pytest.approx(want_sums, rel=1e-5)
    means, want_means = map(weighted.objective.means, (sums, want_sums))
    assert means == pytest.approx(want_means, rel=1e-5)
    assert_gradients_equal(engine.model, got, want)


@pytest.mark.both_backends
@each_precision
def test_neighbours_see_nothing(name, dtype):
    """New tokens in one sequence leave the others' hidden states untouched, bit for bit."""
    packed, _ = batches_of(ARCHITECTURES[name])
    model = ARCHITECTURES[name].model(dtype=dtype)
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
    """The gradient of one sequence's outputs by its neighbours' embeddings is 0, not small."""
    packed, _ = batches_of(architecture)
    model, ids = architecture.model(), packed["sequence_ids"]
    embedded = model.embed(packed)
    for row, slot in ((0, 3), (1, 2)):
        mine = np.zeros(ids.shape, np.float32)
        mine[row] = ids[row] == slot

        def target(hidden, mine=mine):
            hidden = model.encode_embedded(hidden, packed)
            # The sum is weighted, since layer norm makes a plain sum of outputs constant
            weights = np.linspace(-1, 1, hidden.shape[-1], dtype=np.float32)
            return ops.sum(hidden * weights * mine[..., None])

        found = np.asarray(gradient(target)(embedded))
        assert np.abs(found[mine > 0]).max() > 1e-3
        assert np.all(found[mine == 0] == 0)


@pytest.mark.parametrize(
    ("number", "micro_batch_size"), [(0, 1), (0, 10), pytest.param(1, 5, marks=pytest.mark.both_backends)]
)
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
@each_precision
def test_empty_packs_change_nothing(name, dtype):
    """Sums of two parts add up to those of the whole, and there is no NaN in packs of padding alone."""
    packed, _ = batches_of(ARCHITECTURES[name])
    engine = ARCHITECTURES[name].engine({"dtype": dtype})

    def part_of(*rows):
        """The batch, in which all other packs are empty: one program serves all parts."""
        is_kept = np.isin(np.arange(5), rows)
        return {name: (values.T * is_kept).T.astype(values.dtype) for name, values in packed.items()}

    whole, first, last = (
        to_floats(engine.eval_step(part_of(*rows))) for rows in (range(5), (0, 3), (1, 2, 4))
    )
    added = {name: first[name] + last[name] for name in whole}
    assert added == pytest.approx(whole, rel=1e-6 if dtype == "float32" else 1e-3)
    gradients, sums = engine.gradients(part_of())
    assert float(sums["num_sequences"]) == 0
    assert all(np.all(np.asarray(values) == 0) for values in gradients)
