"""Rates of this machine: matrix products, memory, exponentials, by programs of the running backend.

Legend: R rows and C columns of a product, D what it sums over.
"""

import dataclasses
import math
import statistics
import time

import numpy as np
from keras import ops

from benchmarks.timing import median_row, ratios
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.backend import compiled

GIGA = 1e9
SQUARE = 2048  # rows and columns of the largest product: more are no faster
NUM_MOVED = 1 << 26  # numbers of 4 bytes: more than any cache holds
NUM_EXPONENTIALS = 1 << 20
PAUSE = 0.02  # seconds; threads of torch's OpenMP spin for some milliseconds, and take a core from the next
CHAIN_LENGTH = 8  # products, or exponentials, one after another in a program
PRODUCTS, MEMORY, EXPONENTIALS = "products", "memory", "exponentials"


@dataclasses.dataclass(frozen=True)
class Rates:
    """Work of a machine in a second."""

    products: float  # operations of the fastest product
    memory: float  # bytes read and written
    exponentials: float  # of float32 numbers in the cache

    def least_seconds(self, flops, num_bytes, exponentials):
        """The least time for some work, by each of what it needs: dict from the name of a rate."""
        return {
            PRODUCTS: flops / self.products,
            MEMORY: num_bytes / self.memory,
            EXPONENTIALS: exponentials / self.exponentials,
        }


def measure_rates(shapes, num_repeats, with_torch=False):
    """Interleave products of some shapes, a pass over memory, and exponentials.

    Returns:
        `Rates`, by the medians, and rows of a table; what is torch's is None where it was not measured.
    """
    shapes = sorted({*shapes, (SQUARE, SQUARE, SQUARE)})
    ways = {("here", shape): product_program(*shape) for shape in shapes}
    if with_torch:
        ways |= {("torch", shape): torch_product(*shape) for shape in shapes}
    ways |= {MEMORY: memory_program(), EXPONENTIALS: exponential_program()}
    # A pause behind each: a way by itself, whose time nobody reads
    paced = {key: way for name, way in ways.items() for key, way in ((name, way), (("pause", name), _pause))}
    times = time_interleaved(paced, num_repeats)

    def rate(way, work):
        return work / statistics.median(times[way])

    def row(what, found, unit):
        columns = {"what": what, "here": found / GIGA, "unit": unit}
        return columns | dict.fromkeys(("torch", "of torch's", "from", "to"))

    products, rows = [], []
    for shape in shapes:
        work = CHAIN_LENGTH * 2 * math.prod(shape)  # a product and a sum for each of D
        products.append(rate(("here", shape), work))
        rows.append(row(f"product {' x '.join(map(str, shape))}", products[-1], "GFLOP/s"))
        if with_torch:
            rows[-1]["torch"] = rate(("torch", shape), work) / GIGA
            rows[-1] |= median_row("of torch's", ratios(times["torch", shape], times["here", shape]))
    memory = rate(MEMORY, 3 * 4 * NUM_MOVED)
    exponentials = rate(EXPONENTIALS, CHAIN_LENGTH * NUM_EXPONENTIALS)
    rows.append(row("memory, two arrays read and one written", memory, "GB/s"))
    rows.append(row(EXPONENTIALS, exponentials, "1e9/s"))
    return Rates(max(products), memory, exponentials), rows


def product_program(rows, depth, columns):
    """A function that runs a program of products."""

    def chain(left, right):
        total = ops.zeros(())
        for _ in range(CHAIN_LENGTH):
            found = ops.matmul(left, right)
            total = total + found[0, 0]
            # None can be left out: a factor holds a little of the last result. The smaller one, as a pass
            # over the larger would be a tenth of the time of some shapes
            if rows < columns:
                left = left + found[:1, :1]
            else:
                right = right + found[:1, :1]
        return total

    rng = np.random.default_rng(0)
    return _program(chain, rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns)))


def torch_product(rows, depth, columns):
    """A function that has torch do as many products, in this process, whose freed memory is kept."""
    from benchmarks.peers.transformers_models import import_torch

    torch, _ = import_torch()
    left, right = torch.randn(rows, depth), torch.randn(depth, columns)

    def run(_):
        for _ in range(CHAIN_LENGTH):
            torch.mm(left, right)

    return run


def memory_program():
    """A function that reads two arrays and writes one."""
    ones = np.ones(NUM_MOVED)
    return _program(lambda one, other: one + other * 2, ones, ones, is_large=True)


def exponential_program():
    """A function that computes exponentials of small arrays, one after another."""

    # The backend's compiler decides more than the processor: 1.3e9 by TensorFlow, 3.2e9 by JAX on one CPU
    def chain(values):
        for _ in range(CHAIN_LENGTH):
            values = ops.exp(values) - 1  # of numbers around 0, around 0 again
        return ops.sum(values)

    return _program(chain, np.random.default_rng(0).normal(size=NUM_EXPONENTIALS) / 1e3)


def _program(function, *arrays, is_large=False):
    """A function of the repeat that computes on float32 arrays, and returns when it is done."""
    program = compiled(function)
    given = [ops.convert_to_tensor(array, "float32") for array in arrays]

    def run(_):
        found = program(*given)
        ops.convert_to_numpy(found[:1] if is_large else found)  # wait for the device, and copy no more

    return run


def _pause(_):
    time.sleep(PAUSE)
