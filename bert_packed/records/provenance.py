"""Manifests of folders of records, and indexes beside the files, which name the source of every record.

For a shard of two packs, {record 7 of file 0, record 2 of file 1} and {record 9 of file 0}:

    pack_offsets    [0 2 3]     pack i holds the entries offsets[i]:offsets[i + 1], slot after slot
    file_indices    [0 1 0]     into the manifest's `inputs`
    record_numbers  [7 2 9]     from 1

For instances, of which the second and third come from document 4 of the first text file:

    file_indices      [1 0 0]   into the manifest's `inputs`
    document_numbers  [9 4 4]   the document's place in that file, from 1
    duplicates        [0 0 3]   which pass over the documents, from 0

Both end in `shard_sha256`, 32 numbers: the SHA-256 of the file that the index is of, since an index that was
copied, or left by an earlier run, would name wrong sources.
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
from bert_packed.records.tfrecords import write_file

MANIFEST_NAME = "manifest.json"
SCANS_NAME = ".scans.npz"  # of `inputs.write_scans`


def read_manifest(directory, any_json=False):
    """The `manifest.json` of a directory as a dict, or None where it has none; `InputError` if it is no JSON.

    With `any_json` it may be another program's: JSON that is no object counts as none, and is no mistake.
    """
    kind = object if any_json else dict
    content = storage.read_json(os.path.join(directory, MANIFEST_NAME), kind, default=None)
    return content if isinstance(content, dict) else None


def is_of_scans(name):
    """True if a name in a folder is that of the kept scans, or of what a killed write of them left."""
    return name == SCANS_NAME or (name.startswith(SCANS_NAME) and name.endswith(storage.PARTIAL_SUFFIX))


def listed_files(manifest):
    """The file entries of a manifest, of packs or of splits; other JSON has none."""
    splits = manifest.get("splits")
    groups = [manifest, *(dicts_in(list(splits.values())) if isinstance(splits, dict) else [])]
    entries = [entry for group in groups for entry in dicts_in(group.get("files"))]
    return [entry for entry in entries if isinstance(entry.get("name"), str)]


def dicts_in(values):
    """The dicts in a list; none where it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


SUFFIX = ".provenance.npz"
CHECKSUM = "shard_sha256"
PACK_COLUMNS = ("pack_offsets", "file_indices", "record_numbers", CHECKSUM)
DOCUMENT_COLUMNS = ("file_indices", "document_numbers", "duplicates", CHECKSUM)
VALUES_AT_ONCE = 2**17  # copied from the disk to the index; a shard may have a billion

logger = logging.getLogger(__name__)


def provenance_path(path):
    """Path of the index of a shard: `a.tfrecord` -> `a.provenance.npz`."""
    return str(path).removesuffix(".tfrecord") + SUFFIX


@dataclasses.dataclass(frozen=True)
class Document:
    """Origin of the text of an instance, as the manifest of the instances says."""

    path: str  # of the text file
    sha256: str  # "" where the manifest has none
    number: int  # the document's place in the file, from 1


def describe_path(path, output_dir):
    """Names of an input in a directory's manifest: dict of `path`, as it was given, and `relative_path`.

    A relative path holds in the folder where the command ran. `relative_path`, for such paths only, leads
    from the manifest to the file, from any working directory and wherever the two are moved together.
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


def write_traced(path, index_path, names, serialize):
    """Write a file of records, and beside it the index of where they come from, if it has a path.

    `serialize` is a function from an `_Index`, to which it adds what it serializes, or None, to records.
    """
    if not index_path:
        return write_file(path, serialize(None))
    # The smallest type of a column is known at its end only: until then the numbers wait in unnamed files
    folder = None if storage.is_remote(index_path) else os.path.dirname(index_path) or "."
    with contextlib.ExitStack() as stack:
        columns = {name: _Column(stack.enter_context(tempfile.TemporaryFile(dir=folder))) for name in names}
        index = _Index(columns)
        entry = write_file(path, serialize(index))
        index.add(**{CHECKSUM: list(bytes.fromhex(entry.sha256))})
        # A zip file is written back and forth, which a remote one cannot be
        archive = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        _write_npz(archive, columns)
        archive.seek(0)
        with storage.write_whole(index_path) as partial, storage.open_file(partial, "wb") as file:
            shutil.copyfileobj(archive, file)
    return entry


class _Index:
    """The columns of an index on their way to the disk."""

    def __init__(self, columns):
        self._columns = columns

    def add(self, **values):
        """Add the next numbers of some columns: int arrays."""
        for name, some in values.items():
            self._columns[name].add(some)

    def add_packs(self, depths, file_indices, record_numbers):
        """Add packs: their numbers of sequences, and the input file and record of each sequence."""
        offsets = self._columns["pack_offsets"]
        first = np.zeros(int(offsets.size == 0), np.int64)
        self.add(
            pack_offsets=np.concatenate([first, offsets.largest + np.cumsum(depths)]),
            file_indices=file_indices,
            record_numbers=record_numbers,
        )


class _Column:
    """One column in a file without a name, which the system removes with the process."""

    def __init__(self, file):
        self._file = file
        self.size = self.largest = 0

    def add(self, values):
        self._file.write(np.asarray(values, "<i8").tobytes())
        self.size += len(values)
        self.largest = max(self.largest, int(np.max(values, initial=0)))

    @property
    def dtype(self):
        return np.min_scalar_type(self.largest)

    def pieces(self):
        self._file.seek(0)
        while content := self._file.read(8 * VALUES_AT_ONCE):
            yield np.frombuffer(content, "<i8").astype(self.dtype)


def _write_npz(file, columns):
    """Write what `np.savez_compressed` would, from a dict of `_Column`."""
    # allowZip64 and ZipInfo's own date, 1980, are those of NumPy: equal arrays are equal bytes
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, allowZip64=True) as archive:
        for name, column in columns.items():
            descr = np.lib.format.dtype_to_descr(column.dtype)
            header = {"descr": descr, "fortran_order": False, "shape": (column.size,)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, header)
                for piece in column.pieces():
                    entry.write(piece.tobytes())


def find_sources(path, record_number):
    """The input records of one pack: list of (path of the input file, number of its record), slot after slot.

    The pack is record `record_number`, from 1, of a shard that was packed with `--provenance`.
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
    with _open_arrays(index_path) as arrays:
        _check_owner(arrays, index_path, path, checksum, "pack_offsets", promised.get("num_records", 0) + 1)
        offsets = arrays["pack_offsets"]
        if not 1 <= record_number < len(offsets):
            raise InputError(f"{path} must have the record. Received: {record_number} of {len(offsets) - 1}.")
        some = np.arange(*offsets[record_number - 1 : record_number + 1])
        file_indices, numbers = (arrays[name][some].tolist() for name in ("file_indices", "record_numbers"))
    _check_inputs(inputs, index_path, max(file_indices))
    for index in sorted(set(file_indices)):
        source, promised = inputs[index]["path"], inputs[index].get("sha256")
        if promised and storage.is_file(source) and (found := storage.file_sha256(source)) != promised:
            raise InputError(
                f"{source} must have the SHA-256 {promised}, as when it was packed. Received: {found}."
            )
    return [(inputs[index]["path"], number) for index, number in zip(file_indices, numbers, strict=True)]


def find_documents(sources, packed_file=""):
    """The documents of some instances, None where these have no index here. What is not there is logged.

    The manifest of `packed_file`, the shard that they are of, says which instances were packed; "" takes
    those that are there now.
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
        with _open_arrays(index_path) as arrays:
            if checksum:
                size = promised.get("num_records")
                _check_owner(arrays, index_path, path, checksum, "document_numbers", size)
            num_records = len(arrays["document_numbers"])
            if numbers[-1] > num_records:
                raise InputError(
                    f"{index_path} must be of the instances that were packed. "
                    f"Received: {num_records} records, of which number {numbers[-1]} was packed."
                )
            names, places = ("file_indices", "document_numbers"), np.array(numbers) - 1
            file_indices, document_numbers = (arrays[name][places].tolist() for name in names)
        _check_inputs(inputs, index_path, max(file_indices))
        for number, file_index, document in zip(numbers, file_indices, document_numbers, strict=True):
            entry = inputs[file_index]
            found[path, number] = Document(entry["path"], str(entry.get("sha256", "")), document)
    return [found[source] for source in sources]


@contextlib.contextmanager
def _open_arrays(index_path):
    """Open an index: yields a mapping of its columns; raises `InputError` where it is none, or is damaged."""
    try:
        with storage.open_file(index_path) as file, np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, IndexError) as error:
        raise InputError(f"{index_path} must be an index of --provenance. Received: {error}.") from error


def _check_owner(arrays, index_path, path, checksum, column, size):
    """Raise `InputError` where an index is not of the file `path`, which has this SHA-256."""
    # older indexes have no checksum: the size of a column decides, where the manifest says it
    if CHECKSUM in arrays:
        found = bytes(arrays[CHECKSUM].tolist()).hex()
        received = f"that of a file with {found}" if found != checksum else ""
    else:
        found = len(arrays[column])
        received = f"one of {found} entries" if size not in (found, None) else ""
    if received:
        raise InputError(f"{index_path} must be of {path} with SHA-256 {checksum}. Received: {received}.")


def _read_manifest_of(index_path, path):
    """The inputs in the manifest beside an index, with their paths from here, and its entry of `path`."""
    folder = os.path.dirname(index_path) or "."
    manifest = read_manifest(folder) or {}
    inputs = [
        {**entry, "path": resolve_path(entry, folder)}
        for entry in dicts_in(manifest.get("inputs"))
        if isinstance(entry.get("path"), str)
    ]
    entries = (entry for entry in listed_files(manifest) if entry["name"] == os.path.basename(path))
    return inputs, next(entries, {})


def resolve_path(entry, folder):
    """The path from here of an input of the manifest in `folder`: the inverse of `describe_path`."""
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
