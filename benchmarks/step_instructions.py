"""Instructions of a compiled training step: the part of the model of each, its work, and its time in a trace.

XLA calls an instruction on one thread, which may hand out parts of it, tasks, to others; what does not
depend on it is called meanwhile. A trace has the name on the first thread alone. Of a task it has where it
was handed out, and from when to when a thread ran it.
"""

import collections
import dataclasses
import math
from pathlib import Path

from bert_packed.core.settings import InputError
from bert_packed.training.program_text import executions, read_module
from bert_packed.training.step_report import product_flops

# Part of the name of an operation -> part of the step; the first that fits. Layers give the names
PARTS = {
    "lamb": "optimizer",
    "predictions": "vocabulary logits",
    "next_sentence": "next sentence",
    "feed_forward": "feed-forward",
    "attention": "attention",
    "embeddings": "embeddings",
}
OTHER_PART = "losses and the rest"
PRODUCTS, SUMS, COPIES, ELEMENTWISE = KINDS = ("products", "sums", "copies", "element by element")
RUNS_OTHERS = {"while", "conditional", "call"}
MOVING = {"parameter", "constant", "copy", "transpose", "bitcast", "reshape", "broadcast", "slice", "tuple"}
EXPONENTIALS = {
    "exponential",
    "exponential-minus-one",
    "log",
    "log-plus-one",
    "logistic",
    "tanh",
    "erf",
    "power",
}
# Events of XLA's thread pool, and the keys of a task's number in the first two
HANDED_OUT, TASK_STARTS, TASK_STOPS = (
    f"ThreadpoolListener::{name}" for name in ("Record", "StartRegion", "StopRegion")
)
HANDED_OUT_NUMBER, TASK_NUMBER = "_p", "_c"


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of an instruction in a run of its program, loops with all rounds; `kind` is of `KINDS`."""

    part: str
    kind: str
    flops: int = 0
    num_bytes: int = 0
    exponentials: int = 0


def read_work(text):
    """Work of each instruction but those inside a fusion, and those that only run others: dict by name."""
    module = read_module(text)
    inside = {one.attribute("calls") for one in module.instructions}
    found = {}
    for instruction, times in executions(module):
        if instruction.computation in inside or instruction.opcode in RUNS_OTHERS:
            continue
        # A fusion: what is inside does the work, its operands and results alone are memory
        work = module.computations.get(instruction.attribute("calls"), [instruction])
        shapes = [*(one.shapes for one in instruction.operands), instruction.shapes]
        before = found.get(instruction.name) or Work(_part(instruction), _kind(instruction, work))
        flops = sum(product_flops(one) for one in work if one.opcode == "dot")
        exponentials = sum(math.prod(one.shapes[0].sizes) for one in work if one.opcode in EXPONENTIALS)
        found[instruction.name] = dataclasses.replace(
            before,
            flops=before.flops + times * flops,
            num_bytes=before.num_bytes + times * sum(s.num_bytes for of in shapes for s in of),
            exponentials=before.exponentials + times * exponentials,
        )
    return found


def _part(instruction):
    """The part of the step by the instruction's name in the model; without one, by that of what it takes."""
    while instruction is not None:
        name = instruction.attribute("op_name")
        if name:
            return next((part for key, part in PARTS.items() if key in name), OTHER_PART)
        instruction = next(iter(instruction.operands), None)
    return OTHER_PART


def _kind(instruction, work):
    opcodes = {one.opcode for one in work}
    if opcodes & {"dot", "convolution"} or "matmul" in instruction.attribute("custom_call_target"):
        return PRODUCTS
    if opcodes & {"reduce", "reduce-window"}:
        return SUMS
    return COPIES if opcodes <= MOVING else ELEMENTWISE


@dataclasses.dataclass(frozen=True)
class HandingOut:
    """The handing out of the task of this number."""

    task: int


def read_threads(folder, names):
    """Activity of threads by a trace of `training.profiling.Profile`, as `core_seconds` takes it.

    Raises:
        InputError: no instruction of these `names` is in the trace, as on devices that trace kernels.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    threads = []
    for path in Path(folder).rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        threads += [_read_thread(plane, line, names) for plane in space.planes for line in plane.lines]
    if not any(isinstance(what, str) for spans in threads for _, _, what in spans):
        raise InputError("a trace must hold XLA's instructions. Received: none; only CPUs are known to.")
    return threads


def _read_thread(plane, line, names):
    titles = {number: event.name for number, event in plane.event_metadata.items()}
    keys = {number: stat.name for number, stat in plane.stat_metadata.items()}
    spans, started = [], []
    for event in sorted(line.events, key=lambda event: event.offset_ps):
        title = titles.get(event.metadata_id)
        start, end = event.offset_ps / 1e12, (event.offset_ps + event.duration_ps) / 1e12
        if title in names:
            spans.append((start, end, title))
        elif title == HANDED_OUT:
            spans.append((start, end, HandingOut(_number(event, keys, HANDED_OUT_NUMBER))))
        elif title == TASK_STARTS:
            started.append((start, _number(event, keys, TASK_NUMBER)))
        elif title == TASK_STOPS and started:  # a trace may begin inside a task
            begin, task = started.pop()
            spans.append((begin, end, task))
    return spans


def _number(event, keys, name):
    """The whole number that an event has under this name."""
    return next(
        stat.int64_value or stat.uint64_value for stat in event.stats if keys[stat.metadata_id] == name
    )


def core_seconds(threads):
    """Time of all threads together at each instruction, with the tasks that it handed out: dict by name.

        thread 1   calls a 0..10, and in it: hands out task 7 at 1, calls b 4..6
        thread 2   runs task 7 2..9, and in it: calls b 5..6
        ->   a 8 + 6, b 2 + 1

    A task that no instruction handed out, such as running the program, counts for nothing.

    Args:
        threads: List of lists of (start, end, what), of which two overlap only where one holds the other;
            `what` is the name of an instruction, the number of a task, or a `HandingOut`.
    """
    seconds, origins = collections.Counter(), {}
    for spans in threads:
        for (start, end, what), holder in _with_holders(spans):
            if isinstance(what, HandingOut):
                origins[what.task] = holder
                continue
            # What is called inside another is not the other's own time
            seconds[what] += end - start
            if holder is not None:
                seconds[holder] -= end - start
    of_instructions = collections.Counter()
    for what, own in seconds.items():
        # A task may hand out others
        while isinstance(what, int):
            what = origins.get(what)
        if what is not None:
            of_instructions[what] += own
    return dict(of_instructions)


def _with_holders(spans):
    """Each span, and what the innermost around it is, or None: an instruction or task."""
    around = []  # (end, what), from the outermost to the innermost
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        start, end, what = span
        while around and around[-1][0] <= start:
            around.pop()
        yield span, around[-1][1] if around else None
        if not isinstance(what, HandingOut):
            around.append((end, what))
