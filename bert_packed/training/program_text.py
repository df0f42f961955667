"""Parser of XLA's HLO text: instructions, executions, collectives.

Reads an HLO module, optimised or not, of any backend:

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

The body of a loop counts once in XLA's own counts, and once per iteration here.
"""

import dataclasses
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
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([^\]]*)\](\{[^{}]*S\(1\)[^{}]*\})?")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")  # no space precedes those of layouts, such as T(8,128)
_NAME = re.compile(r"[\w.\-]+")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The type of an array: `dtype` as XLA prints it, `dims` as text, `<=5` for a dimension of up to 5."""

    dtype: str
    dims: tuple[str, ...]
    is_on_chip: bool = False  # in a TPU's vector memory: S(1) in its layout

    @property
    def is_dynamic(self):
        """True if a dimension is known only when the program runs."""
        return any(not dim.isdecimal() for dim in self.dims)

    @property
    def sizes(self):
        """Upper bounds of the dimensions: tuple of int; 1 for an unbounded one."""
        return tuple(int(dim.lstrip("<=?") or 1) for dim in self.dims)

    @property
    def num_bytes(self):
        """Upper bound of the size of all elements."""
        bits = BITS.get(self.dtype, 8)  # the narrow floats, f8e4m3fn and others
        return -(-math.prod(self.sizes) * bits // 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str  # without `%`
    computation: str  # the name of it
    shapes: tuple[Shape, ...]  # of the result; several for a tuple, nested ones flattened
    opcode: str  # "dot", "while", ...
    operands: tuple["Instruction", ...]
    argument: str  # text in its parentheses: the value of a constant, the number of a parameter
    attributes: str  # text behind its parentheses
    line: str  # as printed

    def attribute(self, name):
        """The text of `name="..."` or `name=...`, up to a comma or bracket; "" where there is none."""
        found = re.search(rf'\b{name}="([^"]*)"', self.attributes)
        # Quoted names from a user's code may look like an attribute
        found = found or re.search(rf"\b{name}=%?([\w.\-]+)", _QUOTED.sub('""', self.attributes))
        return found[1] if found else ""

    @property
    def called(self):
        """Names of the computations that it runs, except those of a loop; reducers among them."""
        if self.opcode in ("async-update", "async-done"):  # their computation is called by async-start
            return []
        attributes = _QUOTED.sub('""', self.attributes)
        listed = _CALLED_LIST.search(attributes)
        return _CALLED.findall(attributes) + (_NAME.findall(listed[1]) if listed else [])


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its first line, instructions by computation, and the name of the entry computation."""

    header: str
    computations: dict[str, list[Instruction]]
    entry: str

    @property
    def num_devices(self):
        """Number of devices of the program: replicas times partitions."""
        counts = [re.search(rf"\b{name}=(\d+)", self.header) for name in ("replica_count", "num_partitions")]
        return math.prod(int(count[1]) for count in counts if count)

    @property
    def instructions(self):
        """All instructions, each once, also those that are not reached: list."""
        return [one for part in self.computations.values() for one in part]

    def root(self, computation):
        """The instruction whose result a computation returns: the one marked ROOT, or the last."""
        lines = self.computations[computation]
        return next((one for one in lines if one.line.lstrip().startswith("ROOT ")), lines[-1])


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction by which devices exchange arrays."""

    kind: str  # one of `COLLECTIVES`
    operand_bytes: int  # input of one device, in one execution
    group_size: int  # devices that exchange with one another; 2 for a collective-permute
    times: int | None  # executions in a run of the program; None inside a loop of unknown length

    @property
    def num_bytes(self):
        """Input of one device in a run of the program; None where `times` is."""
        return None if self.times is None else self.operand_bytes * self.times


def read_module(text):
    """Parse a text: `Module`; raises `ValueError` where no computation is marked ENTRY."""
    computations, entry, header, name = {}, None, "", None
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("HloModule"):
            header = stripped
        elif name is None and stripped.endswith("{") and " = " not in _COMMENT.sub("", stripped):
            words = stripped.split()
            is_entry = words[0] == "ENTRY"
            name, named = _NAME.search(words[is_entry])[0], {}
            entry = name if is_entry else entry
        elif name is not None and stripped.startswith("}"):
            computations[name] = list(named.values())
            name = None
        elif name is not None and " = " in line:
            instruction = _read_instruction(line, name, named)
            named[instruction.name] = instruction
    if entry not in computations:
        raise ValueError("a program must have a computation marked ENTRY")
    return Module(header, computations, entry)


def _read_instruction(line, computation, named):
    """Parse `%name = shapes opcode(operands), attributes`; `named` are the previous instructions."""
    name, _, rest = _COMMENT.sub("", line).strip().removeprefix("ROOT ").partition(" = ")
    opcode = _OPCODE.search(rest)
    shapes = tuple(
        Shape(dtype, tuple(dim.strip() for dim in dims.split(",") if dim.strip()), bool(space))
        for dtype, dims, space in _SHAPE.findall(rest[: opcode.start()])
    )
    closing = _closing(rest, opcode.end() - 1)
    argument = rest[opcode.end() : closing]
    # Some printers write the shape before each operand; no part of it is the name of an instruction
    operands = tuple(named[word] for word in _NAME.findall(argument) if word in named)
    return Instruction(
        *(name.lstrip("%"), computation, shapes, opcode[1]),
        *(operands, argument, rest[closing + 1 :], line),
    )


def _closing(text, opening):
    """Position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, opening):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise ValueError(f"a parenthesis must close. Received: {text[:80]}")


def executions(module):
    """Yield (`Instruction`, number of executions) for a run of a program, with loops, calls and fusions.

    The number is None inside a loop of unknown length. An instruction comes once for each call of its
    computation, and every branch of a conditional counts.
    """
    yield from _executions(module, module.entry, 1)


def _executions(module, computation, times):
    for instruction in module.computations.get(computation, ()):
        yield instruction, times
        called, rounds = instruction.called, 1
        if instruction.opcode == "while":
            called, rounds = [instruction.attribute("body")], trip_count(module, instruction)
        for name in called:
            yield from _executions(module, name, None if None in (times, rounds) else times * rounds)


def loop_share(module):
    """Estimated cycles of a run over those in which the body of a loop counts once: float, or None.

    The compiler for TPUs writes its estimate at each instruction. None where it wrote none and there are
    loops, or for a loop of unknown length.
    """
    once, total, has_loops = 0, 0, False
    for instruction, times in executions(module):
        if times is None:
            return None
        has_loops |= times > 1
        if cycles := estimated_cycles(instruction):
            once += cycles
            total += cycles * times
    if not has_loops:
        return 1.0
    return total / once if once else None


def estimated_cycles(instruction):
    """The estimate of the compiler for TPUs of one execution: int, or None."""
    found = _CYCLES.search(instruction.attributes)
    return int(found[1]) if found else None


def find_collectives(module):
    """Collectives in a run of a program: list of `Collective`; an asynchronous one counts once."""
    found = []
    for instruction, times in executions(module):
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            size = sum(shape.num_bytes for one in instruction.operands for shape in one.shapes)
            group_size = read_group_size(instruction.attributes, module.num_devices)
            found.append(Collective(kind, size, group_size, times))
    return found


def read_group_size(attributes, num_devices):
    """Number of devices that exchange with one another, from any form in which XLA prints groups.

        {{0,1},{2,3}}                          2
        {}, or nothing                         all
        [2,4]<=[4,2]T(1,0)                     4: two rows of the numbers 0 to 7 in some order
        mesh['x'=2,'y'=4] {'y'}                4: along an axis of a mesh
        mesh['x'=8] {'x':(2)4}                 4: along a part of an axis, of size 4 behind 2
        source_target_pairs={{0,1},{1,0}}      2: of a collective-permute, from and to

    `num_devices` is that of the program. Raises `ValueError` for other forms.
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


def trip_count(module, loop):
    """Iterations of a `while` loop, as found by XLA or else by us: int, None if unknown."""
    known = re.search(r'"?known_trip_count"?:\s*\{\s*"n":\s*"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    # A counter may go from 0 in steps of one while it is below a constant, or below each of several limits,
    # as in `tf.while_loop` with `maximum_iterations`. If one of these is not constant, the result is an upper
    # bound
    counter = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"', loop.attributes)
    condition = loop.attribute("condition")
    if condition not in module.computations:
        return None
    # The compiler for TPUs does not write it down
    index = int(counter[1]) if counter else _compared_counter(module, loop)
    if index is None or not _starts_at_zero(loop, index):
        return None
    return min(_limits(module, module.root(condition), {}), default=None)


def _compared_counter(module, loop):
    """Place in a loop's tuple of what its condition compares, if its body adds 1 to it; or None."""
    compared = module.root(loop.attribute("condition"))
    if compared.opcode != "compare" or loop.attribute("body") not in module.computations:
        return None
    places = {one.attribute("index") for one in map(_source, compared.operands)} - {""}
    result = module.root(loop.attribute("body"))
    if len(places) != 1 or result.opcode != "tuple":
        return None
    index = int(places.pop())
    added = [_source(one) for one in _source(result.operands[index]).operands]
    is_counter = (
        _source(result.operands[index]).opcode == "add"
        and [one.attribute("index") for one in added if one.opcode == "get-tuple-element"] == [str(index)]
        and [one.argument for one in added if one.opcode == "constant"] == ["1"]
    )
    return index if is_counter else None


def _source(instruction):
    """The instruction whose value this one copies."""
    while instruction.opcode in ("copy", "bitcast") and instruction.operands:
        instruction = instruction.operands[0]
    return instruction


def _starts_at_zero(loop, index):
    """True if an element of a loop's initial tuple is 0, or a copy of 0."""
    start = loop.operands[0] if loop.operands else loop
    if start.opcode != "tuple" or index >= len(start.operands):
        return False
    found = _source(start.operands[index])
    return found.opcode == "constant" and found.argument == "0"


def _limits(module, instruction, arguments):
    """Constant upper limits in a conjunction of comparisons: list of int."""
    # `arguments` has the caller's constants, or None, by number of the parameter
    operands = instruction.operands
    if instruction.opcode == "and":
        return [limit for one in operands for limit in _limits(module, one, arguments)]
    if instruction.opcode in ("fusion", "call") and instruction.called:
        handed = {number: _constant(one, arguments) for number, one in enumerate(operands)}
        return _limits(module, module.root(instruction.called[0]), handed)
    if instruction.opcode == "compare" and len(operands) == 2:
        side = {"LT": 1, "GT": 0}.get(instruction.attribute("direction"))
        limit = None if side is None else _constant(operands[side], arguments)
        return [] if limit is None else [limit]
    return []


def _constant(instruction, arguments):
    if instruction.opcode == "parameter":
        return arguments.get(int(instruction.argument))
    is_number = instruction.opcode == "constant" and instruction.argument.isdecimal()
    return int(instruction.argument) if is_number else None
