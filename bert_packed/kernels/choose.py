"""Choice of the fused Pallas kernels that compute attention, convolution and scan on GPUs and TPUs.

Kernels of attention need no S x S array: memory grows with S. They compute the scores of one tile of queries
and keys at a time, forward and backward, and compare sequence ids there. On packs as in records they skip
tiles in which no pair may attend. They drop the units that the dense path drops. A Mamba does not attend: its
kernels compute the convolution and the scan.

Legend: B packs per batch, S pack length, N heads, H head width.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util

from bert_packed.architectures.registry import family_of
from bert_packed.core.settings import InputError

# Tokens: the shortest tile of the kernel for TPUs, a multiple of the GPU's, and a chunk of the scan's
TILE = 128


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Choice of what a model computes in fused kernels."""

    options: dict  # of `packed_model.build_model`, a function each; {} for the plain forms
    description: str  # for the log, with the reason where the platform's kernel was not taken


def choose_kernels(attention, model_config, max_seq_length, platform):
    """Choose between plain forms and the fused kernels of this backend and a platform: `Kernels`.

    "auto" takes those of the config's `kernels` that can do the same work, and "dense" none. Raises
    `InputError` where "flash" cannot be honoured: 128 must divide `max_seq_length`.
    """
    import keras  # not above: a command chooses the backend first

    kernel_name = platform if keras.backend.backend() == "jax" else keras.backend.backend()
    reason = _no_kernel(kernel_name)
    known = {} if attention == "dense" or reason else KERNELS[kernel_name]
    attends = not model_config.without_attention
    wanted = [name for name in model_config.kernels if attends or name in OPERATORS]
    options = {name: known[name] for name in wanted if name in known}
    if not attends:
        if attention == "flash":
            kind = family_of(model_config).name
            raise InputError(
                f"`attention` must not be flash for a {kind}, which does not attend. Received: flash."
            )
        description = f"none: {model_config.without_attention}"
        if options:
            operators = " and ".join(OPERATORS[name] for name in options)
            description += f"; {operators} in fused {kernel_name.upper()} kernels of Pallas"
        return Kernels(options, description)
    if not reason and max_seq_length % TILE:
        reason = f"{TILE} does not divide the length of packs. Received: {max_seq_length}"
    if attention == "flash" and reason:
        raise InputError(f"`attention` must not be flash where {reason}.")
    if attention == "dense" or reason:
        is_reported = attention == "auto" and kernel_name in KERNELS
        return Kernels({}, f"dense: no flash where {reason}" if is_reported else "dense")
    return Kernels(options, f"flash: the fused {kernel_name.upper()} kernel of Pallas")


def _imported(module, function):
    """A function of a module that needs JAX, imported where it is called."""

    def call(*tensors, **options):
        kernels = importlib.import_module(f"bert_packed.kernels.{module}")
        return getattr(kernels, function)(*tensors, **options)

    return call


# The keys are JAX's name of the platform, and the option of the model
KERNELS = {
    "gpu": {
        "attend": _imported("gpu.attention", "attend"),
        "scan": _imported("gpu.selective_scan", "ssm_pack"),
    },
    "tpu": {
        "attend": _imported("tpu.attention", "attend"),
        "convolve": _imported("tpu.convolution", "conv1d_pack"),
        "scan": _imported("tpu.selective_scan", "ssm_pack"),
        "duality": _imported("tpu.duality", "ssd_pack"),
    },
}
# Options of models that do not attend stand for these computations
OPERATORS = {"convolve": "convolution", "scan": "scan", "duality": "scan"}


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
