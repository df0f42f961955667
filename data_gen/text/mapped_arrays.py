"""Files mapped into memory as flat arrays, which processes share without copies."""

import functools
import mmap
import os
import shutil
import tempfile

import numpy as np

from bert_packed.core import storage

MOST_FETCHED = 8  # files from URLs that a process keeps: the columns of one corpus


def map_array(path, dtype):
    """Map a file: array `[n]` of a NumPy type. A URL is copied, once per process."""
    if storage.is_remote(path):
        # keyed by size and time too: a restarted run writes another file under that name
        return _fetch(path, dtype, storage.size_and_time(path))
    with open(path, "rb") as file:
        return _map(file, dtype)


def map_bytes(path):
    """Map a file: uint8 array `[n]`. A URL is copied; the copy lives as long as the array."""
    return _map_copy(path, np.uint8) if storage.is_remote(path) else map_array(path, np.uint8)


def release(arrays):
    """Release the memory of mapped arrays' pages; the next read maps them again."""
    for array in arrays:
        mapping = getattr(array.base, "obj", array.base)  # NumPy 2 puts a view in between
        if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            mapping.madvise(mmap.MADV_DONTNEED)


def _map(file, dtype):
    # Not `np.memmap`, whose indexing is slow and which hides its mapping
    is_empty = not os.fstat(file.fileno()).st_size  # which cannot be mapped
    content = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, np.dtype(dtype))


@functools.lru_cache(maxsize=MOST_FETCHED)
def _fetch(path, dtype, stamp):
    return _map_copy(path, dtype)


def _map_copy(path, dtype):
    with storage.open_file(path) as source, tempfile.TemporaryFile() as target:
        shutil.copyfileobj(source, target)
        target.flush()
        return _map(target, dtype)
