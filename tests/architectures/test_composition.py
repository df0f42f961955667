"""One context for all blocks; `block`, `attend`, `remat` and `layout` go together, whoever wrote them."""

import dataclasses

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from packs import packed_and_unpacked
from plain_attention import attend_plainly
from tiny import CONFIG, make_engine, to_floats

from bert_packed.architectures.bert.layers import TransformerBlock, layer_norm
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    FAMILIES,
    PRETRAINING,
    QUESTION_ANSWERING,
)
from bert_packed.core.settings import InputError
from bert_packed.layers import context
from bert_packed.layers.dropout import Dropout
from bert_packed.layers.layout import Layout, dense

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)


class SandwichBlock(TransformerBlock):
    """The package's block with a further layer norm before it."""

    def __init__(self, config, name, attend=None):
        super().__init__(config, name, attend=attend)
        self.before = layer_norm(config)

    def build(self, hidden_shape, *_):
        self.before.build(hidden_shape)
        super().build(hidden_shape)

    def call(self, hidden_BSD, context, training=None):
        return super().call(self.before(hidden_BSD), context, training=training)


class WitnessBlock(keras.layers.Layer):
    """A block without attention, which keeps the contexts that it is given."""

    def __init__(self, config, name):
        super().__init__(name=name)
        self.seen = []
        self.mix = dense(config.hidden_size, config, "mix")
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape):
        self.mix.build(hidden_shape)

    def call(self, hidden_BSD, context, training=None):
        self.seen.append(context)
        return hidden_BSD + self.dropout(self.mix(hidden_BSD), training=training)


class CountingBlock(WitnessBlock):
    """Has state that every call in training moves on."""

    def build(self, hidden_shape):
        super().build(hidden_shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")


def assert_same_steps(one, other, config=CONFIG):
    """Sums and gradients of two draws of dropout are the same for two ways to build a model."""
    packed, _ = packed_and_unpacked()
    engines = [make_engine(config=config, build=build) for build in (one, other)]
    losses = []
    for _ in range(2):
        (want, want_sums), (got, got_sums) = (engine.gradients(packed) for engine in engines)
        assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-5)
        losses.append(float(got_sums["mlm_loss"]))
        for variable, first, second in zip(engines[0].model.trainable_variables, want, got, strict=True):
            first, second = np.asarray(first), np.asarray(second)
            assert np.abs(first - second).max() <= 1e-5 * np.abs(first).max() + 1e-6, variable.path
    assert (losses[0] == losses[1]) == (config.hidden_dropout_prob == 0)


@pytest.mark.parametrize(
    ("block", "options", "config"),
    [
        (WitnessBlock, {"remat": True}, WITH_DROPOUT),
        (SandwichBlock, {"remat": True}, WITH_DROPOUT),
        (TransformerBlock, {"attend": attend_plainly}, CONFIG),
        (SandwichBlock, {"attend": attend_plainly, "remat": True}, CONFIG),
    ],
)
def test_options_go_with_blocks_and_with_one_another(block, options, config):
    assert_same_steps({"block": block}, {"block": block, **options}, config)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@pytest.mark.parametrize("option", ["attend", "layout"])
def test_what_a_mamba_cannot_honour_is_refused(name, option):
    family, model = FAMILIES[name].name, ARCHITECTURES[name]
    with pytest.raises(InputError, match=f"`{option}` must be left out for a {family}. Received: 7"):
        model.model(**{option: 7})
    assert model.model(**{option: None})  # as a run gives it where there is none


def test_what_a_block_cannot_honour_is_refused():
    with pytest.raises(ValueError, match="`attend` must not be given for a block without it"):
        build_model(PRETRAINING, CONFIG, 1, block=WitnessBlock, attend=attend_plainly)
    with pytest.raises(ValueError, match="`layout` must not be given for a block without it"):
        build_model(PRETRAINING, CONFIG, 1, block=SandwichBlock, layout=Layout())
    model = build_model(PRETRAINING, CONFIG, 1, block=CountingBlock, remat=True)
    with pytest.raises(ValueError, match=r"`remat` must be False for a block with state .*layer_0/calls"):
        model(packed_and_unpacked()[0])


@pytest.mark.parametrize(
    ("options", "num_masks"), [({}, 1), ({"attend": attend_plainly}, 0), ({"remat": True}, 2)]
)
def test_the_mask_is_made_once_where_somebody_asks(monkeypatch, options, num_masks):
    """Two blocks ask for it; each block that is computed again has its own, which lives no longer than it."""
    made = []
    attention_mask = context.attention_mask
    monkeypatch.setattr(context, "attention_mask", lambda ids: made.append(ids) or attention_mask(ids))
    build_model(PRETRAINING, CONFIG, 1, **options).encode(packed_and_unpacked()[0])
    assert len(made) == num_masks


@pytest.mark.parametrize("is_embedded", [False, True])
def test_blocks_share_one_context_of_ids_positions_and_mask(is_embedded):
    packed, _ = packed_and_unpacked()
    model = build_model(PRETRAINING, CONFIG, 1, block=WitnessBlock)
    model.encode_embedded(model.embed(packed), packed) if is_embedded else model.encode(packed)
    (one,), (other,) = (block.seen for block in model.bert.blocks)
    assert one is other
    np.testing.assert_array_equal(one.sequence_ids_BS, packed["sequence_ids"])
    np.testing.assert_array_equal(one.position_ids_BS, packed["position_ids"])
    ids = packed["sequence_ids"]
    np.testing.assert_array_equal(one.mask_B1SS[:, 0], ids[:, :, None] == ids[:, None, :])


def test_a_model_of_other_blocks_is_not_saved_as_one_of_bert():
    model = build_model(PRETRAINING, CONFIG, 1, block=WitnessBlock)
    with pytest.raises(ValueError, match="`block` must be TransformerBlock to be saved"):
        model.get_config()
    assert build_model(PRETRAINING, CONFIG, 1).get_config()["name"] == "pretraining"


@pytest.mark.parametrize(
    ("head", "layers"),
    [
        (PRETRAINING, ["transform", "pooler", "classifier"]),
        (QUESTION_ANSWERING, ["output"]),
        (CLASSIFICATION, ["pooler", "classifier"]),
    ],
)
def test_all_linear_layers_come_from_the_layout(head, layers):
    """The options of a model arrive at every head's as well."""
    made = []

    class Witness(Layout):
        def dense(self, width, config, name, dtype=None, **given):
            made.append((name, super().dense(width, config, name, dtype, **given)))
            return made[-1][1]

    options = {"dtype": "mixed_bfloat16", "remat": True}
    model = build_model(head, CONFIG, seed=1, num_outputs=3, layout=Witness(), **options)
    assert model.bert.remat and model.bert.blocks[0].compute_dtype == "bfloat16"
    per_block = ["query", "key", "value", "output", "intermediate", "output"]
    assert [name for name, _ in made] == [*per_block * CONFIG.num_hidden_layers, *layers]
    dense_layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)]
    assert {id(layer) for layer in dense_layers} == {id(layer) for _, layer in made}
