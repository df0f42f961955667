"""Attention mask of packs, as models of transformers take it.

Legend: S pack length.
"""

import torch


def block_attention_mask(sequence_ids, dtype=torch.float32):
    """The 4D `attention_mask` that lets each token see its own sequence alone.

    It is added to the scores: a boolean mask would do for `attn_implementation="sdpa"`, but "eager" adds it
    too, and then nothing is masked. Padding sees padding, so that no row of the softmax is empty.

        sequence_ids   [1 1 2 0]   ->   [  0   0 min min]
                                        [  0   0 min min]
                                        [min min   0 min]
                                        [min min min   0]

    Args:
        sequence_ids: Whole numbers `[..., S]`: the token's sequence 1..K, 0 is padding.
        dtype: Of the model's computation; `min` is its lowest number, after whose softmax 0 is left exactly.

    Returns:
        `[..., 1, S, S]` of the dtype, on the device of `sequence_ids`.
    """
    is_own = sequence_ids[..., :, None] == sequence_ids[..., None, :]
    mask = torch.zeros(is_own.shape, dtype=dtype, device=sequence_ids.device)
    return mask.masked_fill(~is_own, torch.finfo(dtype).min).unsqueeze(-3)
