"""How long each instruction of a compiled step takes, and to which part of the model it belongs."""

import collections
import math
import re
from pathlib import Path

from bert_packed.training.hlo import executions, read_module
from data_gen.cli.settings import InputError

# What the name of an operation holds -> part of the step; the first that fits. Layers give the names
PLACES = {
    "lamb": "optimizer",
    "predictions": "vocabulary logits",
    "next_sentence": "next sentence",
    "feed_forward": "feed-forward",
    "attention": "attention",
    "embeddings": "embeddings",
}
OTHER_PLACE = "losses and the rest"
PRODUCTS, SUMS, COPIES, ELEMENTWISE = KINDS = ("products", "sums", "copies", "element by element")
MOVING = {"parameter", "constant", "copy", "transpose", "bitcast", "reshape", "broadcast", "slice", "tuple"}


def read_seconds(folder, names):
    """Seconds of instructions in a trace of `training.profiling.Profile`; a loop's are without its body's.

    Args:
        folder: Of the trace.
        names: Of the instructions, a set; other events are left out.

    Returns:
        Dict from name to seconds, of all threads together.

    Raises:
        InputError: no instruction of these is in the trace, as on devices that trace kernels.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    seconds = collections.Counter()
    for path in Path(folder).rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            titles = {number: event.name for number, event in plane.event_metadata.items()}
            for line in plane.lines:
                events = [
                    (event.offset_ps, event.duration_ps, titles[event.metadata_id])
                    for event in line.events
                    if titles.get(event.metadata_id) in names
                ]
                for name, picoseconds in own_times(events).items():
                    seconds[name] += picoseconds / 1e12
    if not seconds:
        raise InputError("a trace must tell of XLA's instructions. Received: none; only CPUs are known to.")
    return dict(seconds)


def own_times(events):
    """How long each of several nested events lasted, without those inside it.

        a 0..10, b 2..5, c 6..7   ->   a 6, b 3, c 1

    Args:
        events: List of (start, duration, name); two of them overlap only where one holds the other.

    Returns:
        Dict from name to the sum over its events.
    """
    own, around = collections.Counter(), []  # (end, name), from the outermost to the innermost
    for start, duration, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while around and around[-1][0] <= start:
            around.pop()
        if around:
            own[around[-1][1]] -= duration
        own[name] += duration
        around.append((start + duration, name))
    return dict(own)


def group_instructions(text):
    """What the instructions of a program belong to.

    Args:
        text: The program, as of `StepProgram`.

    Returns:
        Dict from an instruction's name to (part of the step, one of `KINDS`, operations of its products,
        bytes that it reads and writes), in a run of the program, of those that are no part of a fusion.
    """
    module = read_module(text)
    computations = module.computations.values()
    inside = {one.attribute("calls") for of in computations for one in of.instructions.values()}
    found = {}
    for execution in executions(module):
        computation, instruction = execution.computation, execution.instruction
        if computation.name in inside:
            continue
        called = module.computations.get(instruction.attribute("calls"))
        work = called.instructions.values() if called else [instruction]
        flops = sum(_product_flops(called or computation, one) for one in work)
        shapes = [*computation.operand_shapes(instruction), instruction.shapes]
        num_bytes = sum(shape.num_bytes for of in shapes for shape in of)
        group = _place(computation, instruction), _kind(instruction, work)
        *_, flops_before, bytes_before = found.get(instruction.name, (*group, 0, 0))
        found[instruction.name] = (
            *group,
            flops_before + execution.times * flops,
            bytes_before + execution.times * num_bytes,
        )
    return found


def _place(computation, instruction):
    """The part of the step by the instruction's name in the model; without one, by that of what it takes."""
    while instruction is not None:
        name = instruction.attribute("op_name")
        if name:
            return next((place for key, place in PLACES.items() if key in name), OTHER_PLACE)
        operands = instruction.operands
        instruction = computation.instructions.get(operands[0]) if operands else None
    return OTHER_PLACE


def _kind(instruction, work):
    opcodes = {one.opcode for one in work}
    if opcodes & {"dot", "convolution"} or "matmul" in instruction.attribute("custom_call_target"):
        return PRODUCTS
    if opcodes & {"reduce", "reduce-window"}:
        return SUMS
    return COPIES if opcodes <= MOVING else ELEMENTWISE


def _product_flops(computation, instruction):
    if instruction.opcode != "dot":
        return 0
    left = computation.operand_shapes(instruction)[0][0].sizes
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)[1]
    depth = math.prod(left[int(axis)] for axis in summed.split(",") if axis)
    return 2 * math.prod(instruction.shapes[0].sizes) * depth
