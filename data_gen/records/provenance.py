"""Where every record comes from: an index beside each file of packs or instances, to trace a bad batch.

For a shard of two packs, {record 7 of file 0, record 2 of file 1} and {record 9 of file 0}:

    pack_offsets    [0 2 3]     pack i holds the entries offsets[i]:offsets[i + 1], slot after slot
    file_indices    [0 1 0]     into the manifest's `inputs`
    record_numbers  [7 2 9]     from 1

For instances, of which the second and third come from document 4 of the first text file:

    file_indices      [1 0 0]   into the manifest's `inputs`
    document_numbers  [9 4 4]   the document's place in that file, from 1
    duplicates        [0 0 3]   which pass over the documents, from 0
"""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import zipfile
import zlib

import numpy as np

from data_gen.cli.settings import InputError
from data_gen.jobs import files
from data_gen.jobs.output import read_manifest

SUFFIX = ".provenance.npz"
PACK_COLUMNS = ("pack_offsets", "file_indices", "record_numbers")
DOCUMENT_COLUMNS = ("file_indices", "document_numbers", "duplicates")
VALUES_AT_ONCE = 2**17  # copied from the disk to the index; a shard may have a billion


def provenance_path(path):
    """Where the index of a shard is: `a.tfrecord` -> `a.provenance.npz`."""
    return str(path).removesuffix(".tfrecord") + SUFFIX


@dataclasses.dataclass(frozen=True)
class Document:
    """Where the text of an instance comes from.

    Attributes:
        path: The text file, as the manifest of the instances names it.
        sha256: Its checksum there; "" where none is.
        number: The document's place in it, from 1.
    """

    path: str
    sha256: str
    number: int


@contextlib.contextmanager
def open_index(path, names):
    """Write arrays of whole numbers piece by piece, never holding more than a piece.

        with open_index("a.provenance.npz", DOCUMENT_COLUMNS) as index:
            index["duplicates"].add([0, 0, 3])

    Args:
        path: Where to; it appears when the block ends well.
        names: Of the arrays.

    Yields:
        Dict from name to `_Column`, whose `add` takes the next values.
    """
    # Which type is the smallest is known at the end only: until then the numbers wait in unnamed files
    folder = None if files.is_remote(path) else os.path.dirname(path) or "."
    with contextlib.ExitStack() as stack:
        columns = {name: _Column(stack.enter_context(tempfile.TemporaryFile(dir=folder))) for name in names}
        yield columns
        # An archive goes back in its file, which a remote one cannot
        archive = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        _write_npz(archive, {name: column.close() for name, column in columns.items()})
        archive.seek(0)
        with files.write_whole(path) as partial, files.open_file(partial, "wb") as file:
            shutil.copyfileobj(archive, file)


@contextlib.contextmanager
def open_provenance(path):
    """Write the index of a shard of packs, piece by piece.

        with open_provenance("packs/a.provenance.npz") as provenance:
            provenance.add(depths, file_indices, record_numbers)

    Args:
        path: Where to; it appears when the block ends well.

    Yields:
        `_Columns`, whose `add` takes int arrays in the order of the packs: sequences of each pack, and the
        input file and record of each sequence.
    """
    with open_index(path, PACK_COLUMNS) as columns:
        columns["pack_offsets"].add(np.zeros(1, np.int64))
        yield _Columns(columns)


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
    with _open_archive(index_path) as archive:
        num_packs = _num_entries(archive, "pack_offsets") - 1
        if not 1 <= record_number <= num_packs:
            raise InputError(f"{path} must have the record. Received: {record_number} of {num_packs}.")
        first, last = _read_entries(archive, "pack_offsets", [record_number - 1, record_number])
        file_indices = _read_entries(archive, "file_indices", range(first, last))
        numbers = _read_entries(archive, "record_numbers", range(first, last))
    paths = [entry["path"] for entry in _find_inputs(index_path, max(file_indices))]
    return [(paths[index], number) for index, number in zip(file_indices, numbers, strict=True)]


def find_documents(sources):
    """The documents of some instances.

    Args:
        sources: List of (path of a file of instances, number of its record), as `find_sources` returns it.

    Returns:
        List of `Document`, in that order; None where the instances have no index here.

    Raises:
        InputError: an index or the manifest beside it is damaged, or of other instances.
    """
    found = dict.fromkeys(sources)
    for path in dict.fromkeys(path for path, _ in sources):
        index_path = provenance_path(path)
        if not files.exists(index_path):
            continue
        numbers = sorted({number for other, number in sources if other == path})
        with _open_archive(index_path) as archive:
            num_records = _num_entries(archive, "document_numbers")
            if numbers[-1] > num_records:
                raise InputError(
                    f"{index_path} must be of the instances that were packed. "
                    f"Received: {num_records} records, of which number {numbers[-1]} was packed."
                )
            places = [number - 1 for number in numbers]
            file_indices = _read_entries(archive, "file_indices", places)
            document_numbers = _read_entries(archive, "document_numbers", places)
        inputs = _find_inputs(index_path, max(file_indices))
        for number, file_index, document in zip(numbers, file_indices, document_numbers, strict=True):
            entry = inputs[file_index]
            found[path, number] = Document(entry["path"], str(entry.get("sha256", "")), document)
    return [found[source] for source in sources]


@contextlib.contextmanager
def _open_archive(index_path):
    """Open an index; raises `InputError` where it is none, or is damaged."""
    try:
        with files.open_file(index_path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise InputError(f"{index_path} must be an index of --provenance. Received: {error}.") from error


def _find_inputs(index_path, largest):
    """The inputs that the manifest beside an index names, list of dict; raises if `largest` is none."""
    folder = os.path.dirname(index_path) or "."
    inputs = (read_manifest(folder) or {}).get("inputs")
    inputs = inputs if isinstance(inputs, list) else []
    inputs = [entry for entry in inputs if isinstance(entry, dict) and isinstance(entry.get("path"), str)]
    if largest >= len(inputs):
        raise InputError(
            f"{folder} must hold the manifest.json that was written with {index_path}. "
            f"Received: {len(inputs)} inputs, of which it names number {largest + 1}."
        )
    return inputs


def _num_entries(archive, name):
    with archive.open(f"{name}.npy") as entry:
        return _read_header(entry)[1]


def _read_entries(archive, name, places):
    """Some entries of one array in an `.npz`, at ascending places, never holding all: list of int."""
    places = np.asarray(places)
    found, start = [], 0
    with archive.open(f"{name}.npy") as entry:
        dtype, size = _read_header(entry)
        # to the end, where the checksum is compared
        while content := entry.read(VALUES_AT_ONCE * dtype.itemsize):
            values = np.frombuffer(content, dtype)
            first, last = np.searchsorted(places, [start, start + len(values)])
            found += values[places[first:last] - start].tolist()
            start += len(values)
    if start != size or len(found) < len(places):
        raise ValueError(f"{name} ends too early")
    return found


def _read_header(entry):
    """Type and size of the array that an open `.npy` holds."""
    if np.lib.format.read_magic(entry) != (1, 0):
        raise ValueError("another version of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(entry)
    return dtype, shape[0]
