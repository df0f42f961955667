"""To which part of the model each instruction of a compiled step belongs, and what it does."""

import math
import re

from bert_packed.training.hlo import executions, read_module

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
RUNS_OTHERS = {"while", "conditional", "call"}
MOVING = {"parameter", "constant", "copy", "transpose", "bitcast", "reshape", "broadcast", "slice", "tuple"}


def group_instructions(text):
    """What the instructions of a program belong to.

    Args:
        text: The program, as of `StepProgram`.

    Returns:
        Dict from an instruction's name to (part of the step, one of `KINDS`, operations of its products,
        bytes that it reads and writes), in a run of the program, of those that are no part of a fusion and
        do not merely run others, as loops do.
    """
    module = read_module(text)
    computations = module.computations.values()
    inside = {one.attribute("calls") for of in computations for one in of.instructions.values()}
    found = {}
    for execution in executions(module):
        computation, instruction = execution.computation, execution.instruction
        if computation.name in inside or instruction.opcode in RUNS_OTHERS:
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
