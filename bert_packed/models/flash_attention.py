"""Attention by fused Pallas kernels for GPUs and TPUs, without an S x S array.

Both compute the scores of one tile of queries and keys at a time, forward and backward, and compare sequence
ids there. Of packs as in records they skip tiles in which no pair may attend. They drop the units that the
dense path drops. Memory grows with S. `packed_attention` is for TPUs, `gpu_attention` for GPUs.

Legend: B packs per batch, S pack length, N heads, H head width.
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable

import keras

from bert_packed.config import family_of
from bert_packed.core.settings import InputError

TILE = 128  # tokens: the shortest tile of the kernel for TPUs, and a multiple of the GPU's


@dataclasses.dataclass(frozen=True)
class Attention:
    """A model's attention."""

    attend: Callable | None  # as in `layers.SelfAttention`
    description: str  # for the log, with the reason where the platform's kernel was not taken


def choose_attention(attention, model_config, max_seq_length, platform):
    """Choose between dense scores and the fused kernel of this backend and a platform: `Attention`.

    "auto" takes the kernel where it can do the same work. Raises `InputError` where "flash" cannot be
    honoured: 128 must divide `max_seq_length`.
    """
    if model_config.without_attention:
        if attention == "flash":
            kind = family_of(model_config).name
            raise InputError(
                f"`attention` must not be flash for a {kind}, which does not attend. Received: flash."
            )
        return Attention(None, f"none: {model_config.without_attention}")
    kernel_name = platform if keras.backend.backend() == "jax" else keras.backend.backend()
    reason = _obstacle(kernel_name, max_seq_length)
    if attention == "flash" and reason:
        raise InputError(f"`attention` must not be flash where {reason}.")
    if attention == "dense" or reason:
        is_news = attention == "auto" and kernel_name in KERNELS
        return Attention(None, f"dense: no flash where {reason}" if is_news else "dense")
    return Attention(KERNELS[kernel_name], f"flash: the fused {kernel_name.upper()} kernel of Pallas")


def attend_on_gpu(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
    """Attention inside each sequence by `gpu_attention.attend`, which needs JAX."""
    from bert_packed.models import gpu_attention

    return gpu_attention.attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout)


def attend_on_tpu(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
    """Attention inside each sequence by `packed_attention.attend`, which needs JAX."""
    from bert_packed.models import packed_attention

    return packed_attention.attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout)


KERNELS = {"gpu": attend_on_gpu, "tpu": attend_on_tpu}  # by JAX's name of the platform


def _obstacle(kernel_name, max_seq_length):
    """The reason why the fused kernel cannot be taken, or None."""
    if kernel_name not in KERNELS:
        return f"the platform is not a GPU or TPU under KERAS_BACKEND=jax. Received: {kernel_name}"
    if kernel_name == "gpu" and not has_triton():
        version = importlib.metadata.version("jax")
        return f"JAX has no Pallas for Triton, as 0.10 to 0.12 have. Received: jax {version}"
    if max_seq_length % TILE:
        return f"{TILE} does not divide the length of packs. Received: {max_seq_length}"
    return None


def has_triton():
    """True if this JAX can compile Pallas kernels by Triton; it announces the removal from 0.11 on."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
