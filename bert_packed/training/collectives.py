"""What the devices of a compiled program send to one another: kinds, groups, bytes.

Read from the program itself, so that nothing that the compiler adds, drops or joins is missed.
"""

import dataclasses
import re

import numpy as np

from bert_packed.training.hlo import executions

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([\w.\-]+?)'?(?::\((\d+)\)(\d+))?(?:,|$)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction by which devices exchange arrays.

    Attributes:
        kind: One of `KINDS`.
        operand_bytes: What one device puts in, in one execution.
        groups: Devices that exchange with one another: tuple of tuples of numbers, as the program counts them
            (replicas, partitions or both together). Of a collective-permute the groups are the pairs, from
            and to.
        times: Executions in a run of the program; see `hlo.Execution`.
        is_exact: Whether `times` is known.
    """

    kind: str
    operand_bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int
    is_exact: bool

    @property
    def group_size(self):
        """Devices in a group; 2 of a collective-permute."""
        return max(map(len, self.groups), default=1)

    @property
    def num_bytes(self):
        """What one device puts in, in a run of the program."""
        return self.operand_bytes * self.times


def find_collectives(module):
    """The collectives that a run of a program executes: list of `Collective`, in the order of the text.

    An asynchronous one, `all-gather-start` and `all-gather-done` or inside `async-start`, counts once.

    Args:
        module: `hlo.Module`.
    """
    found = []
    for execution in executions(module):
        kind = execution.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            operands = execution.computation.operand_shapes(execution.instruction)
            size = sum(shape.num_bytes for shapes in operands for shape in shapes)
            groups = read_groups(execution.instruction.attributes, module.num_devices)
            found.append(Collective(kind, size, groups, execution.times, execution.is_exact))
    return found


def summarise(collectives):
    """Collectives of one kind and one size of groups as one row.

    Returns:
        List of dicts `kind`, `group_size`, `instructions` in the text, `executions` and `bytes`, what one
        device puts in, in a run of the program; the most bytes first.
    """
    rows = {}
    for one in collectives:
        row = rows.setdefault((one.kind, one.group_size), {"instructions": 0, "executions": 0, "bytes": 0})
        row["instructions"] += 1
        row["executions"] += one.times
        row["bytes"] += one.num_bytes
    ordered = sorted(rows.items(), key=lambda item: -item[1]["bytes"])
    return [{"kind": kind, "group_size": size, **row} for (kind, size), row in ordered]


def read_groups(attributes, num_devices):
    """Who exchanges with whom, of all forms in which XLA writes it down.

        {{0,1},{2,3}}                          0 with 1, 2 with 3
        {}, or nothing                         all with all
        [2,2]<=[4]                             the numbers 0 to 3 in two rows: {{0,1},{2,3}}
        [2,2]<=[2,2]T(1,0)                     the same, transposed before: {{0,2},{1,3}}
        mesh['x'=2,'y'=2] {'x'}                along an axis of a mesh: {{0,2},{1,3}}
        mesh['x'=4] {'x':(2)2}                 along a part of an axis, of size 2 behind 2: {{0,1},{2,3}}
        mesh['x'=4], device_ids=(3,2,1,0) {}   of a mesh whose devices lie in another order
        source_target_pairs={{0,1},{1,0}}      of a collective-permute: from 0 to 1, and back

    Args:
        attributes: Text behind the parentheses of the instruction.
        num_devices: Of the program.

    Returns:
        Tuple of tuples of int.

    Raises:
        ValueError: the groups stand in a form that is none of these.
    """
    start = re.search(r"\b(?:replica_groups|source_target_pairs)=", attributes)
    text = attributes[start.end() :] if start else "{}"
    if text.startswith("{{"):
        inside = text[1 : text.index("}}") + 1]
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]*)\}", inside))
    if text.startswith("{}"):
        return (tuple(range(num_devices)),)
    if text.startswith("["):
        return _as_groups(_read_iota(text))
    if text.startswith("mesh["):
        return _as_groups(_read_mesh(text))
    raise ValueError(f"groups of devices must have a known form. Received: {text[:80]}")


def _read_iota(text):
    """Of `[2,4]<=[4,2]T(1,0)`: the numbers counted up in a shape, transposed, in another shape."""
    shape, counted, order = _IOTA.match(text).groups()
    numbers = np.arange(np.prod(_numbers(counted or shape))).reshape(_numbers(counted or shape))
    return numbers.transpose(_numbers(order) if order else None).reshape(_numbers(shape))


def _read_mesh(text):
    """Of `mesh['x'=2,'y'=4] {'y'}`: a row for each group, `[groups, size]`."""
    axes, devices, chosen = re.match(
        r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}", text
    ).groups()
    numbers = None
    if devices:
        is_iota = devices.startswith("[")  # `[4,2]T(1,0)`, or each by its number
        numbers = _read_iota(devices) if is_iota else np.array(_numbers(devices))
    parts = [(name, int(before or 1), int(size or 0)) for name, before, size in _AXIS.findall(chosen) if name]
    # Each axis is cut where a chosen part of it begins and ends
    pieces, places = [], {}
    for axis in axes.split(","):
        name, size = axis.replace("'", "").split("=")
        begun = 1
        for part_name, before, part_size in sorted(parts):
            if part_name == name:
                part_size = part_size or int(size)
                places[name, before] = len(pieces) + 1
                pieces += [before // begun, part_size]
                begun = before * part_size
        pieces.append(int(size) // begun)
    numbers = (np.arange(np.prod(pieces)) if numbers is None else numbers).reshape(pieces)
    along = [places[name, before] for name, before, _ in parts]
    others = [place for place in range(len(pieces)) if place not in along]
    group_size = int(np.prod([pieces[place] for place in along]))
    return numbers.transpose(*others, *along).reshape(-1, group_size)


def _as_groups(numbers):
    return tuple(tuple(row) for row in numbers.tolist())


def _numbers(text):
    return tuple(int(number) for number in text.split(",") if number.strip())
