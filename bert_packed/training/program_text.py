"""Reader of compiled programs as XLA prints them: instructions, executions, products, collectives.

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

XLA's own counts take the body of a loop once; here it counts as often as the loop runs.
"""

import dataclasses
import json
import math
import re

BITS = {
    "pred": 8,  # a byte each, in memory
    **{f"{kind}{bits}": bits for kind in "su" for bits in (2, 4, 8, 16, 32, 64)},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0},
}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
LIBRARY_PRODUCTS = re.compile(r"__cublas\$(lt\$)?matmul|__cublas\$gemm")
OTHER_PRODUCTS = re.compile(r"gemm|matmul", re.IGNORECASE)
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
    """A function of the program: its name without `%`, and its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self):
        """The instruction whose result it returns; the last one where none is marked."""
        marked = [one for one in self.instructions.values() if one.line.lstrip().startswith("ROOT ")]
        return marked[0] if marked else list(self.instructions.values())[-1]

    def operand_shapes(self, instruction):
        """Shapes of what an instruction takes: a list of tuples of `Shape`, one for each operand."""
        return [self.instructions[name].shapes for name in instruction.operands if name in self.instructions]


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program: its first line, its computations by name, and the name of the one that is run."""

    header: str
    computations: dict[str, Computation]
    entry: str

    @property
    def num_devices(self):
        """Devices that the program is made for: its replicas times its partitions."""
        counts = [re.search(rf"\b{name}=(\d+)", self.header) for name in ("replica_count", "num_partitions")]
        return math.prod(int(count[1]) for count in counts if count)

    @property
    def instructions(self):
        """All instructions, each once, whether or not they are reached: list."""
        return [one for part in self.computations.values() for one in part.instructions.values()]


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction that a run of the program executes, in its computation.

    Attributes:
        times: How often, in all; None inside a loop of unknown length. Every branch of a conditional counts.
    """

    instruction: Instruction
    computation: Computation
    times: int | None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction by which devices exchange arrays.

    Attributes:
        kind: One of `COLLECTIVES`.
        operand_bytes: What one device puts in, in one execution.
        group_size: Devices that exchange with one another; 2 of a collective-permute.
        times: As of `Execution`.
    """

    kind: str
    operand_bytes: int
    group_size: int
    times: int | None

    @property
    def num_bytes(self):
        """What one device puts in, in a run of the program; None where `times` is."""
        return None if self.times is None else self.operand_bytes * self.times


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
    yield from _executions(module, module.computations[module.entry], 1)


def _executions(module, computation, times):
    for instruction in computation.instructions.values():
        yield Execution(instruction, computation, times)
        called, rounds = _called(instruction), 1
        if instruction.opcode == "while":
            called, rounds = [instruction.attribute("body")], trip_count(module, computation, instruction)
        inside = None if times is None or rounds is None else times * rounds
        for name in called:
            if name in module.computations:
                yield from _executions(module, module.computations[name], inside)


def matmul_flops(module):
    """Operations of the matrix products of a run of the program, on one device: int, or None.

    A product of `[m, k]` and `[k, n]` is 2 m k n; convolutions are not counted. None where a library computes
    a product whose sizes are not written down, or one stands in a loop of unknown length.
    """
    total = 0
    for one in executions(module):
        flops = _product_flops(one.instruction, one.computation)
        if flops is None or (flops and one.times is None):
            return None
        total += flops and flops * one.times
    return total


def find_collectives(module):
    """The collectives that a run of a program executes: list of `Collective`, in the order of the text.

    An asynchronous one, `all-gather-start` and `all-gather-done` or inside `async-start`, counts once.
    """
    found = []
    for execution in executions(module):
        kind = execution.instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            operands = execution.computation.operand_shapes(execution.instruction)
            size = sum(shape.num_bytes for shapes in operands for shape in shapes)
            group_size = read_group_size(execution.instruction.attributes, module.num_devices)
            found.append(Collective(kind, size, group_size, execution.times))
    return found


def read_group_size(attributes, num_devices):
    """How many devices exchange with one another, of all forms in which XLA writes down its groups.

        {{0,1},{2,3}}                          2
        {}, or nothing                         all
        [2,4]<=[4,2]T(1,0)                     4: two rows of the numbers 0 to 7 in some order
        mesh['x'=2,'y'=4] {'y'}                4: along an axis of a mesh
        mesh['x'=8] {'x':(2)4}                 4: along a part of an axis, of size 4 behind 2
        source_target_pairs={{0,1},{1,0}}      2: of a collective-permute, from and to

    Args:
        attributes: Text behind the parentheses of the instruction.
        num_devices: Of the program.

    Raises:
        ValueError: the groups stand in a form that is none of these.
    """
    found = re.search(r"\b(?:replica_groups|source_target_pairs)=(.*)", attributes)
    text = found[1] if found else "{}"
    if text.startswith("{{"):
        groups = re.findall(r"\{([\d,\s]*)\}", text[1 : text.index("}}") + 1])
        return max(len(group.split(",")) for group in groups)
    if text.startswith("{}"):
        return num_devices
    if rows := re.match(r"\[\d+,(\d+)\]", text):
        return int(rows[1])
    if mesh := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? \{([^}]*)\}", text):
        axes = dict(axis.replace("'", "").split("=") for axis in mesh[1].split(","))
        chosen = re.findall(r"'?([\w.\-]+?)'?(?::\(\d+\)(\d+))?(?:,|$)", mesh[2])
        return math.prod(int(size or axes[name]) for name, size in chosen)
    raise ValueError(f"groups of devices must have a known form. Received: {text[:80]}")


def _product_flops(instruction, computation):
    """Of one execution: 0 where it is no product, None where it is one of unknown size."""
    if instruction.opcode == "dot":
        found = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = [int(dim) for dim in found[1].split(",") if dim] if found else []
    elif instruction.opcode == "custom-call":
        target = instruction.attribute("custom_call_target")
        if not LIBRARY_PRODUCTS.search(target):
            return None if OTHER_PRODUCTS.search(target) else 0
        found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.attributes)
        if not found:
            return None
        contracted = [int(dim) for dim in json.loads(found[1])]
    else:
        return 0
    left = computation.operand_shapes(instruction)[0][0].sizes
    result = instruction.shapes[0].sizes  # a library has a workspace behind it
    return 2 * math.prod(result) * math.prod(left[dim] for dim in contracted)


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
