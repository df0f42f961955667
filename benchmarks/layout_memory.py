"""Memory of a device under each layout, by the compiler's own plan, and the largest batch that fits.

Nothing is allocated: a program is compiled from shapes, and XLA says how large its buffers are.
"""

import functools
import math

from benchmarks.encoder_program import OPTIONS, EncoderShape, compile_encoder
from benchmarks.training_steps import RECIPE
from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.parallel.layouts import make_layout_replicas
from bert_packed.runs.compile_only import empty_batch
from bert_packed.schema import PackSpec
from bert_packed.training.engines import make_engine
from bert_packed.training.optimization import build_optimizer

MEBIBYTE = 2**20
GIBIBYTE = 2**30
SCALAR_BYTES = 4  # float32
LENGTH = 512  # s of Table 2
WIDTH = 1024  # h of Table 2, over q
HEADS = 16  # n, over q
OPTIMUS_BATCH = 48  # b of its Optimus, over q
PRINTED_LARGEST = {64: {"megatron1d": 60, "optimus2d": 480}}  # Section 5.3: 480, and 8 times Megatron's


def table2_shape(side, layers, batch=None):
    """The shape of Table 2 on q x q devices, with fewer layers."""
    batch = batch or OPTIMUS_BATCH * side
    return EncoderShape(batch, LENGTH, WIDTH * side, HEADS * side, layers)


def weight_rows(sides):
    """Share of a model's weights on a device, by its step's shardings; `copies` are of all devices."""
    rows = []
    for side in sides:
        for layout in ("megatron1d", "optimus2d"):
            for kind, (whole, part) in weights_on_a_device(layout, side).items():
                copies = side**2 * part / whole
                rows.append(
                    {
                        "devices": side**2,
                        "layout": layout,
                        "weights": kind,
                        "all, KiB": whole / 1024,
                        "a device, KiB": part / 1024,
                        "1/p": "yes" if copies == 1 else "no",
                        "copies": copies,
                    }
                )
    return rows


def weights_on_a_device(layout, side):
    """Bytes of a small model's weights and LAMB's moments, as its training step takes them.

    Returns:
        Dict from kind to (bytes of all, with what is added for the layout to divide, bytes on a device).
    """
    replicas = make_layout_replicas(layout, (1, side, side))
    config = ModelConfig(
        vocab_size=1024,
        hidden_size=16 * side,
        num_hidden_layers=1,
        num_attention_heads=side**2,
        intermediate_size=64 * side,
        max_position_embeddings=64,
    )
    objective = pretraining_objective(RECIPE.mlm_loss)
    with replicas.scope():
        model = objective.build_model(config, 0, layout=replicas.layout)
        engine = make_engine(model, objective, build_optimizer(RECIPE), None, replicas)
    batch = empty_batch(objective.features, PackSpec(64, 3, 10), side)
    arguments = engine.step_arguments(batch)
    program = engine.compiled_train_step.lower(*arguments).compile(OPTIONS)
    state, shardings = arguments[0], program.input_shardings[0][0]
    found = {}
    for kind in state:
        for array, sharding in zip(state[kind], shardings[kind], strict=True):
            name = _kind(kind, array.ndim)
            if name:
                part = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
                before = found.get(name, (0, 0))
                found[name] = (before[0] + array.nbytes, before[1] + part)
    return found


def _kind(kind, num_axes):
    """A name for weights by how many axes they have; None for seeds and counts."""
    if kind == "other" or num_axes == 0:
        return None
    name = "kernels and tables" if num_axes == 2 else "biases and norms"
    return name if kind == "trainable" else f"moments of {name}"


def memory_rows(sides, layers, compile_program=compile_encoder):
    """Memory of a device, MiB, for N blocks and their gradients with `--remat`, at Table 2's weak scaling."""
    rows = []
    for side in sides:
        shape = table2_shape(side, layers)
        for layout in ("none", "megatron1d", "optimus2d"):
            program = compile_program(shape, layout, 1 if layout == "none" else side, remat=True)
            devices = 1 if layout == "none" else side**2
            rows.append(
                {
                    "devices": devices,
                    "layout": layout,
                    "batch": shape.batch,
                    "hidden": shape.width,
                    "arguments, MiB": program.argument_bytes / MEBIBYTE,
                    "results, MiB": program.output_bytes / MEBIBYTE,
                    # Among the arguments, and their gradients among the results
                    "kernels / p, MiB": kernel_bytes(shape) / devices / MEBIBYTE,
                    "temporaries, MiB": program.temporary_bytes / MEBIBYTE,
                    "peak, MiB": program.peak_bytes / MEBIBYTE,
                }
            )
    return rows


def kernel_bytes(shape):
    """Of the kernels of all blocks, whole."""
    return shape.num_layers * 12 * shape.width**2 * SCALAR_BYTES


def batch_rows(sides, layers, budget, compile_program=compile_encoder):
    """The largest batch of which N blocks and their gradients fit a device, Figure 9."""
    rows = []
    for side in sides:

        @functools.cache
        def peak(layout, batch, side=side):
            shape = table2_shape(side, layers, batch)
            return compile_program(shape, layout, side, remat=True).peak_bytes

        # Every device of ours keeps the inputs of all blocks, of Megatron's 1/p of them (Section 3.1.1)
        def spread(batch, side=side, peak=peak):
            inputs = SCALAR_BYTES * layers * table2_shape(side, layers, batch).bsh
            return peak("megatron1d", batch) - inputs * (1 - 1 / side**2)

        memory = {
            "megatron1d": functools.partial(peak, "megatron1d"),
            "megatron1d, inputs spread": spread,
            "optimus2d": functools.partial(peak, "optimus2d"),
        }
        # Of optimus2d rows of the mesh must have as many packs each
        steps = {name: side if name == "optimus2d" else 1 for name in memory}
        largest = {
            name: largest_batch(function, budget, steps[name], 8 * side) for name, function in memory.items()
        }
        printed = PRINTED_LARGEST.get(side**2, {})
        for name, batch in largest.items():
            rows.append(
                {
                    "devices": side**2,
                    "layout": name,
                    "hidden": WIDTH * side,
                    "largest batch": batch,
                    "there, GiB": memory[name](batch) / GIBIBYTE if batch else None,
                    "next, GiB": memory[name](batch + steps[name]) / GIBIBYTE,
                    "optimus2d is x": largest["optimus2d"] / batch if batch else None,
                    "printed": printed.get(name.partition(",")[0]),
                }
            )
    return rows


def largest_batch(memory, budget, step, first):
    """The largest multiple of a step whose `memory`, which never falls, is at most the budget: int, or 0.

    The search begins with `first`, a multiple of the step.
    """
    fitting, too_large = 0, first // step
    while memory(too_large * step) <= budget:
        fitting, too_large = too_large, 2 * too_large
    while too_large > fitting + 1:
        middle = (fitting + too_large) // 2
        if memory(middle * step) <= budget:
            fitting = middle
        else:
            too_large = middle
    return fitting * step
