"""Packed ModernBERT: an encoder of `layers.py`'s blocks, and a model for each head.

As "Smarter, Better, Faster, Longer" (Warner et al. 2024) describes it and Hugging Face's
`ModernBertForMaskedLM` computes it.

Legend: B packs per batch, S pack length, D model width, F feed-forward width, P predictions per pack,
K sequences per pack, V vocabulary, C classes.
"""

import keras
from keras import ops

from bert_packed.architectures import registry
from bert_packed.architectures.modern_bert.config import FULL_ATTENTION, ModernBertConfig
from bert_packed.architectures.modern_bert.layers import (
    ClassifierHead,
    CutoffNormal,
    MaskedTokenHead,
    ModernBertBlock,
    layer_norm,
)
from bert_packed.architectures.packed_model import PackedModel
from bert_packed.layers.context import ablated_context, pool_sequences
from bert_packed.layers.dropout import Dropout
from bert_packed.layers.layout import ONE_DEVICE
from bert_packed.layers.rematerialisation import run_blocks


class ModernBertEncoder(keras.layers.Layer):
    """Token embeddings, blocks and the last norm, over packs.

    Args:
        remat: True to recompute each block in the backward pass instead of keeping its activations.
        attend: Fused kernel of the global blocks, as in `layers.SelfAttention`.
        layout: `Layout` of the weights.
    """

    def __init__(self, config, remat=False, attend=None, layout=ONE_DEVICE):
        super().__init__(name="modern_bert")
        self.config = config
        self.remat = remat
        self.layout = layout
        self.embeddings_norm = layer_norm(config, "embeddings_LayerNorm")
        self.dropout = Dropout(config.embedding_dropout)
        self.blocks = [ModernBertBlock(config, i, attend, layout) for i in range(config.num_hidden_layers)]
        self.last_norm = layer_norm(config, "final_LayerNorm")

    def build(self, *_):
        config = self.config
        self.embeddings_VD = self.layout.add_table(
            self, config.vocab_size, config, "token_embeddings", CutoffNormal(config), is_vocabulary=True
        )
        for layer in (self.embeddings_norm, *self.blocks, self.last_norm):
            layer.build((None, None, config.hidden_size))

    def call(self, token_ids_BS, sequence_ids_BS, position_ids_BS, training=None):
        hidden_BSD = self.embed(token_ids_BS, training=training)
        return self.run_blocks(hidden_BSD, sequence_ids_BS, position_ids_BS, training=training)

    def embed(self, token_ids_BS, training=None):
        found_BSD = self.layout.look_up(self.embeddings_VD, token_ids_BS)
        hidden_BSD = self.embeddings_norm(ops.cast(found_BSD, self.compute_dtype))
        return ops.cast(self.dropout(hidden_BSD, training=training), "float32")

    def run_blocks(self, hidden_BSD, sequence_ids_BS, position_ids_BS, training=None):
        """The encoder after its embeddings."""
        context = ablated_context(self.config, sequence_ids_BS, position_ids_BS)
        return self.last_norm(run_blocks(self.blocks, hidden_BSD, context, self.remat, training))


class PackedModernBert(PackedModel):
    """A ModernBERT encoder of packs with a head on it; `encoder` holds arguments of `ModernBertEncoder`."""

    config_class = ModernBertConfig

    def __init__(self, config, name, num_classes=None, **encoder):
        super().__init__(config, name, num_classes)
        self.modern_bert = ModernBertEncoder(config, **encoder)
        layout = encoder.get("layout", ONE_DEVICE)
        if self.head == registry.MASKED_LM:
            self.predictions = MaskedTokenHead(config, "predictions", layout)
        elif self.head != registry.EMBEDDING:
            self.predictions = ClassifierHead(config, num_classes or 2, self.head, layout)

    def encode(self, batch, training=None):
        return self.modern_bert(*(batch[name] for name in self.encoder_inputs), training=training)

    def embed(self, batch):
        return self.modern_bert.embed(batch["token_ids"], training=False)

    def encode_embedded(self, hidden_BSD, batch):
        return self.modern_bert.run_blocks(
            hidden_BSD, batch["sequence_ids"], batch["position_ids"], training=False
        )


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForMaskedLM(PackedModernBert):
    """Packed ModernBERT that predicts masked tokens: a dict of `mlm_logits`, float32 `[B, P, V]`.

    Reads also `prediction_positions` `[B, P]`, whose unused slots hold 0.
    """

    head = registry.MASKED_LM

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = self.modern_bert.embeddings_VD
        return {"mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForQuestionAnswering(PackedModernBert):
    """Packed ModernBERT that finds answers: a dict of `start_logits` and `end_logits`, float32 `[B, S]`."""

    head = registry.QUESTION_ANSWERING

    def apply_heads(self, hidden_BSD, batch, training=None):
        logits_BS2 = self.predictions(hidden_BSD, training=training)
        return {"start_logits": logits_BS2[..., 0], "end_logits": logits_BS2[..., 1]}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForTokenClassification(PackedModernBert):
    """Packed ModernBERT that gives every token a class: a dict of `logits`, float32 `[B, S, C]`."""

    head = registry.TOKEN_CLASSIFICATION

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.predictions(hidden_BSD, training=training)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForClassification(PackedModernBert):
    """Packed ModernBERT that gives every sequence a class or a number: a dict of `logits`, `[B, K, C]`.

    Reads also `cls_positions` `[B, K]`, whose unused slots hold 0.
    """

    head = registry.CLASSIFICATION

    def apply_heads(self, hidden_BSD, batch, training=None):
        places = batch["sequence_ids"], batch["cls_positions"]
        pooled_BKD = pool_sequences(hidden_BSD, *places, self.config.classifier_pooling)
        return {"logits": self.predictions(pooled_BKD, training=training)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForEmbedding(PackedModernBert):
    """Packed ModernBERT without a head: a dict of `hidden_states`, float32 `[B, S, D]`."""

    head = registry.EMBEDDING

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"hidden_states": ops.cast(hidden_BSD, "float32")}


def make_model(head, config, num_outputs, remat=False, attend=None, layout=ONE_DEVICE):
    """A ModernBERT with one of its family's heads, not yet built; arguments as in `build_model`."""
    encoder = {"remat": remat, "attend": attend, "layout": layout}
    classes = num_outputs if head in registry.CLASSIFYING_HEADS else None
    kinds = {
        registry.MASKED_LM: PackedModernBertForMaskedLM,
        registry.QUESTION_ANSWERING: PackedModernBertForQuestionAnswering,
        registry.TOKEN_CLASSIFICATION: PackedModernBertForTokenClassification,
        registry.CLASSIFICATION: PackedModernBertForClassification,
        registry.EMBEDDING: PackedModernBertForEmbedding,
    }
    name = "pretraining" if head == registry.MASKED_LM else "finetuning"
    return kinds[head](config, name, classes, **encoder)


def count_flops(head, config, sums):
    """Operations that a ModernBERT needs to learn from sequences, counted as `bert.model.count_flops` does.

    6 L (4 D^2 + 3 D F)      per token; L blocks
    12 D                     per pair of tokens that attend, in each block
    6 (D^2 + D V)            per masked-LM prediction

    In a local block a sequence of m tokens has m pairs per token; where m is above the window w plus 1,
    2 w + 1 - w (w + 1) / m. For m the mean over tokens is taken. The count is exact for sequences of one
    length, and where none reaches out of the window; for others it is too high.
    """
    width, blocks, window = config.hidden_size, config.num_hidden_layers, config.window
    per_token = 6 * blocks * config.block_weights
    num_global = config.layer_types.count(FULL_ATTENTION)
    near = length = sums["num_pairs"] / max(sums["num_tokens"], 1)
    if length > window + 1:
        near = 2 * window + 1 - window * (window + 1) / length
    num_pairs = num_global * sums["num_pairs"] + (blocks - num_global) * near * sums["num_tokens"]
    flops = per_token * sums["num_tokens"] + 12 * width * num_pairs
    if head == registry.MASKED_LM:
        flops += 6 * (width**2 + width * config.vocab_size) * sums["num_predictions"]
    return flops
