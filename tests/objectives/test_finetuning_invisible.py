"""Packing is invisible to fine-tuning: losses and all gradients equal those of unpacked sequences."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from finetuning_batches import KINDS, LABELS, SHIFTS, packed_and_unpacked
from keras import ops
from modern_bert_models import CONFIG as MODERN_BERT
from tiny import CONFIG, replace_sums, to_floats

from bert_packed.architectures.registry import ablate
from bert_packed.evaluation.contamination import unpack_batch
from bert_packed.tasks.squad.task import answer_sums
from bert_packed.training import engines
from bert_packed.training.backend import compiled, gradient

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
MODELS = {
    "bert": CONFIG,
    "modern_bert": dataclasses.replace(MODERN_BERT, initializer_range=0.3),
}
MODELS["modern_bert_of_means"] = dataclasses.replace(MODELS["modern_bert"], classifier_pooling="mean")
CASES = [
    *(("bert", kind) for kind in KINDS),
    ("modern_bert", "answers"),
    ("modern_bert", "tags"),
    ("modern_bert_of_means", "classes"),
]


def assert_gradients_equal(kind, engine, got, want):
    """Design decision 4: within 1e-5 of the tensor's largest gradient; those that are 0 within 1e-6 of it."""
    shifts = SHIFTS if kind == "answers" else SHIFTS[:1]
    for variable, one, other in zip(engine.model.trainable_variables, got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if variable.path.endswith(shifts):
            assert np.abs(one).max() <= 1e-6 and np.abs(other).max() <= 1e-6, variable.path
            continue
        scale = np.abs(other).max()
        assert scale > 1e-4, f"{variable.path} has no gradient: the comparison would be empty"
        assert np.abs(one - other).max() <= 1e-5 * scale, variable.path


def make_engine(kind, config=CONFIG, **more):
    return engines.make_engine(KINDS[kind].build_model(config, 1), KINDS[kind], **more)


def batches_of(kind, seed=0):
    found = packed_and_unpacked(seed)
    found = tuple({**batch, "labels": batch[LABELS.get(kind, "labels")]} for batch in found)
    assert found[0]["sequence_ids"].max(axis=1).tolist() == [4, 3, 1, 2, 1]
    assert found[1]["sequence_ids"].max(axis=1).tolist() == [1] * 11
    return found


def gradients_of(engine, batch):
    """Compute all gradients as one program: under JAX many small ones would compile for longer."""
    return compiled(functools.partial(engine.gradients, training=True), engine.model)(batch)


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_sums_and_all_gradients(kind, model):
    engine = make_engine(kind, MODELS[model])
    (got, got_sums), (want, want_sums) = (gradients_of(engine, batch) for batch in batches_of(kind))
    assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-5)
    assert float(got_sums["num_sequences"]) == 11 and float(got_sums["loss"]) > 1
    assert_gradients_equal(kind, engine, got, want)


@pytest.mark.parametrize(
    ("model", "ablation"), [("bert", "no_position_reset"), ("modern_bert", "no_attention_mask")]
)
def test_neighbours_that_are_seen_change_gradients(model, ablation):
    """Planted faults, which the comparison finds. Rotary positions that go on leave no trace in gradients."""
    engine = make_engine("tags", ablate(MODELS[model], ablation))
    got, want = (gradients_of(engine, batch)[0] for batch in batches_of("tags"))
    with pytest.raises(AssertionError):
        assert_gradients_equal("tags", engine, got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_audit_takes_apart_is_what_was_put_together(kind):
    """Every array that an objective reads, places in the pack among them."""
    packed, unpacked = batches_of(kind)
    features = KINDS[kind].features
    rows, _ = unpack_batch(packed, features=features)
    assert rows.keys() == {feature.name for feature in features}
    for name, values in rows.items():
        want = unpacked[name]
        assert want.any() or name == "cls_positions"
        np.testing.assert_array_equal(values[:, : want.shape[1]], want, err_msg=name)
        assert not values[:, want.shape[1] :].any()  # slots that no sequence uses alone


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_rows_that_the_objective_gives_them(kind):
    batch, _ = batches_of(kind)
    sizes = {"S": batch["token_ids"].shape[1], "K": batch["slot_weights"].shape[1]}
    outputs = make_engine(kind).model(batch)
    want = {name: sizes[letter] for name, letter in KINDS[kind].outputs.items()}
    assert sizes["S"] != sizes["K"] and {name: v.shape[1] for name, v in outputs.items()} == want


def test_large_logits_stay_finite():
    packed, _ = batches_of("answers")
    logits = np.linspace(-1e4, 1e4, packed["token_ids"].size, dtype=np.float32)
    logits = logits.reshape(packed["token_ids"].shape)
    sums = to_floats(answer_sums({"start_logits": logits, "end_logits": logits}, packed))
    assert np.isfinite(list(sums.values())).all()


def test_neighbours_have_no_gradient_in_a_loss():
    """It is exactly 0, not small."""
    packed, _ = batches_of("answers")
    rng, size = np.random.default_rng(0), packed["token_ids"].shape
    values = {
        f"{name}_logits": ops.convert_to_tensor(rng.normal(size=size), "float32") for name in ("start", "end")
    }

    for row, slot in ((0, 0), (0, 3), (1, 1)):
        only = np.zeros_like(packed["slot_weights"])
        only[row, slot] = 1
        is_own = np.zeros(size, bool)
        is_own[row] = packed["sequence_ids"][row] == slot + 1
        alone = {**packed, "slot_weights": only}
        loss_of = gradient(lambda outputs, alone=alone: answer_sums(outputs, alone)["loss"])
        for found in loss_of(values).values():
            np.testing.assert_array_equal(np.asarray(found) != 0, is_own)


def test_rounds_of_the_loop_follow_from_the_data():
    """A model that counts its calls: three micro-batches of four hold a sequence."""
    tf = pytest.importorskip("tensorflow")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("the calls are counted by a variable of TensorFlow")
    packed, _ = batches_of("classes")
    filled = {name: np.concatenate([values, np.zeros_like(values[:3])]) for name, values in packed.items()}
    calls = tf.Variable(0)
    engine = make_engine("classes", micro_batch_size=2)
    sums = engine.objective.sums

    def counting(outputs, batch):
        calls.assign_add(1)
        return sums(outputs, batch)

    replace_sums(engine, counting)
    tf.function(engine.gradients)(filled)
    assert int(calls) == 3
