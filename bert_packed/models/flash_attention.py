"""Attention by fused Pallas kernels for GPUs and TPUs, without an S x S array.

Both compute the scores of one tile of queries and keys at a time, forward and backward, and compare sequence
ids there. Of packs as in records they skip tiles in which no pair may attend. They drop the units that the
dense path drops. Memory grows with S. `packed_attention` is for TPUs, `gpu_attention` for GPUs.

A Mamba does not attend. The kernels of its scan, `tpu_scan` and `gpu_scan`, are chosen here as well.

Legend: B packs per batch, S pack length, N heads, H head width.
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable

import keras

from bert_packed.config import family_of
from bert_packed.core.settings import InputError

# Tokens: the shortest tile of the kernel for TPUs, a multiple of the GPU's, and a chunk of the scan's
TILE = 128


@dataclasses.dataclass(frozen=True)
class Attention:
    """A model's attention, or the scan that it has instead."""

    attend: Callable | None  # as in `layers.SelfAttention`
    description: str  # for the log, with the reason where the platform's kernel was not taken
    scan: Callable | None = None  # as in `mamba.MambaMixer`


def choose_attention(attention, model_config, max_seq_length, platform):
    """Choose between dense scores and the fused kernel of this backend and a platform: `Attention`.

    "auto" takes the kernel where it can do the same work; for a Mamba, that of its scan. Raises `InputError`
    where "flash" cannot be honoured: 128 must divide `max_seq_length`.
    """
    kernel_name = platform if keras.backend.backend() == "jax" else keras.backend.backend()
    if model_config.without_attention:
        if attention == "flash":
            kind = family_of(model_config).name
            raise InputError(
                f"`attention` must not be flash for a {kind}, which does not attend. Received: flash."
            )
        description = f"none: {model_config.without_attention}"
        if attention == "dense" or not model_config.has_selective_scan or _no_kernel(kernel_name):
            return Attention(None, description)
        description += f", in the fused {kernel_name.upper()} kernel of Pallas"
        return Attention(None, description, SCANS[kernel_name])
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


def scan_on_gpu(*tensors):
    """A selective scan of packs by `gpu_scan.ssm_pack`, which needs JAX."""
    from bert_packed.models import gpu_scan

    return gpu_scan.ssm_pack(*tensors)


def scan_on_tpu(*tensors):
    """A selective scan of packs by `tpu_scan.ssm_pack`, which needs JAX."""
    from bert_packed.models import tpu_scan

    return tpu_scan.ssm_pack(*tensors)


# By JAX's name of the platform
KERNELS = {"gpu": attend_on_gpu, "tpu": attend_on_tpu}
SCANS = {"gpu": scan_on_gpu, "tpu": scan_on_tpu}


def _obstacle(kernel_name, max_seq_length):
    """The reason why the fused kernel cannot be taken, or None."""
    if reason := _no_kernel(kernel_name):
        return reason
    if max_seq_length % TILE:
        return f"{TILE} does not divide the length of packs. Received: {max_seq_length}"
    return None


def _no_kernel(kernel_name):
    """The reason why there is none, or None."""
    if kernel_name not in KERNELS:
        return f"the platform is not a GPU or TPU under KERAS_BACKEND=jax. Received: {kernel_name}"
    if kernel_name == "gpu" and not has_triton():
        version = importlib.metadata.version("jax")
        return f"JAX has no Pallas for Triton, as 0.10 to 0.12 have. Received: jax {version}"
    return None


def has_triton():
    """True if this JAX can compile Pallas kernels by Triton; it announces the removal from 0.11 on."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
