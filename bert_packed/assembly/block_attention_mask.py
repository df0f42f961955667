"""Attention mask of packs, for arrays of any library."""

import numpy as np

from bert_packed.core.settings import InputError


def attention_mask(sequence_ids, dtype=None):
    """Block-diagonal mask, in which each token sees its own sequence only: `[..., 1, S, S]`.

        sequence_ids [1 1 2 0]   ->   [1 1 0 0]     with a dtype   [  0   0 min min]
                                      [1 1 0 0]                    [  0   0 min min]
                                      [0 0 1 0]                    [min min   0 min]
                                      [0 0 0 1]                    [min min min   0]

    Args:
        sequence_ids: Integers `[..., S]`, the token's sequence 1..K, 0 is padding, which sees padding. Lists,
            or an array of NumPy, torch, JAX, TensorFlow or Keras; the mask is one of the same.
        dtype: None for bool, True where a token may look. Or a floating type of NumPy, torch or JAX, for a
            mask to be added to scores; `min` is its lowest finite number. Models of transformers with "eager"
            attention need this one: a bool would be added, too, and mask nothing.

    Raises:
        InputError: `dtype` is given for an array of another library.
    """
    ids = sequence_ids if hasattr(sequence_ids, "shape") else np.asarray(sequence_ids)
    # Padding sees padding: a softmax over nothing would be NaN
    is_own = ids[..., None, :, None] == ids[..., None, None, :]
    if dtype is None:
        return is_own
    library = type(ids).__module__.partition(".")[0]
    if library == "torch":
        import torch  # an extra, as JAX

        mask = torch.zeros(is_own.shape, dtype=dtype, device=ids.device)
        return mask.masked_fill_(~is_own, torch.finfo(dtype).min)
    if library in ("jax", "jaxlib"):
        from jax import numpy as jnp

        return jnp.where(is_own, 0, jnp.finfo(dtype).min).astype(dtype)
    if library != "numpy":
        raise InputError(f"`dtype` must be left out for arrays of {library}. Received: {dtype}.")
    return np.where(is_own, 0, np.finfo(dtype).min).astype(dtype)
