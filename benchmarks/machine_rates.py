"""How fast this machine multiplies, moves and exponentiates, by programs of the running backend.

Legend: R rows and C columns of a product, D what it sums over.
"""

import dataclasses
import statistics

import numpy as np
from keras import ops

from benchmarks.torch_reference import import_torch
from bert_packed.runs.interleaved_timing import FEWEST_FOR_INTERVAL, median_interval, ratios, time_interleaved
from bert_packed.training.engines.functional import compiled

GIGA = 1e9
SQUARE = 2048  # rows and columns of the largest product: more are no faster
NUM_MOVED = 1 << 26  # numbers of 4 bytes: more than any cache holds
NUM_EXPONENTIALS = 1 << 20
REST = 0.02  # seconds, as of `time_interleaved`: longer than threads of torch's OpenMP look out for work
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
        torch: Dict from these shapes to torch's GFLOP/s; {} where it was not measured.
        of_torch: Dict from these shapes to the rate as a share of torch's, of neighbouring turns: the median,
            and its interval (95 %), None and None of fewer than `FEWEST_FOR_INTERVAL` turns.
    """

    products: float
    bandwidth: float
    exponentials: float
    by_shape: dict[str, float]
    torch: dict[str, float] = dataclasses.field(default_factory=dict)
    of_torch: dict[str, tuple[float, float | None, float | None]] = dataclasses.field(default_factory=dict)


def measure_rates(shapes, num_repeats, with_torch=False):
    """Time products, a pass over memory, and exponentials, in alternating turns.

    Args:
        shapes: Set of `(R, D, C)`: products of `[R, D]` and `[D, C]` that a step has.
        num_repeats: Turns.
        with_torch: Whether torch computes each product beside ours.

    Returns:
        `Rates`, by the medians.
    """
    products = {}
    for shape in sorted({*shapes, (SQUARE, SQUARE, SQUARE)}):
        products["here", shape] = _products(*shape)
        if with_torch:
            products["torch", shape] = _torch_products(*shape)
    ways = products | {"move": _move(), "exponentials": _exponentials()}
    times = time_interleaved(ways, num_repeats, REST)
    seconds = {way: statistics.median(of_way) for way, of_way in times.items()}
    rates, of_torch = {"here": {}, "torch": {}}, {}
    for who, shape in products:
        name = " x ".join(map(str, shape))
        rates[who][name] = CHAIN_LENGTH * product_flops(*shape) / seconds[who, shape] / GIGA
        if who == "torch":
            found = ratios(times[who, shape], times["here", shape])
            interval = median_interval(found) if num_repeats >= FEWEST_FOR_INTERVAL else (None, None)
            of_torch[name] = statistics.median(found), *interval
    return Rates(
        max(rates["here"].values()),
        3 * 4 * NUM_MOVED / seconds["move"] / GIGA,
        CHAIN_LENGTH * NUM_EXPONENTIALS / seconds["exponentials"] / GIGA,
        rates["here"],
        rates["torch"],
        of_torch,
    )


def product_flops(rows, depth, columns):
    """The operations of a product `[R, D]` by `[D, C]`: a product and a sum for each of D."""
    return 2 * rows * depth * columns


def _torch_products(rows, depth, columns):
    """As many products by torch, in this process, so that the C library keeps its memory as it keeps ours."""
    torch, _ = import_torch()
    left, right = torch.randn(rows, depth), torch.randn(depth, columns)

    def run(_):
        for _ in range(CHAIN_LENGTH):
            torch.mm(left, right)

    return run


def _products(rows, depth, columns):
    """A program of products, none of which can be left out: a factor holds a little of the last result.

    The smaller factor, as a pass over the larger one would be a tenth of the time of some shapes.
    """

    def chain(left, right):
        total = ops.zeros(())
        for _ in range(CHAIN_LENGTH):
            found = ops.matmul(left, right)
            total = total + found[0, 0]
            if rows < columns:
                left = left + found[:1, :1]
            else:
                right = right + found[:1, :1]
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
