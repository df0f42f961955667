"""Attention in a window, computed in bands, and rotary positions.

Legend: B packs per batch, S pack length, N heads, H head width, R = H / 2 angles of a head, T tokens of a
tile, n tiles of a pack, I = B * n tiles of a batch, A = 3 * T tokens around a tile.
"""

import numpy as np
from keras import ops

from bert_packed.layers.context import MASKED_SCORE
from bert_packed.layers.cpu_gradients import attention_scores, weighted_values


def attend_in_window(heads, sequence_ids_BS, window, dropout, training=None):
    """Attention of all tokens to those of their own sequence at most `window` away: float `[B, S, N, H]`.

    A pack is cut into tiles of `window` tokens. Each attends to itself and its two neighbours, so time and
    memory grow with S times the window. For a window of 2, the keys of the middle tile's queries:

        sequence ids           1 1 | 1 2 | 2 2
        key is near, query 1   1 1   1 1   1 0
                     query 2   0 1   1 1   1 1
        and of its sequence    1 1   1 0   0 0
                               0 0   0 1   1 1

    Args:
        heads: Queries, scaled already, keys and values, `[B, S, N, H]`.
        sequence_ids_BS: int32, 1..K, 0 is padding, which attends to padding.
        window: Tokens on each side, from 0.
        dropout: `Dropout` layer of the probabilities, which it gets as `[B, n, N, T, A]`.
    """
    length, num_heads, head_width = heads[0].shape[1:]
    tile = max(1, min(window, length))
    num_tiles = -(-length // tile)
    query_ITNH = ops.reshape(_tiles(heads[0], tile), (-1, tile, num_heads, head_width))
    key_IANH, value_IANH = (
        ops.reshape(_with_neighbours(of, tile), (-1, 3 * tile, num_heads, head_width)) for of in heads[1:]
    )
    # Tokens outside of the pack are of no sequence, padding neither
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
