"""Compilation of a step for devices that need not be here, under both backends.

TensorFlow compiles for the devices that it sees alone. Here JAX's compiler of an absent device gets its
program, as HLO before any optimisation. JAX promises none of the names that this takes.
"""

import re
import time

from bert_packed.core.settings import InputError
from bert_packed.parallel.targets import GIB
from bert_packed.training.step_report import compiled_program

# Words of libtpu where a program does not fit a chip's memory. Smaller memories run out by the same status
FULL = re.compile(
    r"RESOURCE_EXHAUSTED.*?(?:Used (\S+) of (\S+) hbm|temporaries \((\S+)\) exceeds available HBM \((\S+)\))"
)


class TooLargeError(InputError):
    """A step that needs more memory than a device has."""

    def __init__(self, target, micro_batch_size, used, has):
        super().__init__(
            f"`micro_batch_size` must be small enough for the devices of compile_for={target.name}. "
            f"Received: {micro_batch_size}, for which one needs {used} and has {has}."
        )


def programs_for(target, engine, batch, micro_batch_size):
    """`engine.step_programs(batch)` for the absent devices of the engine's `Target`.

    Raises:
        TooLargeError: a device has too little memory.
        InputError: the compiler does not take the step.
    """
    import jax  # an extra

    try:
        # From JAX 0.11 kernels for GPUs are lowered for the default device, which would be this machine's CPU
        with jax.default_device(target.devices[0]):
            programs = engine.step_programs(batch)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        if sizes := memory_in(reason):
            raise TooLargeError(target, micro_batch_size, *sizes) from error
        raise InputError(
            "`compile_for` must be devices whose compiler takes this step. Received: "
            f"{target.name}, which says {reason[:200]}"
        ) from error
    # The compiler for GPUs refuses nothing
    used, has = max(program.peak_bytes for program in programs), target.accelerator.memory_bytes
    if used > has:
        raise TooLargeError(target, micro_batch_size, f"{used / GIB:.2f}G", f"{has / GIB:.2f}G")
    return programs


def memory_in(reason):
    """What a refused program needs and what a chip has, as (str, str), from a compiler's words, or None."""
    found = FULL.search(reason)
    return tuple(size for size in found.groups() if size) if found else None


def tensorflow_program_for(function, batch, target):
    """Compile a `tf.function(..., jit_compile=True)` for the first device of a `Target`: `StepProgram`."""
    from jax.extend.backend import get_compile_options
    from jaxlib.xla_client import DeviceList

    compiler_ir = function.experimental_get_compiler_ir(batch)
    # Unoptimised, the program is the same for every platform but for the forms that we chose
    module = _as_stablehlo(compiler_ir(stage="hlo_serialized", platform_name="CPU"))
    device = target.devices[0]
    start = time.perf_counter()
    options = get_compile_options(1, 1, env_options_overrides=target.compiler_options)
    compiled = device.client.compile(module, DeviceList((device,)), options)
    seconds = time.perf_counter() - start
    try:
        counts = compiled.cost_analysis()
    except RuntimeError:  # the compiler for GPUs has no counts
        counts = {}
    counts = counts[0] if isinstance(counts, list) else counts
    (program,) = compiled.hlo_modules()
    return compiled_program(program.to_string(), seconds, counts, compiled.get_compiled_memory_stats())


def _as_stablehlo(serialized):
    """A serialized `xla.HloModuleProto` as JAX's compilers take it."""
    from jax.extend.mlir import hlo_to_stablehlo
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir

    with make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo(serialized))
        copies = []

        def note(operation):
            if operation.name == "mhlo.copy":
                copies.append(operation)
            return ir.WalkResult.ADVANCE

        module.operation.walk(note)
        # TensorFlow copies variables; StableHLO has no such operation, and the compiler needs none
        for copy in copies:
            copy.results[0].replace_all_uses_with(copy.operands[0])
            copy.erase()
    return module
