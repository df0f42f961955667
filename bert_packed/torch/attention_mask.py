"""Attention mask of packs for models of transformers."""

import torch


def block_attention_mask(sequence_ids, dtype=torch.float32):
    """4D additive mask `[..., 1, S, S]`, on the device of `sequence_ids`: each token sees its own sequence
    only.

        sequence_ids   [1 1 2 0]   ->   [  0   0 min min]
                                        [  0   0 min min]
                                        [min min   0 min]
                                        [min min min   0]

    Args:
        sequence_ids: Integers `[..., S]`: the token's sequence 1..K, 0 is padding.
        dtype: The model's dtype of computation; `min` is its lowest finite number.
    """
    # Padding sees padding: a softmax over nothing would be NaN
    is_own = sequence_ids[..., :, None] == sequence_ids[..., None, :]
    # Not boolean: "sdpa" takes that, but "eager" adds it to the scores, and then nothing is masked
    mask = torch.zeros(is_own.shape, dtype=dtype, device=sequence_ids.device)
    return mask.masked_fill(~is_own, torch.finfo(dtype).min).unsqueeze(-3)
