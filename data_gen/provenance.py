"""Which input record each sequence of a pack comes from: an index beside every shard, to trace a bad batch.

For a shard of two packs, {record 7 of file 0, record 2 of file 1} and {record 9 of file 0}:

    pack_offsets    [0 2 3]     pack i holds the entries offsets[i]:offsets[i + 1], slot after slot
    file_indices    [0 1 0]     into the manifest's `inputs`
    record_numbers  [7 2 9]     from 1
"""

import contextlib
import io
import os
import shutil
import tempfile
import zipfile
import zlib

import numpy as np

from data_gen import files
from data_gen.output import read_manifest
from data_gen.settings import InputError

SUFFIX = ".provenance.npz"
VALUES_AT_ONCE = 2**17  # copied from the disk to the index; a shard may have a billion


def provenance_path(path):
    """Where the index of a shard is: `a.tfrecord` -> `a.provenance.npz`."""
    return str(path).removesuffix(".tfrecord") + SUFFIX


@contextlib.contextmanager
def open_provenance(path):
    """Write the index of a shard piece by piece, never holding more than a piece.

        with open_provenance("packs/a.provenance.npz") as provenance:
            provenance.add(depths, file_indices, record_numbers)

    Args:
        path: Where to; it appears when the block ends well.

    Yields:
        `_Columns`, whose `add` takes int arrays in the order of the packs: sequences of each pack, and the
        input file and record of each sequence.
    """
    # Which type is the smallest is known at the end only: until then the numbers wait in unnamed files
    folder = None if files.is_remote(path) else os.path.dirname(path) or "."
    with contextlib.ExitStack() as stack:
        names = ("pack_offsets", "file_indices", "record_numbers")
        columns = {name: _Column(stack.enter_context(tempfile.TemporaryFile(dir=folder))) for name in names}
        columns["pack_offsets"].add(np.zeros(1, np.int64))
        yield _Columns(columns)
        # An archive goes back in its file, which a remote one cannot
        archive = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        _write_npz(archive, {name: column.close() for name, column in columns.items()})
        archive.seek(0)
        with files.write_whole(path) as partial, files.open_file(partial, "wb") as file:
            shutil.copyfileobj(archive, file)


class _Columns:
    """The columns of an index on their way to the disk."""

    def __init__(self, columns):
        self._columns = columns

    def add(self, depths, file_indices, record_numbers):
        """Add some packs: int arrays `[packs]`, `[sequences]`, `[sequences]`."""
        offsets = self._columns["pack_offsets"]
        offsets.add(offsets.largest + np.cumsum(depths))
        self._columns["file_indices"].add(file_indices)
        self._columns["record_numbers"].add(record_numbers)


class _Column:
    """One column in a file without a name, which the system removes with the process."""

    def __init__(self, file):
        self._file = file
        self._size = 0
        self.largest = 0

    def add(self, values):
        self._file.write(np.asarray(values, "<i8").tobytes())
        self._size += len(values)
        self.largest = max(self.largest, int(np.max(values, initial=0)))

    def close(self):
        """End the column: its type, its size, and its pieces, which are read as they are asked for."""
        self._file.seek(0)
        dtype = np.min_scalar_type(self.largest)
        return dtype, self._size, self._pieces(dtype)

    def _pieces(self, dtype):
        while content := self._file.read(8 * VALUES_AT_ONCE):
            yield np.frombuffer(content, "<i8").astype(dtype)


def _write_npz(file, columns):
    """Write what `np.savez_compressed` would: dict from name to (dtype, size, pieces)."""
    # allowZip64 and ZipInfo's own date, 1980, as NumPy has them: equal arrays are equal bytes
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, allowZip64=True) as archive:
        for name, (dtype, size, pieces) in columns.items():
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, header)
                for piece in pieces:
                    entry.write(piece.tobytes())


def write_index(path, **arrays):
    """Write arrays of whole numbers, each in the smallest type that holds it; equal ones are equal bytes."""
    small = {
        name: values.astype(np.min_scalar_type(values.max(initial=0))) for name, values in arrays.items()
    }
    content = io.BytesIO()
    np.savez_compressed(content, **small)  # its ZIP entries are all of 1980
    with files.write_whole(path) as partial, files.open_file(partial, "wb") as file:
        file.write(content.getvalue())


def find_sources(path, record_number):
    """The input records of one pack.

    Args:
        path: Shard that was packed with `--provenance`.
        record_number: The pack's record, from 1.

    Returns:
        List of (path of the input file, number of its record), slot after slot.

    Raises:
        InputError: the shard has no index or no such record, or its index or manifest is damaged.
    """
    index_path = provenance_path(path)
    if not files.exists(index_path):
        raise InputError(f"{path} must be packed with --provenance. Received: no {index_path}.")
    folder = os.path.dirname(str(path)) or "."
    try:
        with files.open_file(index_path) as file, zipfile.ZipFile(file) as archive:
            num_packs = _num_entries(archive, "pack_offsets") - 1
            if not 1 <= record_number <= num_packs:
                raise InputError(f"{path} must have the record. Received: {record_number} of {num_packs}.")
            first, last = _read_range(archive, "pack_offsets", record_number - 1, record_number + 1).tolist()
            file_indices = _read_range(archive, "file_indices", first, last).tolist()
            numbers = _read_range(archive, "record_numbers", first, last).tolist()
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{index_path} must be an index of --provenance. Received: {error}.") from error
    inputs = (read_manifest(folder) or {}).get("inputs", [])
    paths = [entry["path"] for entry in inputs if isinstance(entry, dict) and "path" in entry]
    if max(file_indices) >= len(paths):
        raise InputError(
            f"{folder} must hold the manifest.json that was written with {index_path}. "
            f"Received: {len(paths)} inputs, of which it names number {max(file_indices) + 1}."
        )
    return [(paths[index], number) for index, number in zip(file_indices, numbers, strict=True)]


def _num_entries(archive, name):
    with archive.open(f"{name}.npy") as entry:
        return _read_header(entry)[1]


def _read_range(archive, name, first, last):
    """Some entries of one array in an `.npz`, without holding those before: array `[last - first]`."""
    with archive.open(f"{name}.npy") as entry:
        dtype, _ = _read_header(entry)
        entry.seek(first * dtype.itemsize, os.SEEK_CUR)
        content = entry.read((last - first) * dtype.itemsize)
        while entry.read(VALUES_AT_ONCE):  # to the end, where the checksum is compared
            continue
    if len(content) < (last - first) * dtype.itemsize:
        raise ValueError(f"{name} ends too early")
    return np.frombuffer(content, dtype)


def _read_header(entry):
    """Type and size of the array that an open `.npy` holds."""
    if np.lib.format.read_magic(entry) != (1, 0):
        raise ValueError("another version of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(entry)
    return dtype, shape[0]
