"""How sequences wait on the disk between two passes: columns in one file, cut into groups of rows.

Two rows in two groups, with layout {"lengths": int32, "tokens": int32 of "lengths"}:

    lengths  [3 2]           a value a row
    tokens   [7 8 9 5 6]     as many values a row as `lengths` says

A group is read without reading the others: three numbers in front of the columns say where it lies.
"""

import dataclasses
import json

import numpy as np

from data_gen import files
from data_gen.sequences import range_indices, to_offsets


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a layout.

    Attributes:
        dtype: NumPy's name, with byte order.
        sizes: Name of the int column that says how many entries each row has; "" for one.
        width: Values of an entry.
    """

    dtype: str
    sizes: str = ""
    width: int = 1


def take_rows(columns, layout, rows):
    """The rows at `rows`, int array `[m]`, of a dict of columns, in that order."""
    taken = {}
    for name, column in layout.items():
        values = columns[name]
        if column.sizes:
            sizes = columns[column.sizes]
            starts = to_offsets(sizes)[:-1]
            rows_of_values = range_indices(starts[rows], sizes[rows])
            taken[name] = values.reshape(-1, column.width)[rows_of_values].reshape(-1)
        else:
            taken[name] = values.reshape(-1, column.width)[rows].reshape(-1)
    return taken


def join_rows(parts, layout):
    """Dicts of columns, at least one, as one."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in layout}


def write_spill(path, columns, layout, group_sizes):
    """Write columns to a file that appears when complete.

    Args:
        path: Where to.
        columns: Dict from name to array.
        layout: Dict from name to `Column`.
        group_sizes: Int array `[G]`: rows of each group, in the order of the rows.
    """
    group_offsets = to_offsets(group_sizes)
    # where each group starts, in rows and in the entries that each sizes column counts
    starts = {"": group_offsets}
    for sizes in {column.sizes for column in layout.values()} - {""}:
        starts[sizes] = to_offsets(columns[sizes])[group_offsets]
    names = sorted(starts)
    header = json.dumps([names, len(group_sizes)]).encode()
    with files.write_whole(path) as partial, files.open_file(partial, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(np.stack([starts[name] for name in names]).astype("<i8").tobytes())
        for name, column in layout.items():
            file.write(np.ascontiguousarray(columns[name], column.dtype).tobytes())


def read_spill(path, layout, group=None, names=None):
    """Read columns.

    Args:
        path: What `write_spill` wrote.
        layout: As it was written.
        group: Number of one group; None for all rows.
        names: The columns wanted; None for all.

    Returns:
        Dict from name to array.
    """
    columns = {}
    with files.open_file(path) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        sizes_names, num_groups = json.loads(file.read(header_bytes))
        num_starts = len(sizes_names) * (num_groups + 1)
        starts = np.frombuffer(file.read(8 * num_starts), "<i8").reshape(len(sizes_names), -1)
        place = 8 + header_bytes + 8 * num_starts
        for name, column in layout.items():
            offsets = starts[sizes_names.index(column.sizes)]
            first, last = (0, offsets[-1]) if group is None else offsets[group : group + 2]
            entry_bytes = np.dtype(column.dtype).itemsize * column.width
            if names is None or name in names:
                file.seek(place + int(first) * entry_bytes)
                content = file.read(int(last - first) * entry_bytes)
                columns[name] = np.frombuffer(content, column.dtype)
            place += int(offsets[-1]) * entry_bytes
    return columns
