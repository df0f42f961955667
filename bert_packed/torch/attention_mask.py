"""Attention mask of packs, as models of transformers take it."""

import torch


def block_attention_mask(sequence_ids, dtype=torch.float32):
    """The 4D `attention_mask` that lets each token see its own sequence alone.

        sequence_ids   [1 1 2 0]   ->   [  0   0 min min]
                                        [  0   0 min min]
                                        [min min   0 min]
                                        [min min min   0]

    Args:
        sequence_ids: Integers `[..., S]`: the token's sequence 1..K, 0 is padding.
        dtype: Of the model's computation; `min` is its lowest number, which a softmax makes exactly 0.

    Returns:
        `[..., 1, S, S]` of the dtype, on the device of `sequence_ids`.
    """
    # Padding sees padding: a softmax over nothing would be NaN
    is_own = sequence_ids[..., :, None] == sequence_ids[..., None, :]
    # Not boolean: "sdpa" takes that, but "eager" adds it to the scores, and then nothing is masked
    mask = torch.zeros(is_own.shape, dtype=dtype, device=sequence_ids.device)
    return mask.masked_fill(~is_own, torch.finfo(dtype).min).unsqueeze(-3)
