"""Packed ModernBERT: rotary positions, gated feed-forward, norms before, and local attention in bands.

As "Smarter, Better, Faster, Longer" (Warner et al. 2024) describes it and Hugging Face's
`ModernBertForMaskedLM` computes it.

Legend: B packs per batch, S pack length, D model width, N heads, H head width, F feed-forward width,
P predictions per pack, K sequences per pack, Q = P, S or K, V vocabulary, C classes.
"""

import math

import keras
from keras import ops

from bert_packed.architectures.modern_bert.config import FULL_ATTENTION, ModernBertConfig
from bert_packed.architectures.modern_bert.local_attention import attend_in_window, rotate, rotation
from bert_packed.architectures.packed_model import PackedModel
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    MASKED_LM,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
)
from bert_packed.layers.context import PackContext, activation, attend_in_sequences, gather_tokens
from bert_packed.layers.dropout import Dropout
from bert_packed.layers.layout import COLUMNS, ONE_DEVICE, ROWS
from bert_packed.layers.rematerialisation import run_rematerialised


class CutoffNormal(keras.initializers.Initializer):
    """Initial weights: normal, without those beyond the config's cutoff.

    `deviation` is the standard deviation before the cut; None is `initializer_range`.
    """

    def __init__(self, config, deviation=None):
        self.deviation = config.initializer_range if deviation is None else deviation
        self.share = math.erf(config.initializer_cutoff_factor / math.sqrt(2))  # of the normal that is kept
        self.uniform = keras.initializers.RandomUniform(-self.share, self.share)

    def __call__(self, shape, dtype=None):
        return math.sqrt(2) * self.deviation * ops.erfinv(self.uniform(shape, dtype))


def output_weights(config):
    """Initial weights of layers whose results are added up over the blocks, and of the head."""
    return CutoffNormal(config, config.initializer_range / math.sqrt(2 * config.num_hidden_layers))


def output_layer(config, use_bias, layout):
    """The last linear layer of attention and of the feed-forward network: float `[..., X]` to `[..., D]`."""
    width, weights = config.hidden_size, output_weights(config)
    return layout.dense(width, config, "output", weights=weights, use_bias=use_bias, split=ROWS)


def layer_norm(config, name):
    return keras.layers.LayerNormalization(epsilon=config.norm_eps, center=config.norm_bias, name=name)


class RotaryAttention(keras.layers.Layer):
    """Multi-head attention with rotary positions, to a whole sequence or in a window.

    Args:
        is_global: False for attention in the config's window.
        attend: As in `layers.SelfAttention`, for global attention.
        layout: `Layout` of the weights, which makes the linear layers.
    """

    def __init__(self, config, is_global, attend=None, layout=ONE_DEVICE, name="attention", **kwargs):
        super().__init__(name=name, **kwargs)
        self.is_global = is_global
        self.attend = attend
        self.layout = layout
        self.window = config.window
        self.theta = config.global_rope_theta if is_global else config.local_rope_theta
        self.num_heads = config.num_attention_heads
        self.head_width = config.hidden_size // config.num_attention_heads
        weights, use_bias = CutoffNormal(config), config.attention_bias
        self.qkv = layout.dense(
            3 * config.hidden_size, config, "qkv", weights=weights, use_bias=use_bias, split=COLUMNS
        )
        self.output_dense = output_layer(config, use_bias, layout)
        self.attention_dropout = Dropout(config.attention_dropout)
        self.dropout = Dropout(config.attention_dropout)

    def build(self, hidden_shape, *_):
        self.qkv.build(hidden_shape)
        self.output_dense.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD, context, training=None):
        """Attend inside the sequences of a `PackContext`; float `[B, S, D]` to the same."""
        shape = (-1, hidden_BSD.shape[1], self.num_heads, self.head_width)
        query_BSNH, key_BSNH, value_BSNH = (
            ops.reshape(part, shape) for part in self.layout.apply_in_parts(self.qkv, 3, hidden_BSD)
        )
        angles = rotation(context.position_ids_BS, self.theta, self.head_width)
        query_BSNH = rotate(query_BSNH, *angles) * self.head_width**-0.5
        heads = query_BSNH, rotate(key_BSNH, *angles), value_BSNH
        if self.is_global:
            found_BSNH = attend_in_sequences(
                heads, context, self.attention_dropout, training, self.attend, self.layout
            )
        else:
            found_BSNH = attend_in_window(
                heads, context.sequence_ids_BS, self.window, self.attention_dropout, training
            )
        found_BSD = ops.reshape(found_BSNH, (-1, *hidden_BSD.shape[1:]))
        return self.dropout(self.output_dense(found_BSD), training=training)


class GatedFeedForward(keras.layers.Layer):
    """Two-layer network on each token, whose inner values pass gates."""

    def __init__(self, config, name="feed_forward", layout=ONE_DEVICE, **kwargs):
        super().__init__(name=name, **kwargs)
        self.layout = layout
        self.inner_width = config.intermediate_size
        width, weights, use_bias = 2 * self.inner_width, CutoffNormal(config), config.mlp_bias
        self.intermediate = layout.dense(
            width, config, "intermediate", weights=weights, use_bias=use_bias, split=COLUMNS
        )
        self.output_dense = output_layer(config, use_bias, layout)
        self.activation = activation(config.hidden_activation)
        self.dropout = Dropout(config.mlp_dropout)

    def build(self, hidden_shape):
        self.intermediate.build(hidden_shape)
        self.output_dense.build((*hidden_shape[:-1], self.inner_width))
        self.built = True

    def call(self, hidden_BSD, training=None):
        inner_BSF, gate_BSF = self.layout.apply_in_parts(self.intermediate, 2, hidden_BSD)
        inner_BSF = self.activation(inner_BSF) * gate_BSF
        return self.output_dense(self.dropout(inner_BSF, training=training))


class ModernBertBlock(keras.layers.Layer):
    """Norm, attention, residual; norm, feed-forward network, residual. The residual stays float32.

    The first block has no norm before its attention: the embeddings end in one.
    """

    def __init__(self, config, number, attend=None, layout=ONE_DEVICE, **kwargs):
        super().__init__(name=f"layer_{number}", autocast=False, **kwargs)
        self.attention_norm = layer_norm(config, "attention_LayerNorm") if number else None
        is_global = config.layer_types[number] == FULL_ATTENTION
        self.attention = RotaryAttention(config, is_global, attend, layout)
        self.feed_forward_norm = layer_norm(config, "feed_forward_LayerNorm")
        self.feed_forward = GatedFeedForward(config, layout=layout)

    def build(self, hidden_shape, *_):
        for layer in (self.attention_norm, self.attention, self.feed_forward_norm, self.feed_forward):
            if layer is not None:
                layer.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD, context, training=None):
        """float32 `[B, S, D]` to the same."""
        normed_BSD = hidden_BSD if self.attention_norm is None else self.attention_norm(hidden_BSD)
        found_BSD = self.attention(normed_BSD, context=context, training=training)
        hidden_BSD = hidden_BSD + ops.cast(found_BSD, "float32")
        found_BSD = self.feed_forward(self.feed_forward_norm(hidden_BSD), training=training)
        return hidden_BSD + ops.cast(found_BSD, "float32")


class ModernBertEncoder(keras.layers.Layer):
    """Token embeddings, blocks and the last norm, over packs.

    Args:
        remat: Recompute each block in the backward pass instead of keeping its activations.
        attend: As in `layers.SelfAttention`, for the global blocks.
        layout: `Layout` of the weights.
    """

    def __init__(self, config, remat=False, attend=None, layout=ONE_DEVICE, name="modern_bert", **kwargs):
        super().__init__(name=name, **kwargs)
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
        self.built = True

    def call(self, token_ids_BS, sequence_ids_BS, position_ids_BS, training=None):
        hidden_BSD = self.embed(token_ids_BS, training=training)
        return self.run_blocks(hidden_BSD, sequence_ids_BS, position_ids_BS, training=training)

    def embed(self, token_ids_BS, training=None):
        found_BSD = self.layout.look_up(self.embeddings_VD, token_ids_BS)
        hidden_BSD = self.embeddings_norm(ops.cast(found_BSD, self.compute_dtype))
        return ops.cast(self.dropout(hidden_BSD, training=training), "float32")

    def run_blocks(self, hidden_BSD, sequence_ids_BS, position_ids_BS, training=None):
        """The encoder after its embeddings."""
        if self.config.ablation_no_attention_mask:
            sequence_ids_BS = ops.minimum(sequence_ids_BS, 1)  # padding stays apart, as in BERT
        if self.config.ablation_no_position_reset:
            length = position_ids_BS.shape[1]
            position_ids_BS = ops.zeros_like(position_ids_BS) + ops.arange(length, dtype="int32")
        context = PackContext(sequence_ids_BS, position_ids_BS)
        if self.remat:
            return self.last_norm(run_rematerialised(self.blocks, hidden_BSD, context, training))
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD, context=context, training=training)
        return self.last_norm(hidden_BSD)


class PredictionHead(keras.layers.Layer):
    """Linear layer, activation and norm, which all heads begin with."""

    def __init__(self, config, name, layout=ONE_DEVICE, **kwargs):
        super().__init__(name=name, **kwargs)
        self.config = config
        self.layout = layout
        width, weights, use_bias = config.hidden_size, output_weights(config), config.classifier_bias
        self.transform = layout.dense(width, config, "transform", weights=weights, use_bias=use_bias)
        self.activation = activation(config.classifier_activation)
        self.norm = layer_norm(config, "LayerNorm")

    def build(self, hidden_shape, *_):
        self.transform.build(hidden_shape)
        self.norm.build(hidden_shape)
        self.built = True

    def call(self, hidden_BQD):
        return self.norm(self.activation(self.transform(hidden_BQD)))


class MaskedTokenHead(PredictionHead):
    """Vocabulary logits of the gathered predictions: float32 `[B, P, V]`, by the token embeddings."""

    def __init__(self, config, name, layout=ONE_DEVICE):
        super().__init__(config, name, layout, autocast=False)  # the table stays float32

    def build(self, hidden_shape, *_):
        super().build(hidden_shape)
        self.bias_V = None
        if self.config.decoder_bias:
            self.bias_V = self.layout.add_vocabulary_bias(self, self.config, "output_bias")

    def call(self, hidden_BSD, positions_BP, embeddings_VD):
        gathered_BPD = super().call(gather_tokens(hidden_BSD, positions_BP))
        # Cast before the product, not after: its sums would be rounded to bfloat16 in between
        gathered_BPD, table_VD = (ops.cast(x, "float32") for x in (gathered_BPD, embeddings_VD))
        logits_BPV = self.layout.vocabulary_logits(gathered_BPD, table_VD)
        if self.bias_V is not None:
            logits_BPV = logits_BPV + self.bias_V
        return self.layout.without_padding(logits_BPV, self.config.vocab_size)


class ClassifierHead(PredictionHead):
    """Class logits of tokens or of sequences: float32 `[B, Q, C]`."""

    def __init__(self, config, num_classes, name, layout=ONE_DEVICE, **kwargs):
        super().__init__(config, name, layout, **kwargs)
        weights = CutoffNormal(config, config.hidden_size**-0.5)
        self.classifier = layout.dense(num_classes, config, "classifier", "float32", weights)
        self.dropout = Dropout(config.classifier_dropout)

    def build(self, hidden_shape, *_):
        super().build(hidden_shape)
        self.classifier.build(hidden_shape)

    def call(self, hidden_BQD, training=None):
        return self.classifier(self.dropout(super().call(hidden_BQD), training=training))


def pool_sequences(hidden_BSD, sequence_ids_BS, cls_positions_BK, pooling):
    """The first state of each sequence, or their mean ("mean"): float `[B, K, D]`.

    hidden [[a b c d]], sequence ids [[1 1 2 0]]   ->   [[a c]]   or   [[(a + b) / 2, c]]
    """
    if pooling == "cls":
        return gather_tokens(hidden_BSD, cls_positions_BK)
    slots_K = ops.arange(1, cls_positions_BK.shape[1] + 1, dtype="int32")
    own_BKS = ops.cast(ops.cast(sequence_ids_BS, "int32")[:, None] == slots_K[:, None], "float32")
    sums_BKD = ops.matmul(own_BKS, ops.cast(hidden_BSD, "float32"))
    counts_BK1 = ops.maximum(ops.sum(own_BKS, axis=-1, keepdims=True), 1.0)  # slots without a sequence
    return ops.cast(sums_BKD / counts_BK1, hidden_BSD.dtype)


class PackedModernBert(PackedModel):
    """A ModernBERT encoder of packs with a head on it; `encoder` holds arguments of `ModernBertEncoder`."""

    config_class = ModernBertConfig

    def __init__(self, config, name, num_classes=None, **encoder):
        super().__init__(config, name)
        self.num_classes = num_classes
        self.modern_bert = ModernBertEncoder(config, **encoder)
        layout = encoder.get("layout", ONE_DEVICE)
        if self.head == MASKED_LM:
            self.predictions = MaskedTokenHead(config, "predictions", layout)
        else:
            self.predictions = ClassifierHead(config, num_classes or 2, self.head, layout)

    def build_encoder(self):
        self.modern_bert.build()

    def build_heads(self, hidden_shape):
        self.predictions.build(hidden_shape)

    def encode(self, batch, training=None):
        return self.modern_bert(*(batch[name] for name in self.encoder_inputs), training=training)

    def embed(self, batch):
        return self.modern_bert.embed(batch["token_ids"], training=False)

    def encode_embedded(self, hidden_BSD, batch):
        return self.modern_bert.run_blocks(
            hidden_BSD, batch["sequence_ids"], batch["position_ids"], training=False
        )

    def get_config(self):
        classes = {} if self.num_classes is None else {"num_classes": self.num_classes}
        return {**super().get_config(), **classes}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForMaskedLM(PackedModernBert):
    """Packed ModernBERT that predicts masked tokens: a dict of `mlm_logits`, float32 `[B, P, V]`.

    Reads also `prediction_positions` `[B, P]`, whose unused slots hold 0.
    """

    head = MASKED_LM

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = self.modern_bert.embeddings_VD
        return {"mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForQuestionAnswering(PackedModernBert):
    """Packed ModernBERT that finds answers: a dict of `start_logits` and `end_logits`, float32 `[B, S]`."""

    head = QUESTION_ANSWERING

    def apply_heads(self, hidden_BSD, batch, training=None):
        logits_BS2 = self.predictions(hidden_BSD, training=training)
        return {"start_logits": logits_BS2[..., 0], "end_logits": logits_BS2[..., 1]}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForTokenClassification(PackedModernBert):
    """Packed ModernBERT that gives every token a class: a dict of `logits`, float32 `[B, S, C]`."""

    head = TOKEN_CLASSIFICATION

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.predictions(hidden_BSD, training=training)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedModernBertForClassification(PackedModernBert):
    """Packed ModernBERT that gives every sequence a class or a number: a dict of `logits`, `[B, K, C]`.

    Reads also `cls_positions` `[B, K]`, whose unused slots hold 0.
    """

    head = CLASSIFICATION

    def apply_heads(self, hidden_BSD, batch, training=None):
        names = ("sequence_ids", "cls_positions")
        pooled_BKD = pool_sequences(
            hidden_BSD, *(batch[name] for name in names), self.config.classifier_pooling
        )
        return {"logits": self.predictions(pooled_BKD, training=training)}


def make_model(head, config, num_outputs, remat=False, attend=None, layout=ONE_DEVICE):
    """A ModernBERT with one of its family's heads, not yet built; arguments as in `build_model`."""
    encoder = {"remat": remat, "attend": attend, "layout": layout}
    if head == MASKED_LM:
        return PackedModernBertForMaskedLM(config, "pretraining", **encoder)
    if head == QUESTION_ANSWERING:
        return PackedModernBertForQuestionAnswering(config, "finetuning", **encoder)
    kinds = {
        TOKEN_CLASSIFICATION: PackedModernBertForTokenClassification,
        CLASSIFICATION: PackedModernBertForClassification,
    }
    return kinds[head](config, "finetuning", num_outputs, **encoder)


def count_flops(head, config, sums):
    """Operations that a ModernBERT needs to learn from sequences, counted as `heads.count_flops` does.

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
    if head == MASKED_LM:
        flops += 6 * (width**2 + width * config.vocab_size) * sums["num_predictions"]
    return flops
