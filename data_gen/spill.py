"""How sequences wait on the disk between two passes: columns in one file, cut into groups of rows.

Two rows in two groups, with layout {"lengths": int32, "tokens": int32 of "lengths"}:

    lengths  [3 2]           a value a row
    tokens   [7 8 9 5 6]     as many values a row as `lengths` says

A group is read without reading the others, nor where they lie: a table in front of the columns has a line of
two or three numbers for each group, and only the two lines around it are read.
"""

import json

import numpy as np

from bert_packed.core import files
from bert_packed.records.sequences import to_offsets


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
