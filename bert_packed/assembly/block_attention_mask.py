"""Attention mask of packs, for arrays of any library."""

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.packing.arguments import as_array, shown

IDS_RULE = "be whole numbers [..., S]"


def attention_mask(sequence_ids, dtype=None):
    """Block-diagonal mask, in which each token sees its own sequence only: `[..., 1, S, S]`.

    Section 3.2.2 and Figure 2 of "Efficient Sequence Packing without Cross-contamination".

        sequence_ids [1 1 2 0]   ->   [1 1 0 0]     with a dtype   [  0   0 min min]
                                      [1 1 0 0]                    [  0   0 min min]
                                      [0 0 1 0]                    [min min   0 min]
                                      [0 0 0 1]                    [min min min   0]

    Args:
        sequence_ids: Integers `[..., S]`, the token's sequence 1..K, 0 is padding, which sees padding. Lists,
            or an array of NumPy, torch, JAX, TensorFlow or Keras; the mask is one of the same.
        dtype: Bool (None), True where a token may look; or a floating type of NumPy, torch or JAX, for a
            mask to be added to scores; `min` is its lowest finite number. Models of transformers with "eager"
            attention need this one: a bool would be added, too, and mask nothing.

    Raises:
        ValueError: `sequence_ids` are no such array; `dtype` is no floating type of the array's library, or
            that is another library.
    """
    ids = sequence_ids
    if isinstance(ids, np.ndarray) or not hasattr(ids, "shape"):
        ids = as_array(ids, "`sequence_ids`", IDS_RULE, kinds="biu")
    if ids.shape == ():
        raise InputError(f"`sequence_ids` must {IDS_RULE}. Received: {shown(ids)}.")
    # Padding sees padding: a softmax over nothing would be NaN
    is_own = ids[..., None, :, None] == ids[..., None, None, :]
    if dtype is None:
        return is_own
    library = type(ids).__module__.partition(".")[0]
    if library == "torch":
        import torch as xp  # an extra, as JAX
    elif library in ("jax", "jaxlib"):
        from jax import numpy as xp
        from jax.dtypes import canonicalize_dtype
    elif library == "numpy":
        xp = np
    else:
        raise InputError(f"`dtype` must be left out for arrays of {library}. Received: {dtype}.")
    try:
        if library == "numpy":
            dtype = np.dtype(dtype)  # `finfo` takes a number for its type
        elif library != "torch":
            dtype = canonicalize_dtype(dtype)  # float64 is float32 there, unless it is switched on
        lowest = xp.finfo(dtype).min
    except (TypeError, ValueError) as error:
        raise InputError(
            f"`dtype` must be a floating type of {xp.__name__}. Received: {shown(dtype)}."
        ) from error
    if library == "torch":
        return xp.zeros(is_own.shape, dtype=dtype, device=ids.device).masked_fill_(~is_own, lowest)
    return xp.where(is_own, 0, lowest).astype(dtype)
