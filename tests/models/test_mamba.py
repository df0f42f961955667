"""Packed Mambas: sequences of a pack train and are computed as if alone.

Legend: B packs per batch, S pack length, E inner width.
"""

import dataclasses

import keras
import next_tokens
import numpy as np
import pytest
from keras import ops
from next_tokens import CONFIG, MAMBA2, batch_of, packed_and_unpacked, random_packs

from bert_packed.architectures.mamba import model as mamba
from bert_packed.architectures.mamba2 import model as mamba2
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import family_of
from bert_packed.core.settings import InputError
from bert_packed.evaluation import contamination
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.backend import gradient

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]


@pytest.fixture(params=[CONFIG, MAMBA2], ids=["mamba", "mamba2"])
def config(request):
    return request.param


@pytest.fixture
def one_block(config):
    return dataclasses.replace(config, num_hidden_layers=1)


@pytest.mark.parametrize("weighting", ["per_sequence", pytest.param("per_token", marks=pytest.mark.slow)])
def test_packing_is_invisible(config, weighting):
    """Outputs, loss, every gradient; a changed neighbour changes nothing."""
    batch = packed_and_unpacked([[4, 1, 2], [1, 5], [8]], max_seq_length=8)[0]
    assert batch["sequence_ids"].max(axis=1).tolist() == [3, 2, 1] and config.conv_kernel == 4
    checks = contamination.audit(next_tokens.make_engine(weighting, config), batch)
    assert len(checks) > 10
    assert [check.name for check in checks if not check.passed] == []


def test_padding_may_stand_anywhere(one_block):
    batch = packed_and_unpacked([[5, 1, 2], [3, 3]])[0]
    moved = {name: values.copy() for name, values in batch.items()}
    order = np.array([8, 9, 0, 1, 2, 3, 4, 10, 5, 6, 7, 11])  # padding first, between and last
    for name in ("token_ids", "sequence_ids", "position_ids", "label_ids", "label_sequences"):
        moved[name][0] = batch[name][0, order]
    model = build_model(CAUSAL_LM, one_block, 1)
    logits = [np.asarray(model(one)["logits"]) for one in (batch, moved)]
    np.testing.assert_allclose(logits[1][0][2:11][[0, 1, 2, 3, 4, 6, 7, 8]], logits[0][0][:8], atol=1e-6)
    junk = {**batch, "token_ids": np.where(batch["sequence_ids"] > 0, batch["token_ids"], 9)}
    real = batch["sequence_ids"] > 0
    np.testing.assert_array_equal(np.asarray(model(junk)["logits"])[real], logits[0][real])


def test_an_ablation_takes_each_pack_for_one_sequence(one_block):
    batch = packed_and_unpacked()[0]
    one = {**batch, "position_ids": np.tile(np.arange(12, dtype=np.int32), (5, 1))}
    broken = build_model(CAUSAL_LM, dataclasses.replace(one_block, ablation_no_position_reset=True), 1)
    sound = build_model(CAUSAL_LM, one_block, 1)
    found, want, apart = (
        np.asarray(m(b)["logits"]) for m, b in ((broken, batch), (sound, one), (sound, batch))
    )
    np.testing.assert_allclose(found, want, atol=1e-6)
    assert np.abs(found - apart).max() > 1e-3


def test_blocks_computed_again_give_the_same_gradients(one_block):
    """Also of states that are handed on: the second call takes over what the first has left."""
    batch = packed_and_unpacked()[0]
    found = []
    for remat in (False, True):
        engine = next_tokens.make_engine(config=one_block, build={"remat": remat, "num_rows": 5})
        engine.gradients(batch, training=True)
        later = {**batch, "position_ids": batch["position_ids"] + 1}
        found.append(engine.gradients(later, training=True)[0])
    for one, other in zip(*found, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(other, one, atol=1e-6 * np.abs(one).max())


def test_norms_round_their_result_alone():
    hidden = np.random.default_rng(0).normal(size=(2, 3, 64)).astype("float32")
    norm = mamba.RMSNorm(1e-5, dtype="mixed_bfloat16")
    norm.build(hidden.shape)
    found = norm(hidden)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    want = hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.asarray(ops.cast(found, "float32")), want, rtol=1.001 * 2.0**-8)


def test_bfloat16_computes_states_and_logits_in_float32(monkeypatch, config):
    seen = {}

    def note(*arguments, **options):
        seen["u"], seen["delta"] = arguments[0].dtype, arguments[1].dtype
        out = scan(*arguments, **options)
        seen["y"] = out[0].dtype
        return out

    module, name = (mamba, "ssm_pack") if config is CONFIG else (mamba2, "ssd_pack")
    scan = getattr(module, name)
    monkeypatch.setattr(module, name, note)
    batch = packed_and_unpacked()[0]
    dtypes = ("float32", "mixed_bfloat16")
    wide, narrow = (build_model(CAUSAL_LM, config, 1, dtype)(batch)["logits"] for dtype in dtypes)
    rounded = ops.cast(ops.cast(narrow, "bfloat16"), "float32")
    assert np.mean(np.asarray(rounded != narrow)) > 0.9  # nor are they rounded on their way
    assert "float32" in str(seen["delta"])
    assert "bfloat16" in str(seen["u"]) and "float32" in str(seen["y"]) and "float32" in str(narrow.dtype)
    wide, narrow = np.asarray(wide), np.asarray(narrow)
    assert 0 < np.abs(wide - narrow).max() < 0.05 * np.abs(wide).max()


def test_rows_go_on_from_pack_to_pack(config):
    """Cut every 6 tokens, states handed on: the logits of whole sequences, in each micro-batch."""
    lengths = [[9, 3, 6], [18], [2, 16], [7, 11]]
    whole = batch_of(random_packs(lengths), 18, 3)
    want = np.asarray(build_model(CAUSAL_LM, config, 1)(whole)["logits"])
    model = build_model(CAUSAL_LM, config, 1, num_rows=4)
    found = np.zeros_like(want)
    names = ("token_ids", "sequence_ids", "position_ids")
    for _ in range(2):  # the second time the rows start with what the first has left, which must not count
        for start in range(0, 18, 6):
            for rows in (slice(0, 2), slice(2, 4)):  # two micro-batches of a step
                part = {name: whole[name][rows, start : start + 6] for name in names}
                found[rows, start : start + 6] = np.asarray(model(part, training=True)["logits"])
        np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())
        found[:] = 0


def test_rows_are_handed_on_in_training_alone(one_block):
    part = {
        name: values[:, :6]
        for name, values in batch_of(random_packs([[12]]), 12, 1).items()
        if values.shape[1] == 12
    }
    later = {**part, "position_ids": part["position_ids"] + 6}
    model = build_model(CAUSAL_LM, one_block, 1, num_rows=1)
    first = np.asarray(model(later, training=False)["logits"])
    model(part, training=True)
    carried = [np.asarray(queue.value) for queue in model.backbone.carried[0]]
    assert all(np.abs(values).max() > 0 for values in carried)
    np.testing.assert_array_equal(np.asarray(model(later, training=False)["logits"]), first)
    for queue, values in zip(model.backbone.carried[0], carried, strict=True):
        np.testing.assert_array_equal(np.asarray(queue.value), values)
    assert np.abs(np.asarray(model(later, training=True)["logits"]) - first).max() > 0


def test_a_pack_that_is_not_finite_hands_on_zeros(config):
    """In its own row: the step is skipped, and those after it go on."""
    whole = batch_of(random_packs([[12], [12]]), 12, 1)
    whole["token_ids"][:] = np.where(whole["token_ids"] == 30, 29, whole["token_ids"])
    first, second = (
        {name: values[:, at] for name, values in whole.items() if values.shape[1] == 12}
        for at in (slice(6), slice(6, 12))
    )
    first["token_ids"][0, 5] = 30  # the last token alone reaches the tail as well as the states
    model = build_model(CAUSAL_LM, config, 1, num_rows=2)
    want = np.asarray(build_model(CAUSAL_LM, config, 1)(whole)["logits"])[1, 6:]
    table = model.backbone.embeddings_VD
    sound = table.numpy()
    table.assign(np.where(np.arange(31)[:, None] == 30, np.nan, sound))
    model(first, training=True)
    table.assign(sound)
    for queue in (queue for of_block in model.backbone.carried for queue in of_block):
        bad, good = queue.numpy()
        assert not bad.any() and good.any() and np.all(np.isfinite(good))
    logits = np.asarray(model(second, training=True)["logits"])
    assert np.all(np.isfinite(logits[0]))
    np.testing.assert_allclose(logits[1], want, atol=1e-5 * np.abs(want).max())


def test_no_gradient_crosses_a_cut(one_block):
    """States handed on are numbers: no loss moves the weights by way of an earlier pack."""
    model = build_model(CAUSAL_LM, one_block, 1, num_rows=1)
    whole = batch_of(random_packs([[12]]), 12, 1)
    first, second = (
        {n: v[:, at] for n, v in whole.items() if v.shape[1] == 12} for at in (slice(6), slice(6, 12))
    )

    def target(hidden_BSD):
        model.backbone.run_blocks(hidden_BSD, first["position_ids"], training=True)
        after = model.backbone.run_blocks(model.embed(second), second["position_ids"], training=True)
        return ops.sum(ops.square(after))

    if keras.backend.backend() == "jax":
        values = [variable.value for variable in model.variables]

        def stateless(hidden_BSD):
            with keras.StatelessScope(state_mapping=list(zip(model.variables, values, strict=True))):
                return target(hidden_BSD)

        found = gradient(stateless)(model.embed(first))
    else:
        found = gradient(target)(model.embed(first))
    assert np.all(np.asarray(found) == 0)


@pytest.mark.parametrize("option", ["attend", "layout"])
def test_what_a_mamba_cannot_honour_is_refused(config, option):
    name = family_of(config).name
    with pytest.raises(InputError, match=f"`{option}` must be left out for a {name}. Received: 7"):
        build_model(CAUSAL_LM, config, 1, **{option: 7})
    assert build_model(CAUSAL_LM, config, 1, **{option: None})  # as a run gives it where there is none
