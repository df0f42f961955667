"""Where every record comes from: an index beside each file of packs or instances, to trace a bad batch.

For a shard of two packs, {record 7 of file 0, record 2 of file 1} and {record 9 of file 0}:

    pack_offsets    [0 2 3]     pack i holds the entries offsets[i]:offsets[i + 1], slot after slot
    file_indices    [0 1 0]     into the manifest's `inputs`
    record_numbers  [7 2 9]     from 1

For instances, of which the second and third come from document 4 of the first text file:

    file_indices      [1 0 0]   into the manifest's `inputs`
    document_numbers  [9 4 4]   the document's place in that file, from 1
    duplicates        [0 0 3]   which pass over the documents, from 0

Both end in `shard_sha256`, 32 numbers: the SHA-256 of the file that the index is of. An index that was
copied, or left by an earlier run, would name wrong sources otherwise.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import zipfile
import zlib

import numpy as np

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.manifests import read_manifest

SUFFIX = ".provenance.npz"
CHECKSUM = "shard_sha256"
PACK_COLUMNS = ("pack_offsets", "file_indices", "record_numbers", CHECKSUM)
DOCUMENT_COLUMNS = ("file_indices", "document_numbers", "duplicates", CHECKSUM)
VALUES_AT_ONCE = 2**17  # copied from the disk to the index; a shard may have a billion

logger = logging.getLogger(__name__)


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


def describe_path(path, output_dir):
    """How the manifest in a directory names an input: dict `path`, as it was given, and `relative_path`.

    A relative path holds in the folder where the command ran. `relative_path`, for such paths only, leads
    from the manifest to the file, wherever one stands and whereto the two are moved together.
    """
    if os.path.isabs(path) or storage.is_remote(path) or storage.is_remote(output_dir):
        return {"path": path}
    return {"path": path, "relative_path": os.path.relpath(real_name(path), os.path.realpath(output_dir))}


def real_name(path):
    """A path whose folder has no links, but its own name, beside which its index is; a URL as it is."""
    if storage.is_remote(path):
        return path
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


@contextlib.contextmanager
def open_index(path, names):
    """Write arrays of whole numbers piece by piece, never holding more than a piece.

        with open_index("a.provenance.npz", DOCUMENT_COLUMNS) as index:
            index["duplicates"].add([0, 0, 3])
            add_checksum(index, entry.sha256)

    Args:
        path: Where to; it appears when the block ends well.
        names: Of the arrays.

    Yields:
        Dict from name to `_Column`, whose `add` takes the next values.
    """
    # Which type is the smallest is known at the end only: until then the numbers wait in unnamed files
    folder = None if storage.is_remote(path) else os.path.dirname(path) or "."
    with contextlib.ExitStack() as stack:
        columns = {name: _Column(stack.enter_context(tempfile.TemporaryFile(dir=folder))) for name in names}
        yield columns
        # An archive goes back in its file, which a remote one cannot
        archive = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        _write_npz(archive, {name: column.close() for name, column in columns.items()})
        archive.seek(0)
        with storage.write_whole(path) as partial, storage.open_file(partial, "wb") as file:
            shutil.copyfileobj(archive, file)


@contextlib.contextmanager
def open_provenance(path):
    """Write the index of a shard of packs, piece by piece.

        with open_provenance("packs/a.provenance.npz") as provenance:
            provenance.add(depths, file_indices, record_numbers)
            provenance.add_checksum(entry.sha256)

    Args:
        path: Where to; it appears when the block ends well.

    Yields:
        `_Columns`, whose `add` takes int arrays in the order of the packs: sequences of each pack, and the
        input file and record of each sequence.
    """
    with open_index(path, PACK_COLUMNS) as columns:
        columns["pack_offsets"].add(np.zeros(1, np.int64))
        yield _Columns(columns)


def add_checksum(index, sha256):
    """Say of which file an index from `open_index` is, by its hexadecimal SHA-256."""
    index[CHECKSUM].add(list(bytes.fromhex(sha256)))


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

    def add_checksum(self, sha256):
        """Say of which file the index is, by its hexadecimal SHA-256."""
        add_checksum(self._columns, sha256)


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
        InputError: the shard has no index or no such record, or its index or manifest is damaged, or of
            another file.
        OSError: the shard cannot be read.
    """
    index_path = provenance_path(path)
    if not storage.exists(index_path):
        raise InputError(f"{path} must be packed with --provenance. Received: no {index_path}.")
    checksum = storage.file_sha256(path)
    inputs, promised = _read_manifest_of(index_path, path)
    if promised.get("sha256") != checksum:
        raise InputError(
            f"{os.path.dirname(path) or '.'} must hold the manifest.json that was written with {path}. "
            f"Received: {'one with another SHA-256' if promised else 'none that lists it'}."
        )
    with _open_archive(index_path) as archive:
        _check_owner(archive, index_path, path, checksum, "pack_offsets", promised.get("num_records", 0) + 1)
        num_packs = _num_entries(archive, "pack_offsets") - 1
        if not 1 <= record_number <= num_packs:
            raise InputError(f"{path} must have the record. Received: {record_number} of {num_packs}.")
        first, last = _read_entries(archive, "pack_offsets", [record_number - 1, record_number])
        file_indices = _read_entries(archive, "file_indices", range(first, last))
        numbers = _read_entries(archive, "record_numbers", range(first, last))
    _check_inputs(inputs, index_path, max(file_indices))
    return [(inputs[index]["path"], number) for index, number in zip(file_indices, numbers, strict=True)]


def find_documents(sources, packed_file=""):
    """The documents of some instances. What is not there any more is logged.

    Args:
        sources: List of (path of a file of instances, number of its record), as `find_sources` returns it.
        packed_file: The shard that they are of, whose manifest says which instances were packed; "" takes
            those that are there now.

    Returns:
        List of `Document`, in that order; None where the instances have no index here.

    Raises:
        InputError: an index or the manifest beside it is damaged, or of other instances.
    """
    found = dict.fromkeys(sources)
    packed = _read_manifest_of(packed_file, packed_file)[0] if packed_file else []
    checksums = {entry["path"]: entry.get("sha256") for entry in packed}
    for path in dict.fromkeys(path for path, _ in sources):
        index_path = provenance_path(path)
        if not storage.exists(index_path):
            if not storage.exists(path):
                message = "%s is not there, so that its documents are not known"
                logger.warning(message, storage.printable(path))
            continue
        numbers = sorted({number for other, number in sources if other == path})
        inputs, promised = _read_manifest_of(index_path, path)
        checksum = checksums.get(path) or (storage.file_sha256(path) if storage.exists(path) else None)
        with _open_archive(index_path) as archive:
            if checksum:
                size = promised.get("num_records")
                _check_owner(archive, index_path, path, checksum, "document_numbers", size)
            num_records = _num_entries(archive, "document_numbers")
            if numbers[-1] > num_records:
                raise InputError(
                    f"{index_path} must be of the instances that were packed. "
                    f"Received: {num_records} records, of which number {numbers[-1]} was packed."
                )
            places = [number - 1 for number in numbers]
            file_indices = _read_entries(archive, "file_indices", places)
            document_numbers = _read_entries(archive, "document_numbers", places)
        _check_inputs(inputs, index_path, max(file_indices))
        for number, file_index, document in zip(numbers, file_indices, document_numbers, strict=True):
            entry = inputs[file_index]
            found[path, number] = Document(entry["path"], str(entry.get("sha256", "")), document)
    return [found[source] for source in sources]


@contextlib.contextmanager
def _open_archive(index_path):
    """Open an index; raises `InputError` where it is none, or is damaged."""
    try:
        with storage.open_file(index_path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise InputError(f"{index_path} must be an index of --provenance. Received: {error}.") from error


def _check_owner(archive, index_path, path, checksum, column, size):
    """Raise `InputError` where an index is not of the file `path`, which has this SHA-256.

    An index without a checksum must have in its `column` the `size` that follows from the manifest, unless
    that is None.
    """
    if f"{CHECKSUM}.npy" in archive.namelist():
        found = bytes(_read_entries(archive, CHECKSUM, range(32))).hex()
        received = f"that of a file with {found}" if found != checksum else ""
    else:
        found = _num_entries(archive, column)
        received = f"one of {found} entries" if size not in (found, None) else ""
    if received:
        raise InputError(f"{index_path} must be of {path} with SHA-256 {checksum}. Received: {received}.")


def _read_manifest_of(index_path, path):
    """What the manifest beside an index says.

    Returns:
        List of dicts, its inputs, each with the `path` at which it is from here, and dict, the entry of the
        file `path`; both empty where there is none.
    """
    folder = os.path.dirname(index_path) or "."
    manifest = read_manifest(folder) or {}
    inputs = [entry for entry in _dicts(manifest.get("inputs")) if isinstance(entry.get("path"), str)]
    inputs = [{**entry, "path": resolve_path(entry, folder)} for entry in inputs]
    splits = manifest.get("splits")
    groups = [manifest, *(_dicts(list(splits.values())) if isinstance(splits, dict) else [])]
    entries = [entry for group in groups for entry in _dicts(group.get("files"))]
    return inputs, next((e for e in entries if e.get("name") == os.path.basename(path)), {})


def _dicts(values):
    """The dicts in a list; none where it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def resolve_path(entry, folder):
    """Where the input of a manifest in `folder` is from here: the inverse of `describe_path`."""
    relative = entry.get("relative_path")
    if not isinstance(relative, str) or storage.is_remote(folder):
        return entry["path"]
    path = os.path.normpath(os.path.join(os.path.realpath(folder), relative))
    from_here = os.path.relpath(path, os.path.realpath("."))
    return path if from_here.startswith(os.pardir) else from_here


def _check_inputs(inputs, index_path, largest):
    """Raise `InputError` where an index names more inputs than the manifest beside it."""
    if largest >= len(inputs):
        folder = os.path.dirname(index_path) or "."
        raise InputError(
            f"{folder} must hold the manifest.json that was written with {index_path}. "
            f"Received: {len(inputs)} inputs, of which it names number {largest + 1}."
        )


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
