"""Files of runs: sequences on disk between two steps, in groups that can be read separately.

    header    names of the sizes columns, total entries of each, number of groups
    table     [0 0] [2 5] [3 9]      start of each group, in rows and in entries of each sizes column
    columns   lengths [3 2 4], tokens [7 8 9 5 6 1 1 1 1]      concatenated

A reader of one group needs only two consecutive lines of the table.
"""

import json

import numpy as np

from bert_packed.core import storage
from bert_packed.records.sequences import Sequences, to_offsets


def write_array(path, array):
    """Write an array to a file that appears when complete."""
    with storage.write_whole(path) as partial, storage.open_file(partial, "wb") as file:
        np.save(file, array)


def read_array(path):
    with storage.open_file(path) as file:
        return np.load(file)


def write_run(path, sequences, group_sizes):
    """Write `Sequences` in groups, whose sizes are int `[G]`, to a file that appears when complete."""
    group_offsets = to_offsets(group_sizes)
    starts = {"": group_offsets}
    for column in sequences.layout.values():
        if column.sizes:
            starts[column.sizes] = to_offsets(sequences[column.sizes])[group_offsets]
    names = sorted(starts)
    totals = [int(starts[name][-1]) for name in names]
    header = json.dumps([names, totals, len(group_sizes)]).encode()
    with storage.write_whole(path) as partial, storage.open_file(partial, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(np.stack([starts[name] for name in names], axis=1).astype("<i8").tobytes())
        for name, column in sequences.layout.items():
            file.write(np.ascontiguousarray(sequences[name], column.dtype).tobytes())


def read_run(path, layout, group=None, names=None):
    """Read `Sequences` of a run, from one group or all, and with some columns or all.

    Columns that size those in `names` must be among them.
    """
    # Other columns are skipped, so that measuring reads no tokens
    wanted = {name: column for name, column in layout.items() if names is None or name in names}
    columns = {}
    with storage.open_file(path) as file:
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
            if name in wanted:
                file.seek(place + first * entry_bytes)
                columns[name] = np.frombuffer(file.read((last - first) * entry_bytes), column.dtype)
            place += totals[counted] * entry_bytes
    return Sequences(wanted, columns)
