"""How sequences wait on the disk between two passes: columns in one file, cut into groups of rows.

Two rows in two groups, with layout {"lengths": int32, "tokens": int32 of "lengths"}:

    lengths  [3 2]           a value a row
    tokens   [7 8 9 5 6]     as many values a row as `lengths` says

A group is read without reading the others, nor where they lie: a table in front of the columns has a line of
two or three numbers for each group, and only the two lines around it are read.
"""

import dataclasses
import json

import numpy as np

from data_gen.jobs import files
from data_gen.records.sequences import range_indices, to_offsets

VALUES_AT_ONCE = 2**20  # gathered by index


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
            taken[name] = _take_ranges(values.reshape(-1, column.width), starts[rows], sizes[rows])
        else:
            taken[name] = values.reshape(-1, column.width)[rows].reshape(-1)
    return taken


def join_rows(pieces, layout):
    """Dicts of columns, at least one, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in layout}


def row_bytes(layout):
    """Bytes of a row in the columns that have one entry a row."""
    columns = (column for column in layout.values() if not column.sizes)
    return sum(np.dtype(column.dtype).itemsize * column.width for column in columns)


def write_array(path, array):
    """Write one array to a file that appears when complete."""
    with files.write_whole(path) as partial, files.open_file(partial, "wb") as file:
        np.save(file, array)


def read_array(path):
    """Read what `write_array` wrote."""
    with files.open_file(path) as file:
        return np.load(file)


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
    totals = [int(starts[name][-1]) for name in names]
    header = json.dumps([names, totals, len(group_sizes)]).encode()
    with files.write_whole(path) as partial, files.open_file(partial, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(np.stack([starts[name] for name in names], axis=1).astype("<i8").tobytes())
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
        sizes_names, totals, num_groups = json.loads(file.read(header_bytes))
        place, line_bytes = 8 + header_bytes, 8 * len(sizes_names)
        firsts, lasts = np.zeros(len(totals), np.int64), totals
        if group is not None:
            file.seek(place + line_bytes * group)
            firsts, lasts = np.frombuffer(file.read(2 * line_bytes), "<i8").reshape(2, -1)
        place += line_bytes * (num_groups + 1)
        for name, column in layout.items():
            counted = sizes_names.index(column.sizes)
            first, last = int(firsts[counted]), int(lasts[counted])
            entry_bytes = np.dtype(column.dtype).itemsize * column.width
            if names is None or name in names:
                file.seek(place + first * entry_bytes)
                columns[name] = np.frombuffer(file.read((last - first) * entry_bytes), column.dtype)
            place += totals[counted] * entry_bytes
    return columns


def _take_ranges(values, starts, sizes):
    """Rows of `values [n, width]` in many ranges, one after the other, flat.

    The indices of all rows at once would take several times the room of the values.
    """
    ends = to_offsets(sizes)
    taken = np.empty((ends[-1], values.shape[1]), values.dtype)
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(ends, ends[first] + VALUES_AT_ONCE, side="right")) - 1
        last = max(last, first + 1)
        indices = range_indices(starts[first:last], sizes[first:last])
        np.take(values, indices, axis=0, out=taken[ends[first] : ends[last]])
        first = last
    return taken.reshape(-1)
