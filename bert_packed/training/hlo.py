"""A compiled program as XLA prints it: its instructions, and how often each is executed.

Reads the text of an HLO module, optimised or not, of any backend:

    HloModule jit_step, num_partitions=4
    %body (p: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
      %p = (s32[], f32[2,3]{1,0}) parameter(0)
      ...
    }
    ENTRY %main (a: f32[2,3]) -> f32[2,3] {
      %a = f32[2,3]{1,0} parameter(0)
      %w = (s32[], f32[2,3]{1,0}) while(%t), condition=%cond, body=%body
      ...
    }
"""

import dataclasses
import math
import re

BITS = {
    "pred": 8,  # a byte each, in memory
    **{f"{kind}{bits}": bits for kind in "su" for bits in (2, 4, 8, 16, 32, 64)},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0},
}
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([^\]]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The type of one array: `dtype` as XLA writes it, `dims` as text, `<=5` for a dimension of up to 5."""

    dtype: str
    dims: tuple[str, ...]

    @property
    def is_dynamic(self):
        """Whether a dimension is known only when the program runs."""
        return any(not dim.isdecimal() for dim in self.dims)

    @property
    def sizes(self):
        """The dimensions, each at its largest: tuple of int; an unbounded one counts as 1."""
        return tuple(int(dim.lstrip("<=?") or 1) for dim in self.dims)

    @property
    def num_bytes(self):
        """Of all elements; of a dynamic shape at its largest."""
        bits = BITS.get(self.dtype, 8)  # the narrow floats, f8e4m3fn and others
        return -(-math.prod(self.sizes) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Without `%`.
        shapes: Of what it makes; several for a tuple, nested ones flattened.
        opcode: "dot", "while", ...
        operands: Names of what it takes; of a constant or a parameter the text in its parentheses.
        attributes: The text behind its parentheses.
        line: As it stands.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    line: str

    def attribute(self, name):
        """The text of `name="..."` or `name=...` up to a comma or bracket; "" where there is none."""
        found = re.search(rf'\b{name}="([^"]*)"', self.attributes)
        found = found or re.search(rf"\b{name}=%?([\w.\-]+)", self.unquoted)
        return found[1] if found else ""

    @property
    def unquoted(self):
        """The attributes without what stands in quotes, where a name in a user's code may look like one."""
        return _QUOTED.sub('""', self.attributes)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program.

    Attributes:
        name: Without `%`.
        instructions: Dict from name to `Instruction`, in order.
    """

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self):
        """What it returns: `Instruction`; the last one where none is marked."""
        marked = [one for one in self.instructions.values() if one.line.lstrip().startswith("ROOT ")]
        return marked[0] if marked else list(self.instructions.values())[-1]

    def operand_shapes(self, instruction):
        """Shapes of what an instruction takes: a list of tuples of `Shape`, one for each operand."""
        return [self.instructions[name].shapes for name in instruction.operands if name in self.instructions]


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program.

    Attributes:
        header: Its first line.
        computations: Dict from name to `Computation`.
        entry: Name of the one that is run.
    """

    header: str
    computations: dict[str, Computation]
    entry: str

    @property
    def num_devices(self):
        """Devices that the program is made for: its replicas times its partitions."""
        counts = [re.search(rf"\b{name}=(\d+)", self.header) for name in ("replica_count", "num_partitions")]
        return math.prod(int(count[1]) for count in counts if count)


@dataclasses.dataclass(frozen=True)
class Execution:
    """That an instruction is executed in a run of the program.

    Attributes:
        instruction, computation: What, and where it stands.
        times: How often, in all. In a loop whose length is not known, as if it ran once; every branch of a
            conditional counts.
        is_exact: False inside such a loop.
    """

    instruction: Instruction
    computation: Computation
    times: int
    is_exact: bool


def read_module(text):
    """The `Module` of a text.

    Raises:
        ValueError: there is no computation marked ENTRY in it.
    """
    computations, entry, header, name, lines = {}, None, "", None, []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("HloModule"):
            header = stripped
        elif name is None and stripped.endswith("{") and " = " not in _COMMENT.sub("", stripped):
            words = stripped.split()
            is_entry = words[0] == "ENTRY"
            name, lines = re.match(r"%?([\w.\-]+)", words[is_entry])[1], []
            entry = name if is_entry else entry
        elif name is not None and stripped.startswith("}"):
            computations[name] = Computation(name, {one.name: one for one in lines})
            name = None
        elif name is not None and " = " in line:
            lines.append(_read_instruction(line))
    if entry not in computations:
        raise ValueError("a program must have a computation marked ENTRY")
    return Module(header, computations, entry)


def executions(module):
    """Everything that a run of a program executes, with the bodies of its loops, calls and fusions.

    Yields:
        `Execution`, in the order of the text; of a computation that is called from two places, twice.
    """
    yield from _executions(module, module.computations[module.entry], 1, True)


def _executions(module, computation, times, is_exact):
    for instruction in computation.instructions.values():
        yield Execution(instruction, computation, times, is_exact)
        if instruction.opcode == "while":
            length = trip_count(module, computation, instruction)
            called, rounds = [instruction.attribute("body")], times * (length or 1)
            is_known = is_exact and length is not None
        else:
            called, rounds, is_known = _called(instruction), times, is_exact
        for name in called:
            if name in module.computations:
                yield from _executions(module, module.computations[name], rounds, is_known)


def trip_count(module, computation, loop):
    """How often the body of a `while` runs: int; None where the text does not tell.

    XLA's own finding where it says so (`known_trip_count`). Else the loop must count from 0 in steps of one
    as long as the count is below a constant, or below each of several: so does `tf.while_loop` with
    `maximum_iterations`. Where one of these is no constant, this is the most that it runs.
    """
    known = re.search(r'"?known_trip_count"?:\s*\{\s*"n":\s*"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    counter = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"', loop.attributes)
    if not counter or not _starts_at_zero(computation, loop, int(counter[1])):
        return None
    condition = module.computations.get(loop.attribute("condition"))
    limits = _limits(module, condition, condition.root, {}) if condition else []
    return min(limits, default=None)


def _starts_at_zero(computation, loop, index):
    """Whether an element of the tuple that a loop begins with is known to be 0, or a copy of what is."""
    start = computation.instructions.get(loop.operands[0])
    if start is None or start.opcode != "tuple" or index >= len(start.operands):
        return False
    found = computation.instructions.get(start.operands[index])
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = computation.instructions.get(found.operands[0])
    return found is not None and found.opcode == "constant" and found.operands == ("0",)


def _limits(module, computation, instruction, arguments):
    """The constants that something is compared to be below, of a conjunction: list of int.

    Args:
        instruction: In `computation`; what must be true.
        arguments: Dict from parameter number to a constant that a caller handed in.
    """
    found = [computation.instructions.get(name) for name in instruction.operands]
    if instruction.opcode == "and":
        return [limit for one in found if one for limit in _limits(module, computation, one, arguments)]
    if instruction.opcode in ("fusion", "call") and (names := _called(instruction)):
        inner = module.computations[names[0]]
        handed = {number: _constant(one, arguments) for number, one in enumerate(found) if one}
        return _limits(module, inner, inner.root, handed)
    if instruction.opcode == "compare" and len(found) == 2 and all(found):
        side = {"LT": 1, "GT": 0}.get(instruction.attribute("direction"))
        limit = None if side is None else _constant(found[side], arguments)
        return [] if limit is None else [limit]
    return []


def _constant(instruction, arguments):
    if instruction.opcode == "parameter":
        return arguments.get(int(instruction.operands[0]))
    is_number = instruction.opcode == "constant" and instruction.operands[0].isdecimal()
    return int(instruction.operands[0]) if is_number else None


def _called(instruction):
    """Names of the computations that an instruction runs, other than a loop's; reducers among them."""
    if instruction.opcode in ("async-update", "async-done"):  # what async-start has begun
        return []
    listed = _CALLED_LIST.search(instruction.unquoted)
    names = _CALLED.findall(instruction.unquoted)
    return names + [name.strip().lstrip("%") for name in (listed[1].split(",") if listed else [])]


def _read_instruction(line):
    name, _, rest = _COMMENT.sub("", line).strip().removeprefix("ROOT ").partition(" = ")
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
    else:
        end = rest.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(dim.strip() for dim in dims.split(",") if dim.strip()))
        for dtype, dims in _SHAPE.findall(rest[:end])
    )
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    operands = tuple(_split(rest[opening + 1 : closing]))
    return Instruction(
        name.lstrip("%"), shapes, rest[end:opening].strip(), operands, rest[closing + 1 :], line
    )


def _closing(text, opening):
    """Where the parenthesis that opens at a place closes."""
    depth = 0
    for found in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, opening):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise ValueError(f"a parenthesis must close. Received: {text[:80]}")


def _split(text):
    """Names in a list of operands, whether or not each stands behind its shape."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text + ","):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [part.split()[-1].lstrip("%") for part in parts if part]
