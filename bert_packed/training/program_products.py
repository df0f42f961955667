"""FLOPs of the matrix products in a program: dots, convolutions, calls of libraries and kernels."""

import json
import math
import re

import numpy as np

from bert_packed.training.program_text import executions

LIBRARY_PRODUCTS = re.compile(r"__cublas\$(lt\$)?matmul|__cublas\$gemm")
OTHER_PRODUCTS = re.compile(r"gemm|matmul|triton|mosaic_gpu|__cudnn\$", re.IGNORECASE)
# Of Pallas kernels, whose programs are not printed: for TPUs, and as `kernels/gpu/attention.py` adds it
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
    for instruction, times in executions(module):
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
