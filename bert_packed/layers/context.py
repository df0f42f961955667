"""Sequence ids, positions and mask of a batch of packs, and what encoders compute with them.

Legend: B packs per batch, S pack length, D model width, N heads, H head width, Q = P or K positions to gather
(P predictions, K sequences per pack).
"""

import functools

from keras import ops

from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.layers.fast_gradients import (
    attention_scores,
    by_argument,
    gradients_are_for,
    weighted_values,
)
from bert_packed.layers.layout import ONE_DEVICE

MASKED_SCORE = -1e9  # exp(MASKED_SCORE - any score) is exactly 0 in float32 and bfloat16


class PackContext:
    """Sequence and position of each token of a batch of packs; one object for all blocks."""

    def __init__(self, sequence_ids_BS, position_ids_BS):
        self.sequence_ids_BS = sequence_ids_BS  # 1..K, 0 is padding; None where only positions are read
        # Positions begin at 0 in every sequence; None where a Mamba is to treat each pack as one sequence
        self.position_ids_BS = position_ids_BS
        self._mask_B1SS = None

    @property
    def mask_B1SS(self):  # noqa: N802  named as a variable of its shape is
        """bool, True where both tokens are of one sequence."""
        if self._mask_B1SS is None:
            self._mask_B1SS = attention_mask(self.sequence_ids_BS)
        return self._mask_B1SS

    def hide(self, scores_BNSS):
        """Attention scores, so low between sequences that a softmax gives exactly 0 there."""
        # Scores * mask would not do: a score of 0 keeps a share of the softmax, and neighbours would leak in
        return ops.where(self.mask_B1SS, scores_BNSS, MASKED_SCORE)

    def apart(self):
        """The same context without its mask, for a program inside the program."""
        # A mask that is made inside, as in a block that is recomputed, must not be used outside
        return PackContext(self.sequence_ids_BS, self.position_ids_BS)


def ablated_context(config, sequence_ids_BS, position_ids_BS):
    """`PackContext` of the given arrays, or of what the ablations in a model's config make of them."""
    if config.ablation_no_attention_mask:
        sequence_ids_BS = ops.minimum(sequence_ids_BS, 1)  # padding stays apart, as in BERT
    return PackContext(sequence_ids_BS, ablated_positions(config, position_ids_BS))


def ablated_positions(config, position_ids_BS):
    """The given positions, unless an ablation lets them count through the pack."""
    if not config.ablation_no_position_reset:
        return position_ids_BS
    return ops.zeros_like(position_ids_BS) + ops.arange(position_ids_BS.shape[1], dtype="int32")


def gather_tokens(hidden_BSD, positions_BQ):
    """Hidden states at int32 positions of each pack: float `[B, Q, D]`.

    hidden [[a b c d]], positions [[3 0 0]]   ->   [[d a a]]      unused slots hold 0
    """
    # The faster gather from `[B * S, D]` would collect a batch that is spread over devices. On a GPU the
    # gradient of the other starts with zeros, which XLA writes out and reads in every dropout
    if gradients_are_for("gpu"):
        packs, length, width = hidden_BSD.shape
        first_B1 = length * ops.arange(packs, dtype="int32")[:, None]
        return ops.take(ops.reshape(hidden_BSD, (-1, width)), first_B1 + positions_BQ, axis=0)
    return ops.take_along_axis(hidden_BSD, positions_BQ[:, :, None], axis=1)


def activation(name):
    """The function named by a config's `hidden_act`."""
    return {
        "gelu": lambda x: by_argument(functools.partial(ops.gelu, approximate=False), x),
        "gelu_new": lambda x: by_argument(functools.partial(ops.gelu, approximate=True), x),
        "relu": ops.relu,
    }[name]


def attend_in_sequences(heads, context, dropout, training=None, attend=None, layout=ONE_DEVICE):
    """Attention of all tokens to those of their own sequence: float `[B, S, N, H]`.

    `heads` are queries, scaled already, keys and values `[B, S, N, H]`; `attend` and `layout` are as in
    `SelfAttention`.
    """
    query_BSNH, key_BSNH, value_BSNH = heads
    if attend is None:
        # Scores and softmax are float32: the sum over a row has up to S terms
        scores_BNSS = context.hide(ops.cast(attention_scores(query_BSNH, key_BSNH), "float32"))
        probs_BNSS = ops.cast(ops.softmax(scores_BNSS, axis=-1), value_BSNH.dtype)
        return weighted_values(dropout(probs_BNSS, training=training), value_BSNH)
    given = {}
    if training and dropout.rate > 0:
        batch, length, num_heads, _ = ops.shape(query_BSNH)
        given["dropout"] = dropout.rows((batch, num_heads, length, length))
    return layout.attend(attend, query_BSNH, key_BSNH, value_BSNH, context.sequence_ids_BS, **given)


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
