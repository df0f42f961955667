"""How flat arrays lie on the disk, each in a file, so that workers share them without copies."""

import contextlib
import functools
import mmap
import os
import shutil
import tempfile

import numpy as np

from bert_packed.core import storage

COPY_VALUES = 2**20  # joined at once
MOST_FETCHED = 8  # columns behind URLs that a process holds: of one corpus, with its origins


@contextlib.contextmanager
def open_for_writing(folder, names):
    """Write columns, piece by piece, to files that appear when the block ends well.

    Yields:
        Dict from name to an open binary file.
    """
    with contextlib.ExitStack() as stack:
        columns = {}
        for name in names:
            partial = stack.enter_context(storage.write_whole(os.path.join(folder, name)))
            columns[name] = stack.enter_context(storage.open_file(partial, "wb"))
        yield columns


def open_columns(folder, dtypes):
    """Memory-map columns: dict from name to NumPy type -> list of arrays, in that order."""
    columns = []
    for name, dtype in dtypes.items():
        path = os.path.join(folder, name)
        if storage.is_remote(path):
            columns.append(_fetch(path, dtype, storage.size_and_time(path)))
        else:
            columns.append(_map_path(path, dtype))
    return columns


def map_bytes(path):
    """Memory-map any file: uint8 array. Of a file behind a URL a copy, which goes with the array."""
    return _map_copy(path, np.uint8) if storage.is_remote(path) else _map_path(path, np.uint8)


def _map_path(path, dtype):
    with open(path, "rb") as file:
        return _map(file, dtype)


def _map(file, dtype):
    # An empty file cannot be mapped. Not `np.memmap`: its indexing costs, and it hides its mapping
    is_empty = not os.fstat(file.fileno()).st_size
    return np.frombuffer(
        b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.dtype(dtype)
    )


@functools.lru_cache(maxsize=MOST_FETCHED)
def _fetch(path, dtype, stamp):
    """`_map_copy` of a column, made once a process.

    Args:
        path, dtype: As of the column.
        stamp: What `storage.size_and_time` says of it now: a run that starts over writes another one there.
    """
    return _map_copy(path, dtype)


def _map_copy(path, dtype):
    """Memory-map a copy of a file behind a URL, in a file without a name."""
    with storage.open_file(path) as source, tempfile.TemporaryFile() as target:
        shutil.copyfileobj(source, target)
        target.flush()
        return _map(target, dtype)


def release(columns):
    """Give back the memory of mapped columns' pages that were read; the next reading maps them again."""
    for column in columns:
        mapping = getattr(column.base, "obj", column.base)  # NumPy 2 puts a view in between
        if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            mapping.madvise(mmap.MADV_DONTNEED)


def copy_values(values, shift, file):
    """Append values, each plus `shift`, to an open binary file, a piece at a time."""
    for start in range(0, len(values), COPY_VALUES):
        file.write((values[start : start + COPY_VALUES] + values.dtype.type(shift)).tobytes())


def to_bytes(values, dtype):
    """Numbers as they stand in a column of this NumPy type."""
    return np.array(values, dtype).tobytes()
