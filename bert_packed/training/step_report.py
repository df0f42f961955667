"""What is in a compiled training step: whether it is static, and what it costs.

The contract that runs are promised: a step is one program, all of its dimensions are fixed, and nothing in it
waits for Python. `describe_step` reads it from what was compiled, and counts operations, bytes and memory.
"""

import dataclasses
import json
import math
import re

from bert_packed.training.collectives import find_collectives, summarise
from bert_packed.training.hlo import executions, read_module, trip_count

DYNAMIC_OPCODES = ("set-dimension-size", "get-dimension-size", "dynamic-reshape")
# What XLA calls where an array's size is known only when the program runs
DYNAMIC_TARGETS = re.compile(r"PadToStatic|SliceToDynamic|DynamicReshape|dynamic_\w+")
HOST_OPCODES = ("infeed", "outfeed")
HOST_TARGETS = re.compile(r"callback|py_?func", re.IGNORECASE)
HOST_TRANSFER = re.compile(r"\bis_host_transfer=true")
LIBRARY_PRODUCTS = re.compile(r"__cublas\$(lt\$)?matmul|__cublas\$gemm")
OTHER_PRODUCTS = re.compile(r"gemm|matmul", re.IGNORECASE)
SHOWN = 160  # characters of a line that breaks the contract


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A program as an engine compiled it; None is what the backend does not tell.

    Attributes:
        text: Optimised HLO.
        compile_seconds: From the traced step to the program.
        num_devices: Devices that run it; None where the text says how many.
        flops, bytes_accessed: By XLA's own count, on one device; it counts the body of a loop once.
        argument_bytes, output_bytes, aliased_bytes, temporary_bytes: Memory of one device: what goes in, what
            comes out, what of it is written over what went in, and what is held meanwhile.
    """

    text: str
    compile_seconds: float
    num_devices: int | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    aliased_bytes: int | None = None
    temporary_bytes: int | None = None

    @property
    def peak_bytes(self):
        """What a device holds at once while the program runs, by XLA's plan of its memory; or None."""
        if self.argument_bytes is None:
            return None
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes


def describe_step(programs):
    """What the programs of a step are and cost, on one device of those that share it.

    Args:
        programs: List of `StepProgram`, run one after the other.

    Returns:
        Dict for JSON; a value is None where the backend does not tell.
        `programs`, `devices`;
        `dynamic_dimensions`, `host_callbacks`: instructions that break the contract, and in `broken_by` what
            stands there;
        `loops_of_unknown_length`: what is counted inside of one is counted as if it ran once;
        `matmul_flops`: operations of the matrix products, two for each multiplication, loops with all of
            their rounds; None where a library computes products whose sizes the text does not tell;
        `flops`, `bytes_accessed`, `argument_bytes`, `output_bytes`, `temporary_bytes`, `peak_bytes`: see
            `StepProgram`; sums over the programs of what is done, the largest of what is held;
        `compile_seconds`;
        `collective_bytes`: what a device puts into collectives; `collectives`, see `collectives.summarise`.
    """
    modules = [read_module(program.text) for program in programs]
    dynamic = [line for module in modules for line in find_dynamic(module)]
    callbacks = [line for module in modules for line in find_callbacks(module)]
    collectives = [one for module in modules for one in find_collectives(module)]
    return {
        "programs": len(programs),
        "devices": max(
            program.num_devices or module.num_devices
            for program, module in zip(programs, modules, strict=True)
        ),
        "dynamic_dimensions": len(dynamic),
        "host_callbacks": len(callbacks),
        "loops_of_unknown_length": sum(map(count_unknown_loops, modules)),
        "matmul_flops": _add(matmul_flops(module) for module in modules),
        **{name: _add(getattr(one, name) for one in programs) for name in ("flops", "bytes_accessed")},
        **{
            name: _largest(getattr(one, name) for one in programs)
            for name in ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes")
        },
        "compile_seconds": sum(program.compile_seconds for program in programs),
        "collective_bytes": sum(one.num_bytes for one in collectives),
        "collectives": summarise(collectives),
        "broken_by": [line.strip()[:SHOWN] for line in (*dynamic, *callbacks)],
    }


def is_static(report):
    """Whether a step keeps the contract: one program, no dynamic dimension, no host callback."""
    return (report["programs"], report["dynamic_dimensions"], report["host_callbacks"]) == (1, 0, 0)


def find_dynamic(module):
    """Lines of instructions with a dimension that is known only when the program runs: list of str.

    `dynamic-slice` and `dynamic-update-slice` are not among them: where they cut is dynamic, not how much.
    """
    return [
        one.line
        for one in _instructions(module)
        if any(shape.is_dynamic for shape in one.shapes)
        or one.opcode in DYNAMIC_OPCODES
        or (one.opcode == "custom-call" and DYNAMIC_TARGETS.search(one.attribute("custom_call_target")))
    ]


def find_callbacks(module):
    """Lines of instructions that wait for the host: calls of Python, feeds, transfers. List of str."""
    return [
        one.line
        for one in _instructions(module)
        if one.opcode in HOST_OPCODES
        or HOST_TRANSFER.search(one.attributes)
        or (one.opcode == "custom-call" and HOST_TARGETS.search(one.attribute("custom_call_target")))
    ]


def count_unknown_loops(module):
    """Loops whose number of rounds the text does not tell."""
    loops = [one for one in executions(module) if one.instruction.opcode == "while"]
    return sum(trip_count(module, loop.computation, loop.instruction) is None for loop in loops)


def matmul_flops(module):
    """Operations of the matrix products of a run of the program, on one device: int, or None.

    A product of `[m, k]` and `[k, n]` is 2 m k n; convolutions are not counted. None where a product is left
    to a library and its sizes are not written down.
    """
    total = 0
    for one in executions(module):
        flops = _product_flops(one.instruction, one.computation)
        if flops is None:
            return None
        total += flops * one.times
    return total


def _product_flops(instruction, computation):
    """Of one instruction: 0 where it is no product, None where it is one of unknown size."""
    if instruction.opcode == "dot":
        found = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = [int(dim) for dim in found[1].split(",") if dim] if found else []
    elif instruction.opcode == "custom-call":
        target = instruction.attribute("custom_call_target")
        if not LIBRARY_PRODUCTS.search(target):
            return None if OTHER_PRODUCTS.search(target) else 0
        found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.attributes)
        if not found:
            return None
        contracted = [int(dim) for dim in json.loads(found[1])]
    else:
        return 0
    left = computation.operand_shapes(instruction)[0][0].sizes
    result = instruction.shapes[0].sizes  # a library has a workspace behind it
    return 2 * math.prod(result) * math.prod(left[dim] for dim in contracted)


def _instructions(module):
    """All instructions of a module, each once, whether or not they are reached."""
    return [one for part in module.computations.values() for one in part.instructions.values()]


def _add(values):
    values = list(values)
    return None if None in values else sum(values)


def _largest(values):
    values = list(values)
    return None if None in values else max(values)
