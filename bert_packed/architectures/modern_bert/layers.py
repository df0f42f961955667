"""Layers of a packed ModernBERT: attention with rotary positions, local in bands; gated feed-forward; heads.

Legend: B packs per batch, S pack length, D model width, N heads, H head width, R = H / 2 angles of a head,
T tokens of a tile, n tiles of a pack, I = B * n tiles of a batch, A = 3 * T tokens around a tile,
F feed-forward width, P predictions per pack, K sequences per pack, Q = P, S or K, V vocabulary, C classes.
"""

import math

import keras
import numpy as np
from keras import ops

from bert_packed.architectures.modern_bert.config import FULL_ATTENTION
from bert_packed.layers.context import MASKED_SCORE, activation, attend_in_sequences, gather_tokens
from bert_packed.layers.dropout import Dropout
from bert_packed.layers.fast_gradients import attention_scores, weighted_values
from bert_packed.layers.layout import COLUMNS, ONE_DEVICE, ROWS


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
        attend: Fused kernel of global attention, as in `layers.SelfAttention`.
        layout: `Layout` of the weights, which makes the linear layers.
    """

    def __init__(self, config, is_global, attend=None, layout=ONE_DEVICE):
        super().__init__(name="attention")
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


def attend_in_window(heads, sequence_ids_BS, window, dropout, training=None):
    """Attention of all tokens to those of their own sequence at most `window` away: float `[B, S, N, H]`.

    A pack is cut into tiles of `window` tokens. Each attends to itself and its two neighbours, so time and
    memory grow with S times the window. For a window of 2, the keys of the middle tile's queries:

        sequence ids           1 1 | 1 2 | 2 2
        key is near, query 1   1 1   1 1   1 0
                     query 2   0 1   1 1   1 1
        and of its sequence    1 1   1 0   0 0
                               0 0   0 1   1 1

    `heads` are queries, scaled already, keys and values `[B, S, N, H]`; of the int32 `sequence_ids_BS` 0 is
    padding, which attends to padding; `window` counts the tokens on each side, from 0.
    """
    length, num_heads, head_width = heads[0].shape[1:]
    tile = max(1, min(window, length))
    num_tiles = -(-length // tile)
    query_ITNH = ops.reshape(_tiles(heads[0], tile), (-1, tile, num_heads, head_width))
    key_IANH, value_IANH = (
        ops.reshape(_with_neighbours(of, tile), (-1, 3 * tile, num_heads, head_width)) for of in heads[1:]
    )
    # Tokens outside of the pack are of no sequence, and neither is padding
    ids_BnT, ids_BnA = (cut(sequence_ids_BS, tile, -1) for cut in (_tiles, _with_neighbours))
    distance_TA = np.arange(tile)[:, None] + tile - np.arange(3 * tile)
    sees_BnTA = ops.logical_and(ids_BnT[..., None] == ids_BnA[:, :, None], np.abs(distance_TA) <= window)
    sees_I1TA = ops.reshape(sees_BnTA, (-1, 1, tile, 3 * tile))

    scores_INTA = ops.cast(attention_scores(query_ITNH, key_IANH), "float32")
    probs_INTA = ops.softmax(ops.where(sees_I1TA, scores_INTA, MASKED_SCORE), axis=-1)
    # Packs come first in what is dropped, so that a part of a batch drops the units of the whole
    shape = (num_tiles, num_heads, tile, 3 * tile)
    probs_BnNTA = ops.reshape(ops.cast(probs_INTA, value_IANH.dtype), (-1, *shape))
    probs_INTA = ops.reshape(dropout(probs_BnNTA, training=training), (-1, *shape[1:]))
    found_ITNH = weighted_values(probs_INTA, value_IANH)
    return ops.reshape(found_ITNH, (-1, num_tiles * tile, num_heads, head_width))[:, :length]


def _tiles(values_BS, tile, fill=0, num_outside=0):
    """Values `[B, S, ...]` in tiles `[B, n, T, ...]`, with tiles of the fill before and after."""
    length, rest = values_BS.shape[1], values_BS.shape[2:]
    before = num_outside * tile
    widths = ((0, 0), (before, before + -length % tile), *[(0, 0)] * len(rest))
    padded = ops.pad(values_BS, widths, constant_values=fill)
    return ops.reshape(padded, (-1, padded.shape[1] // tile, tile, *rest))


def _with_neighbours(values_BS, tile, fill=0):
    """Values `[B, S, ...]` of each tile and its two neighbours: `[B, n, A, ...]`."""
    tiles = _tiles(values_BS, tile, fill, num_outside=1)
    return ops.concatenate([tiles[:, :-2], tiles[:, 1:-1], tiles[:, 2:]], axis=2)


def rotation(position_ids_BS, theta, head_width):
    """Cosines and sines of the rotary angles of positions: float32 `[B, S, 1, R]` each."""
    frequencies_R = (theta ** -(np.arange(0, head_width, 2) / head_width)).astype("float32")
    angles_BS1R = ops.cast(position_ids_BS, "float32")[:, :, None, None] * frequencies_R
    return ops.cos(angles_BS1R), ops.sin(angles_BS1R)


def rotate(heads_BSNH, cosines_BS1R, sines_BS1R):
    """Queries or keys, turned by their positions, in float32."""
    first_BSNR, second_BSNR = ops.split(ops.cast(heads_BSNH, "float32"), 2, axis=-1)
    turned = (
        first_BSNR * cosines_BS1R - second_BSNR * sines_BS1R,
        second_BSNR * cosines_BS1R + first_BSNR * sines_BS1R,
    )
    return ops.cast(ops.concatenate(turned, axis=-1), heads_BSNH.dtype)


class GatedFeedForward(keras.layers.Layer):
    """Two-layer network on each token, whose inner values pass gates."""

    def __init__(self, config, layout=ONE_DEVICE):
        super().__init__(name="feed_forward")
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

    def call(self, hidden_BSD, training=None):
        inner_BSF, gate_BSF = self.layout.apply_in_parts(self.intermediate, 2, hidden_BSD)
        inner_BSF = self.activation(inner_BSF) * gate_BSF
        return self.output_dense(self.dropout(inner_BSF, training=training))


class ModernBertBlock(keras.layers.Layer):
    """Norm, attention, residual; norm, feed-forward network, residual. The residual stays float32.

    The first block has no norm before its attention: the embeddings end in one.
    """

    def __init__(self, config, number, attend=None, layout=ONE_DEVICE):
        super().__init__(name=f"layer_{number}", autocast=False)
        self.attention_norm = layer_norm(config, "attention_LayerNorm") if number else None
        is_global = config.layer_types[number] == FULL_ATTENTION
        self.attention = RotaryAttention(config, is_global, attend, layout)
        self.feed_forward_norm = layer_norm(config, "feed_forward_LayerNorm")
        self.feed_forward = GatedFeedForward(config, layout=layout)

    def build(self, hidden_shape, *_):
        for layer in (self.attention_norm, self.attention, self.feed_forward_norm, self.feed_forward):
            if layer is not None:
                layer.build(hidden_shape)

    def call(self, hidden_BSD, context, training=None):
        """float32 `[B, S, D]` to the same."""
        normed_BSD = hidden_BSD if self.attention_norm is None else self.attention_norm(hidden_BSD)
        found_BSD = self.attention(normed_BSD, context=context, training=training)
        hidden_BSD = hidden_BSD + ops.cast(found_BSD, "float32")
        found_BSD = self.feed_forward(self.feed_forward_norm(hidden_BSD), training=training)
        return hidden_BSD + ops.cast(found_BSD, "float32")


class PredictionHead(keras.layers.Layer):
    """Linear layer, activation and norm, which all heads begin with."""

    def __init__(self, config, name, layout=ONE_DEVICE, autocast=True):
        super().__init__(name=name, autocast=autocast)
        self.config = config
        self.layout = layout
        width, weights, use_bias = config.hidden_size, output_weights(config), config.classifier_bias
        self.transform = layout.dense(width, config, "transform", weights=weights, use_bias=use_bias)
        self.activation = activation(config.classifier_activation)
        self.norm = layer_norm(config, "LayerNorm")

    def build(self, hidden_shape, *_):
        self.transform.build(hidden_shape)
        self.norm.build(hidden_shape)

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
        logits_BPV = self.layout.float32_logits(gathered_BPD, embeddings_VD)
        if self.bias_V is not None:
            logits_BPV = logits_BPV + self.bias_V
        return self.layout.without_padding(logits_BPV, self.config.vocab_size)


class ClassifierHead(PredictionHead):
    """Class logits of tokens or of sequences: float32 `[B, Q, C]`."""

    def __init__(self, config, num_classes, name, layout=ONE_DEVICE):
        super().__init__(config, name, layout)
        weights = CutoffNormal(config, config.hidden_size**-0.5)
        self.classifier = layout.dense(num_classes, config, "classifier", "float32", weights)
        self.dropout = Dropout(config.classifier_dropout)

    def build(self, hidden_shape, *_):
        super().build(hidden_shape)
        self.classifier.build(hidden_shape)

    def call(self, hidden_BQD, training=None):
        return self.classifier(self.dropout(super().call(hidden_BQD), training=training))
