"""How fast this machine multiplies, moves and exponentiates, by programs of the running backend.

Legend: R rows and C columns of a product, D what it sums over.
"""

import dataclasses
import statistics

import numpy as np
from keras import ops

from bert_packed.runs.turns import time_in_turns
from bert_packed.training.engines.functional import compiled

GIGA = 1e9
SQUARE = 2048  # rows and columns of the largest product: more are no faster
NUM_MOVED = 1 << 26  # numbers of 4 bytes: more than any cache holds
NUM_EXPONENTIALS = 1 << 20
CHAIN_LENGTH = 8  # products, or exponentials, one after another in a program


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        products: Best of the products tried, GFLOP/s in float32.
        bandwidth: Of memory, read and written, GB/s.
        exponentials: Of float32 numbers that lie in the cache, in 1e9/s: as the backend's compiler writes
            them, which decides more than the processor does (1.3 by TensorFlow, 3.2 by JAX on one CPU).
        by_shape: Dict from the shape of a product, as text `R x D x C`, to GFLOP/s.
    """

    products: float
    bandwidth: float
    exponentials: float
    by_shape: dict[str, float]


def measure_rates(shapes, num_repeats):
    """Time products, a pass over memory, and exponentials, in alternating turns.

    Args:
        shapes: Set of `(R, D, C)`: products of `[R, D]` and `[D, C]` that a step has.
        num_repeats: Turns.

    Returns:
        `Rates`, by the medians.
    """
    shapes = sorted({*shapes, (SQUARE, SQUARE, SQUARE)})
    ways = {shape: _products(*shape) for shape in shapes}
    ways |= {"move": _move(), "exponentials": _exponentials()}
    seconds = {name: statistics.median(times) for name, times in time_in_turns(ways, num_repeats).items()}
    by_shape = {
        f"{rows} x {depth} x {columns}": CHAIN_LENGTH
        * product_flops(rows, depth, columns)
        / seconds[rows, depth, columns]
        / GIGA
        for rows, depth, columns in shapes
    }
    return Rates(
        max(by_shape.values()),
        3 * 4 * NUM_MOVED / seconds["move"] / GIGA,
        CHAIN_LENGTH * NUM_EXPONENTIALS / seconds["exponentials"] / GIGA,
        by_shape,
    )


def product_flops(rows, depth, columns):
    """The operations of a product `[R, D]` by `[D, C]`: a product and a sum for each of D."""
    return 2 * rows * depth * columns


def torch_product_rates(shapes, num_repeats):
    """What torch reaches on the same products: dict as `Rates.by_shape`."""
    import torch

    def way(rows, depth, columns):
        left, right = torch.randn(rows, depth), torch.randn(depth, columns)

        def run(_):
            for _ in range(CHAIN_LENGTH):
                torch.mm(left, right)

        return run

    shapes = sorted({*shapes, (SQUARE, SQUARE, SQUARE)})
    seconds = time_in_turns({shape: way(*shape) for shape in shapes}, num_repeats)
    return {
        " x ".join(map(str, shape)): CHAIN_LENGTH
        * product_flops(*shape)
        / statistics.median(seconds[shape])
        / GIGA
        for shape in shapes
    }


def _products(rows, depth, columns):
    """A program of products, none of which can be left out: each left side is a little of the last result."""

    def chain(left, right):
        total = ops.zeros(())
        for _ in range(CHAIN_LENGTH):
            found = ops.matmul(left, right)
            total = total + found[0, 0]
            left = left + found[:1, :1]
        return total

    rng = np.random.default_rng(0)
    return _way(chain, rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns)))


def _move():
    """A pass that reads two arrays and writes one."""
    return _way(lambda one, other: one + other * 2, np.ones(NUM_MOVED), np.ones(NUM_MOVED), is_large=True)


def _exponentials():
    def chain(values):
        for _ in range(CHAIN_LENGTH):
            values = ops.exp(values) - 1  # of numbers around 0, around 0 again
        return ops.sum(values)

    return _way(chain, np.random.default_rng(0).normal(size=NUM_EXPONENTIALS) / 1e3)


def _way(function, *arrays, is_large=False):
    """A function of the turn that computes on arrays of float32, and returns when it is done."""
    program = compiled(function)
    given = [ops.convert_to_tensor(array, "float32") for array in arrays]

    def run(_):
        found = program(*given)
        ops.convert_to_numpy(found[:1] if is_large else found)  # wait for the device, and copy no more

    return run
