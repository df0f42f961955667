"""Parts of any transformer encoder on packs: gathered tokens, activations, attention inside sequences.

Legend: B packs per batch, S pack length, D model width, N heads, H head width, Q = P or K positions to gather
(P predictions, K sequences per pack).
"""

from keras import ops

from bert_packed.layers.cpu_gradients import attention_scores, weighted_values
from bert_packed.layers.layout import ONE_DEVICE


def gather_tokens(hidden_BSD, positions_BQ):
    """Hidden states at int32 positions of each pack: float `[B, Q, D]`.

    hidden [[a b c d]], positions [[3 0 0]]   ->   [[d a a]]      unused slots hold 0
    """
    # Along the axis: the faster gather from `[B * S, D]` would collect a batch that is spread over devices
    return ops.take_along_axis(hidden_BSD, positions_BQ[:, :, None], axis=1)


def activation(name):
    """The function named by a config's `hidden_act`."""
    return {
        "gelu": lambda x: ops.gelu(x, approximate=False),
        "gelu_new": lambda x: ops.gelu(x, approximate=True),
        "relu": ops.relu,
    }[name]


def attend_in_sequences(heads, context, dropout, training=None, attend=None, layout=ONE_DEVICE):
    """Attention of all tokens to those of their own sequence: float `[B, S, N, H]`.

    Args:
        heads: Queries, scaled already, keys and values, `[B, S, N, H]`.
        context: `PackContext`.
        dropout: `Dropout` layer of the probabilities.
        attend, layout: As in `SelfAttention`.
    """
    query_BSNH, key_BSNH, value_BSNH = heads
    if attend is None:
        # In float32, scores and softmax: the sum over a row has up to S terms
        scores_BNSS = context.hide(ops.cast(attention_scores(query_BSNH, key_BSNH), "float32"))
        probs_BNSS = ops.cast(ops.softmax(scores_BNSS, axis=-1), value_BSNH.dtype)
        return weighted_values(dropout(probs_BNSS, training=training), value_BSNH)
    given = {}
    if training and dropout.rate > 0:
        batch, length, num_heads, _ = ops.shape(query_BSNH)
        given["dropout"] = dropout.rows((batch, num_heads, length, length))
    return layout.attend(attend, query_BSNH, key_BSNH, value_BSNH, context.sequence_ids_BS, **given)
