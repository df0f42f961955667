"""Many rows in columns: layouts, rows in another order, rows joined."""

import dataclasses

import numpy as np

from bert_packed.records.sequences import range_indices, to_offsets

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
