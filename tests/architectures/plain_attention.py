"""Attention of packs by its definition.

Legend: B packs per batch, S pack length, N heads, H head width.
"""

import numpy as np
from keras import ops


def attend_plainly(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, window=None):
    """Attention by all scores and one mask; `window` limits the distance of a query to its keys."""
    ids_BS = ops.convert_to_tensor(sequence_ids_BS)
    places_S = np.arange(ids_BS.shape[1])
    is_near_SS = np.abs(places_S[:, None] - places_S) <= (len(places_S) if window is None else window)
    sees_BSS = ops.logical_and(ids_BS[:, :, None] == ids_BS[:, None], is_near_SS)
    scores_BNSS = ops.einsum("bqnh,bknh->bnqk", query_BSNH, key_BSNH)
    probs_BNSS = ops.softmax(ops.where(sees_BSS[:, None], scores_BNSS, -1e9), axis=-1)
    return ops.einsum("bnqk,bknh->bqnh", probs_BNSS, value_BSNH)
