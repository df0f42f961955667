"""Attention by the platform's fused kernel: sequence ids compared tile by tile, without an S x S array.

The kernels are JAX's own, in Pallas: one for GPUs, one for TPUs. Both compute the scores of one tile of
queries and keys at a time, forward and backward, so that memory grows with S; the dense mask and scores grow
with S x S. Neither skips tiles in which no pair may attend.

Legend: B packs per batch, S pack length, N heads, H head width.
"""

import dataclasses
from collections.abc import Callable

import keras

from bert_packed.config import family_of
from bert_packed.core.settings import InputError

TILE = 128  # tokens, of both kernels


@dataclasses.dataclass(frozen=True)
class Attention:
    """A model's attention.

    Attributes:
        attend: As in `layers.SelfAttention`: None for dense scores, or a function.
        description: For people, with the reason where the platform has a kernel that was not taken.
    """

    attend: Callable | None
    description: str


def choose_attention(attention, model_config, max_seq_length):
    """Choose between dense scores and the fused kernel of this backend and platform.

    | `attention` | |
    |---|---|
    | dense | scores and mask, on every platform |
    | flash | the fused kernel, or an error that says why not |
    | auto | the fused kernel where it can do the same work, else dense |

    Args:
        attention: "auto", "dense" or "flash".
        model_config: Config of any family; the kernels have no attention dropout.
        max_seq_length: S.

    Returns:
        `Attention`.

    Raises:
        InputError: "flash" cannot be honoured.
    """
    if model_config.without_attention:
        if attention == "flash":
            kind = family_of(model_config).name
            raise InputError(
                f"`attention` must not be flash for a {kind}, which does not attend. Received: flash."
            )
        return Attention(None, f"none: {model_config.without_attention}")
    kernel_name = _kernel_name()
    reason = _obstacle(kernel_name, model_config, max_seq_length)
    if attention == "flash" and reason:
        raise InputError(f"`attention` must not be flash where {reason}.")
    if attention == "dense" or reason:
        is_news = attention == "auto" and kernel_name in KERNELS
        return Attention(None, f"dense: no flash where {reason}" if is_news else "dense")
    return Attention(KERNELS[kernel_name], f"flash: the fused {kernel_name.upper()} kernel of Pallas")


def attend_on_gpu(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, interpret=False):
    """Attention inside each sequence by the Triton kernel.

    Args:
        query_BSNH: float `[B, S, N, H]`, scaled already; 128 divides S.
        key_BSNH, value_BSNH: Likewise.
        sequence_ids_BS: int32 `[B, S]`, 1..K, 0 is padding, which attends to padding.
        interpret: Run it as plain JAX on any platform: for tests.

    Returns:
        float `[B, S, N, H]`.
    """
    from jax.experimental.pallas.ops.gpu import attention

    # By position: the kernel's name of these ids means sentences A and B in BERT
    return attention.mha(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, interpret=interpret)


def attend_on_tpu(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS):
    """Attention inside each sequence by the Mosaic kernel; arguments as in `attend_on_gpu`."""
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention

    query_BNSH, key_BNSH, value_BNSH = (
        jnp.swapaxes(values, 1, 2) for values in (query_BSNH, key_BSNH, value_BSNH)
    )
    ids = flash_attention.SegmentIds(sequence_ids_BS, sequence_ids_BS)
    # Fourth, no bias: it would be a dense mask again
    context_BNSH = flash_attention.flash_attention(query_BNSH, key_BNSH, value_BNSH, None, ids)
    return jnp.swapaxes(context_BNSH, 1, 2)


KERNELS = {"gpu": attend_on_gpu, "tpu": attend_on_tpu}  # by JAX's name of the platform


def _kernel_name():
    """JAX's name of the platform, or the name of another backend."""
    if keras.backend.backend() != "jax":
        return keras.backend.backend()
    import jax

    return jax.default_backend()


def _obstacle(kernel_name, model_config, max_seq_length):
    """The reason why the fused kernel cannot be taken, as text, or None."""
    if kernel_name not in KERNELS:
        return f"the platform is not a GPU or TPU under KERAS_BACKEND=jax. Received: {kernel_name}"
    rate = model_config.attention_probs_dropout_prob
    if rate > 0:
        return f"attention has dropout, which the kernel lacks. Received: attention_probs_dropout_prob={rate}"
    if max_seq_length % TILE:
        return f"{TILE} does not divide the length of packs. Received: {max_seq_length}"
    return None
