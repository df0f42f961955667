"""Report on a compiled training step: static shapes, host callbacks, FLOPs, communication and memory.

A step's program must have fixed dimensions and never wait for Python. `describe_step` checks this on the
compiled program.
"""

import dataclasses
import json
import math
import re
import time

import numpy as np

from bert_packed.training import program_text

DYNAMIC_OPCODES = ("set-dimension-size", "get-dimension-size", "dynamic-reshape")
# Targets of custom calls where an array's size is known only when the program runs
DYNAMIC_TARGETS = re.compile(r"PadToStatic|SliceToDynamic|DynamicReshape|dynamic_\w+")
HOST_OPCODES = ("infeed", "outfeed")
HOST_TARGETS = re.compile(r"callback|py_?func", re.IGNORECASE)
HOST_TRANSFER = re.compile(r"\bis_host_transfer=true")
# The compiler for TPUs does not know the cost of these calls, and adds -1 second for each
UNESTIMATED = re.compile(r'custom_call_target="(?:ConcatBitcast|X64\w+|ZeroCrop)"')
KERNELS = re.compile(r"^tpu_custom_call$|triton|mosaic_gpu")
SHOWN = 160  # characters of a reported line


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A compiled program, on one of its devices; None for numbers that the backend does not report."""

    text: str  # optimised HLO
    compile_seconds: float  # from the traced step to the program
    num_devices: int | None = None  # that run it; None where the text has their number
    # XLA's own counts, in which the body of a loop counts once
    flops: float | None = None
    bytes_accessed: float | None = None
    # XLA's plan of memory: inputs, results, results that overwrite inputs, and the rest
    argument_bytes: int | None = None
    output_bytes: int | None = None
    aliased_bytes: int | None = None
    temporary_bytes: int | None = None
    estimated_seconds: float | None = None  # XLA's estimate of a run, in which the body of a loop counts once

    @property
    def peak_bytes(self):
        """Peak memory of a device while the program runs, or None."""
        if self.argument_bytes is None:
            return None
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes


def size_that_fills(memory_bytes, program, size):
    """The micro-batch that fills a memory, if all but the arguments of a program for `size` grows with it."""
    growing = max(program.peak_bytes - program.argument_bytes, 1)
    return int(size * (memory_bytes - program.argument_bytes) // growing)


def search_largest(fits, in_proportion, first):
    """Search the largest size that fits, to about a sixteenth; returns it, or 0.

    Goes on from `first` by a quarter at least, or halves until something fits, and bisects what lies between.
    A try may take minutes.

    Args:
        fits: Function of a size: True, False, or None to stop.
        in_proportion: Function of a size that fits: the one expected to fill the memory. More may fit, since
            compilers save memory where it gets short.
    """
    largest, refused, size = 0, None, first
    while (answer := fits(size)) is not None:
        if answer:
            largest = size
        else:
            refused = size
        if refused and refused - largest <= max(largest // 16, 1):
            break
        if refused:
            size = (largest + refused) // 2
        else:
            size = min(max(in_proportion(largest), largest + max(largest // 4, 1)), 16 * largest)
    return largest


def jax_program(lowered):
    """Compile the result of `jax.jit(step).lower(...)`: `StepProgram`."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return compiled_program(
        compiled.as_text(), seconds, compiled.cost_analysis() or {}, compiled.memory_analysis()
    )


def compiled_program(text, seconds, counts, memory):
    """A `StepProgram` from XLA's text, counts (a dict) and plan of memory, None where it has none."""
    sizes = {}
    if memory is not None:  # some plug-ins have no memory plan
        sizes = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    return StepProgram(
        text,
        seconds,
        flops=counts.get("flops"),
        bytes_accessed=counts.get("bytes accessed"),
        estimated_seconds=_without_sentinels(counts.get("optimal_seconds"), text),
        **sizes,
    )


def _without_sentinels(seconds, text):
    """XLA's estimate of a run; None where it has none."""
    if seconds is None:
        return None
    seconds += len(UNESTIMATED.findall(text))
    return seconds if seconds > 0 else None


def describe_step(program):
    """Describe a step's `StepProgram`, on one of its devices: plain JSON.

    Numbers are None where the backend does not report them, or a loop has unknown length. `estimated_seconds`
    is XLA's estimate of a run. `dynamic_dimensions` and `host_callbacks` count instructions, whose lines are
    in `broken_by`; `collectives` are from `summarise`.
    """
    module = program_text.read_module(program.text)
    dynamic, callbacks = find_dynamic(module), find_callbacks(module)
    collectives = program_text.find_collectives(module)
    reported = ("flops", "bytes_accessed", "argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes")
    return {
        "programs": 1,  # readers of reports look for it
        "devices": program.num_devices or module.num_devices,
        "dynamic_dimensions": len(dynamic),
        "host_callbacks": len(callbacks),
        "loops_of_unknown_length": count_unknown_loops(module),
        "kernels": count_kernels(module),
        "matmul_flops": matmul_flops(module),
        **{name: getattr(program, name) for name in reported},
        "estimated_seconds": _estimate(program, module),
        "compile_seconds": program.compile_seconds,
        "collective_bytes": _sum_known(one.num_bytes for one in collectives),
        "collectives": summarise(collectives),
        "broken_by": [line.strip()[:SHOWN] for line in (*dynamic, *callbacks)],
    }


def _estimate(program, module):
    """XLA's estimate of a run with its loops: seconds, or None."""
    share = program_text.loop_share(module)
    if program.estimated_seconds is None or share is None:
        return None
    return program.estimated_seconds * share


def is_static(report):
    """True for a program without dynamic dimensions and host callbacks."""
    return not report["dynamic_dimensions"] and not report["host_callbacks"]


def summarise(collectives):
    """Sum up collectives by kind and group size: list of dicts, by descending `bytes`, None first.

    `instructions` are counted in the text, `executions` and `bytes`, the input of one device, in a run of the
    program; the latter are None in a loop of unknown length.
    """
    groups = {}
    for one in collectives:
        groups.setdefault((one.kind, one.group_size), []).append(one)
    rows = [
        {
            "kind": kind,
            "group_size": size,
            "instructions": len(group),
            "executions": _sum_known(one.times for one in group),
            "bytes": _sum_known(one.num_bytes for one in group),
        }
        for (kind, size), group in groups.items()
    ]
    return sorted(rows, key=lambda row: (row["bytes"] is not None, -(row["bytes"] or 0)))


def find_dynamic(module):
    """Lines of instructions with a dimension that is known only when the program runs: list of str."""
    # `dynamic-slice` and `dynamic-update-slice` have dynamic positions, but no dynamic sizes
    return [
        one.line
        for one in module.instructions
        if any(shape.is_dynamic for shape in one.shapes)
        or one.opcode in DYNAMIC_OPCODES
        or (one.opcode == "custom-call" and DYNAMIC_TARGETS.search(one.attribute("custom_call_target")))
    ]


def find_callbacks(module):
    """Lines of instructions that wait for the host, by Python calls, feeds or transfers: list of str."""
    return [
        one.line
        for one in module.instructions
        if one.opcode in HOST_OPCODES
        or HOST_TRANSFER.search(one.attributes)
        or (one.opcode == "custom-call" and HOST_TARGETS.search(one.attribute("custom_call_target")))
    ]


def count_kernels(module):
    """Number of calls of Pallas kernels, whose operations no compiler counts."""
    targets = [one.attribute("custom_call_target") for one in module.instructions]
    return sum(bool(KERNELS.search(target)) for target in targets)


def count_unknown_loops(module):
    """Number of loops with an unknown number of iterations."""
    loops = [one for one, _ in program_text.executions(module) if one.opcode == "while"]
    return sum(program_text.trip_count(module, loop) is None for loop in loops)


def _sum_known(values):
    """The sum of values, or None if one of them is None."""
    values = list(values)
    return None if None in values else sum(values)


LIBRARY_PRODUCTS = re.compile(r"__cublas\$(lt\$)?matmul|__cublas\$gemm")
OTHER_PRODUCTS = re.compile(r"gemm|matmul|triton|mosaic_gpu|__cudnn\$", re.IGNORECASE)
# Programs of Pallas kernels are not printed. XLA adds this for TPUs, and `kernels/gpu/attention.py` for GPUs
_DECLARED_FLOPS = {
    "tpu_custom_call": re.compile(r'"cost_estimate":\{"flops":"?(\d+)'),
    "__gpu$xla.gpu.triton": re.compile(r"\\22flops\\22: \\22(\d+)"),
}


def matmul_flops(module):
    """FLOPs of the matrix products in a run of the program, on one device: int, or None.

    A product of `[m, k]` and `[k, n]` has 2 m k n. So has one written as a convolution, as all are for
    TPUs. A Pallas kernel counts as it declares. None where a library or kernel has products of unknown size,
    or a product is in a loop of unknown length.
    """
    total = 0
    for instruction, times in program_text.executions(module):
        flops = product_flops(instruction)
        if flops is None or (flops and times is None):
            return None
        total += flops and flops * times
    return total


def product_flops(instruction):
    """FLOPs of one execution of a matrix product: 0 for other instructions, None for unknown sizes."""
    if instruction.opcode == "dot":
        found = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = [int(dim) for dim in found[1].split(",") if dim] if found else []
    elif instruction.opcode == "convolution":
        return _convolution_flops(instruction)
    elif instruction.opcode == "custom-call":
        target = instruction.attribute("custom_call_target")
        if target in _DECLARED_FLOPS:
            declared = _DECLARED_FLOPS[target].search(instruction.attributes)
            return int(declared[1]) if declared else None
        if not LIBRARY_PRODUCTS.search(target):
            return None if OTHER_PRODUCTS.search(target) else 0
        found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.attributes)
        if not found:
            return None
        contracted = [int(dim) for dim in json.loads(found[1])]
    else:
        return 0
    left = instruction.operands[0].shapes[0].sizes
    result = instruction.shapes[0].sizes  # library calls also return a workspace
    return 2 * math.prod(result) * math.prod(left[dim] for dim in contracted)


def _convolution_flops(instruction):
    """FLOPs of a convolution: 2 for each pair of a weight and an input that is not padding."""
    labels = re.search(r"\bdim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    left, kernel, result = (
        dict(zip(names, shape.sizes, strict=True))
        for names, shape in zip(
            labels.groups(),
            (*(one.shapes[0] for one in instruction.operands[:2]), instruction.shapes[0]),
            strict=True,
        )
    )
    window = re.search(r"\bwindow=\{([^}]*)\}", instruction.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", window[1] if window else ""))
    groups = {name: int(instruction.attribute(f"{name}_group_count") or 1) for name in ("feature", "batch")}
    pairs = left["f"] // groups["feature"] * result["f"] * (left["b"] // groups["batch"])
    for axis in sorted(set(kernel) - {"i", "o"}):
        of_axis = {name: values.split("x")[int(axis)] for name, values in window.items()}
        pairs *= _window_pairs(left[axis], kernel[axis], result[axis], of_axis)
    return 2 * pairs


def _window_pairs(length, size, num_places, window):
    """Pairs of a place of the window and one inside of it at which there is an input, along one axis."""
    # A product with a batch is a window over the batch that is dilated so that each place meets its own input
    stride, kernel_step, step = (int(window.get(name, 1)) for name in ("stride", "rhs_dilate", "lhs_dilate"))
    before = int(window.get("pad", "0_0").split("_")[0])
    inputs = np.arange(num_places)[:, None] * stride + np.arange(size) * kernel_step - before
    return int(np.sum((inputs >= 0) & (inputs <= (length - 1) * step) & (inputs % step == 0)))
