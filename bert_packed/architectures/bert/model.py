"""Packed BERT as a Keras model, and its heads for pre-training.

Legend: B packs per batch, S pack length, D model width, P predictions per pack, K sequences per pack,
V vocabulary.
"""

import inspect

import keras
from keras import ops

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.architectures.bert.layers import (
    MaskedLanguageModelHead,
    NextSentenceHead,
    PackedEmbeddings,
    TransformerBlock,
)
from bert_packed.architectures.packed_model import PackedModel
from bert_packed.architectures.registry import MASKED_LM, PRETRAINING
from bert_packed.layers.context import PackContext
from bert_packed.layers.layout import ONE_DEVICE
from bert_packed.layers.rematerialisation import run_rematerialised


class PackedEncoder(keras.layers.Layer):
    """Embeddings and encoder blocks over packs.

    Args:
        block: Function `(config, name)` to an encoder block, a layer called as
            `block(hidden_BSD, context=..., training=...)`.
        remat: Recompute each block in the backward pass instead of keeping its activations.
        attend, layout: As in `layers.SelfAttention`; only for a `block` with such arguments.
    """

    def __init__(
        self,
        config,
        block=TransformerBlock,
        remat=False,
        attend=None,
        layout=ONE_DEVICE,
        name="bert",
        **kwargs,
    ):
        super().__init__(name=name, **kwargs)
        self.remat = remat
        self.config = config
        self.embeddings = PackedEmbeddings(config, layout=layout)
        # Other blocks may not have these arguments
        given = {"attend": attend} if attend is not None else {}
        given |= {"layout": layout} if layout is not ONE_DEVICE else {}
        for option in given:
            if option not in inspect.signature(block).parameters:
                raise ValueError(f"`{option}` must not be given for a block without it. Received: {block}.")
        self.blocks = [block(config, name=f"layer_{i}", **given) for i in range(config.num_hidden_layers)]

    def build(self, *_):
        self.embeddings.build()
        for block in self.blocks:
            block.build((None, None, self.config.hidden_size))
        self.built = True

    def call(self, token_ids_BS, sequence_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        hidden_BSD = self.embed(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)
        return self.run_blocks(hidden_BSD, sequence_ids_BS, position_ids_BS, training=training)

    def embed(self, token_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        position_ids_BS = self._positions(position_ids_BS)
        return self.embeddings(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)

    def run_blocks(self, hidden_BSD, sequence_ids_BS, position_ids_BS, training=None):
        """The encoder after its embeddings."""
        if self.config.ablation_no_attention_mask:
            sequence_ids_BS = ops.minimum(sequence_ids_BS, 1)  # padding stays apart, as in BERT
        context = PackContext(sequence_ids_BS, self._positions(position_ids_BS))
        if self.remat:
            return run_rematerialised(self.blocks, hidden_BSD, context, training)
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD, context=context, training=training)
        return hidden_BSD

    def _positions(self, position_ids_BS):
        """The given positions, unless an ablation lets them count through the pack."""
        if not self.config.ablation_no_position_reset:
            return position_ids_BS
        return ops.zeros_like(position_ids_BS) + ops.arange(position_ids_BS.shape[1], dtype="int32")


class PackedBert(PackedModel):
    """A BERT encoder of packs with heads on it.

    Reads also `token_type_ids` `[B, S]` (sentence A is 0, B is 1) and `cls_positions` `[B, K]`, whose unused
    slots hold 0. `encoder` holds arguments of `PackedEncoder`; its `layout` makes the heads' layers too.
    """

    config_class = ModelConfig
    encoder_inputs = ("token_ids", "sequence_ids", "token_type_ids", "position_ids")

    def __init__(self, config, name, num_classes=None, **encoder):
        super().__init__(config, name)
        self.num_classes = num_classes
        self.block = encoder.get("block", TransformerBlock)
        self.layout = encoder.get("layout", ONE_DEVICE)
        self.bert = PackedEncoder(config, **encoder)

    def build_encoder(self):
        self.bert.build()

    def encode(self, batch, training=None):
        return self.bert(*(batch[name] for name in self.encoder_inputs), training=training)

    def embed(self, batch):
        names = ("token_ids", "token_type_ids", "position_ids")
        return self.bert.embed(*(batch[name] for name in names), training=False)

    def encode_embedded(self, hidden_BSD, batch):
        return self.bert.run_blocks(hidden_BSD, batch["sequence_ids"], batch["position_ids"], training=False)

    def get_config(self):
        """Arguments to make the model again from a `.keras` file; raises `ValueError` for other blocks."""
        if self.block is not TransformerBlock:
            raise ValueError(f"`block` must be TransformerBlock to be saved. Received: {self.block}.")
        classes = {} if self.num_classes is None else {"num_classes": self.num_classes}
        return {**super().get_config(), **classes}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForMaskedLM(PackedBert):
    """Packed BERT that predicts masked tokens: a dict of `mlm_logits`, float32 `[B, P, V]`; it has no pooler.

    Reads also `prediction_positions` `[B, P]`, whose unused slots hold 0.
    """

    head = MASKED_LM

    def __init__(self, config, name="pretraining", **encoder):
        super().__init__(config, name, **encoder)
        self.predictions = MaskedLanguageModelHead(config, layout=self.layout)

    def build_heads(self, hidden_shape):
        self.predictions.build()

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = self.bert.embeddings.word_embeddings_VD
        return {"mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForPretraining(PackedBertForMaskedLM):
    """Packed BERT with both pre-training heads: `nsp_logits`, float32 `[B, K, 2]`, come with `mlm_logits`."""

    head = PRETRAINING

    def __init__(self, config, name="pretraining", **encoder):
        super().__init__(config, name, **encoder)
        self.next_sentence = NextSentenceHead(config, layout=self.layout)

    def build_heads(self, hidden_shape):
        super().build_heads(hidden_shape)
        self.next_sentence.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        nsp_BK2 = self.next_sentence(hidden_BSD, batch["cls_positions"])
        return {**super().apply_heads(hidden_BSD, batch, training), "nsp_logits": nsp_BK2}
