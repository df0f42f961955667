"""Devices that a step is compiled for: those of this process, or accelerators that need not be here.

XLA compiles for a device by its description alone. libtpu has those of TPUs; a GPU's is written below, and
compiled for by JAX's CUDA plugin, which needs no driver. Both come with `pip install -e ".[aot]"`. TensorFlow
compiles for the devices that it sees alone: JAX's compiler of an absent device gets its program.
"""

import dataclasses
import importlib.util
import math
import os
import re

from bert_packed.architectures.registry import FLOAT32, MIXED
from bert_packed.core.settings import InputError

# The driver of an NVIDIA H100 SXM5 with 80 GB describes it to XLA in this way
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# libtpu would ask Google's cloud which slice it is on, and take the devices for itself
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}

# libtpu says this where a program does not fit a chip's memory. Smaller memories run out by the same status
FULL = re.compile(
    r"RESOURCE_EXHAUSTED.*?(?:Used (\S+) of (\S+) hbm|temporaries \((\S+)\) exceeds available HBM \((\S+)\))"
)


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A kind of device that can be compiled for; figures are of one, from its maker's data sheet."""

    platform: str  # JAX's name of it
    package: str  # that compiles for it
    device_kind: str  # JAX's name of the kind
    peak_flops: float  # of dense products in bfloat16, a second
    memory_bytes: int
    topology: str = ""  # libtpu's name of the kind
    num_axes: int = 0  # of its topologies
    chip_config_name: str = "default"  # libtpu's name of the cores that are one device


GIB = 1 << 30
ACCELERATORS = {
    "v5e": Accelerator("tpu", "libtpu", "TPU v5 lite", 197e12, 16 * GIB, "v5e", 2),
    "v5p": Accelerator("tpu", "libtpu", "TPU v5", 459e12, 95 * GIB, "v5", 3, "megacore"),
    "v6e": Accelerator("tpu", "libtpu", "TPU v6 lite", 918e12, 32 * GIB, "v6e", 2),
    "h100": Accelerator("gpu", "jax_cuda13_plugin", "NVIDIA H100 80GB HBM3", 989e12, 84_929_347_584),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices that steps are compiled for.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        devices: JAX's, in its order, of an `accelerator` that need not be here; None for those of this
            process.
        accelerator: `Accelerator` of the devices; None for those of this process.
        name: Value of `--compile_for`.
    """

    platform: str
    devices: tuple | None = None
    accelerator: Accelerator | None = None
    name: str = ""

    @property
    def compiler_options(self):
        """XLA's options for a program of these devices: dict."""
        if self.platform == "cpu":
            # XLA for CPUs drops the barriers around rematerialised blocks before it merges equal
            # computations, and so keeps every activation after all. GPU and TPU drop them late enough, and
            # need the pass
            return {"xla_disable_hlo_passes": "cse_barrier_expander"}
        if self.platform == "gpu":
            # XLA would try dozens of kernels of its own for each product. On an H100 with 16 cores a step of
            # bert-base was not compiled after 90 s then, and takes 45 s with cuBLAS's products alone
            # XLA would merge products of one input, as of query, key and value, and then add their biases and
            # join their gradients in passes of their own
            options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": "0"}
            # Measuring needs the device
            return {**options, "xla_gpu_autotune_level": "0"} if self.devices else options
        return {}

    @property
    def dtype(self):
        """The policy of a run with `--dtype=auto`."""
        return MIXED if self.platform in ("gpu", "tpu") else FLOAT32

    @property
    def num_devices(self):
        return len(self.devices) if self.devices else None


def devices_here():
    """The `Target` of this process's devices, of which one that is no CPU decides."""
    import keras  # not above: flags are read before a backend is chosen

    platforms = {name.partition(":")[0].lower() for name in keras.distribution.list_devices()}
    return Target(min(platforms - {"cpu"}, default="cpu"))


def accelerator_of(device_kind):
    """The `Accelerator` of devices of a kind, as JAX names it; None for others."""
    return next((one for one in ACCELERATORS.values() if one.device_kind == device_kind), None)


def parse_target(text):
    """`--compile_for`: KIND:SHAPE, or nothing."""
    kind, _, shape = text.partition(":")
    if text and (kind not in ACCELERATORS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape)):
        kinds = ", ".join(ACCELERATORS)
        raise ValueError(f"empty or KIND:SHAPE as v5e:1, v5e:4x4, v5p:2x2x1 or h100:4, of the kinds {kinds}")
    return text


def absent_target(text):
    """The `Target` of a `--compile_for`; JAX must not have asked for its devices in this process.

    Raises:
        InputError: the package that compiles for this kind is missing, or has no devices of this shape.
    """
    kind, _, shape = text.partition(":")
    accelerator = ACCELERATORS[kind]
    for package in ("jax", accelerator.package):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"`compile_for` needs `pip install -e '.[aot]'`. Received: {text}, and no package {package}."
            )
    import jax
    from jax.experimental import topologies

    # JAX would otherwise look for a real TPU as soon as libtpu is installed
    jax.config.update("jax_platforms", "cpu")
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sides = [int(side) for side in shape.split("x")]
    try:
        if accelerator.platform == "gpu":
            topology = topologies.get_topology_desc(
                kind, platform="cuda", target_config=H100, topology=f"1x1x{math.prod(sides)}"
            )
        else:
            topology = topologies.get_topology_desc(platform="tpu", **_tpu_topology(accelerator, sides))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"`compile_for` must name devices as their compiler knows them. Received: {text}: {reason}"
        ) from error
    return Target(accelerator.platform, tuple(topology.devices), accelerator, text)


def _tpu_topology(accelerator, sides):
    options = {"chip_config_name": accelerator.chip_config_name}
    if math.prod(sides) == 1:
        sides = [1] * accelerator.num_axes
        # A host has four chips or more, unless it is said to have one
        options |= {"chips_per_host_bounds": (1, 1, 1), "num_slices": 1, "wrap": (False, False, False)}
    return {"topology_name": f"{accelerator.topology}:{'x'.join(map(str, sides))}", **options}


class TooLargeError(InputError):
    """A step that needs more memory than a device has."""

    def __init__(self, target, micro_batch_size, used, has):
        super().__init__(
            f"`micro_batch_size` must be small enough for the devices of compile_for={target.name}. "
            f"Received: {micro_batch_size}, for which one needs {used} and has {has}."
        )


def program_for(target, engine, batch, micro_batch_size):
    """`engine.step_program(batch)` for the absent devices of the engine's `Target`.

    Raises:
        TooLargeError: a device has too little memory.
        InputError: the compiler does not take the step.
    """
    import jax  # an extra

    try:
        # JAX 0.11 and later lower kernels for GPUs for the default device, which would be this machine's CPU
        with jax.default_device(target.devices[0]):
            program = engine.step_program(batch)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        if sizes := memory_in(reason):
            raise TooLargeError(target, micro_batch_size, *sizes) from error
        raise InputError(
            "`compile_for` must be devices whose compiler takes this step. Received: "
            f"{target.name}, which says {reason[:200]}"
        ) from error
    # The compiler for GPUs refuses nothing
    used, has = program.peak_bytes, target.accelerator.memory_bytes
    if used > has:
        raise TooLargeError(target, micro_batch_size, f"{used / GIB:.2f}G", f"{has / GIB:.2f}G")
    return program


def memory_in(reason):
    """Memory that a refused program needs and a chip has, as (str, str), from a compiler's words, or None."""
    found = FULL.search(reason)
    return tuple(size for size in found.groups() if size) if found else None
