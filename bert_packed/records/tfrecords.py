"""How records enter and leave TFRecord files: read, write, count and decode `tf.train.Example`.

The one place in `data_gen` that imports TensorFlow, which takes seconds: only for records in a form that
`example_columns.py` does not read. Record numbers count from 1, in messages too.
"""

import dataclasses
import hashlib
import os

import numpy as np

from bert_packed import schema
from bert_packed.core import files
from bert_packed.core.quiet_import import import_quietly
from bert_packed.core.settings import InputError
from bert_packed.records import record_batches
from bert_packed.records.example_columns import decode_columns
from bert_packed.records.examples import check_lengths, feature_lengths, features_of

READ_BATCH = 1024  # records; a batch of S=512 decodes to about 20 MB
READ_BYTES = 2**23  # of a batch as well: numbers of one byte decode to eight times that
WRITE_BATCH = 512  # records that get their checksums together
WRITE_BYTES = 2**22  # and the most bytes of them, the last one not counted


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """One finished file as a manifest lists it.

    Attributes:
        name: File name without its folder.
        num_records: Records in it.
        sha256: Hexadecimal SHA-256 of its bytes.
    """

    name: str
    num_records: int
    sha256: str

    def to_json(self):
        return dataclasses.asdict(self)


def read_batches(path, batch_size=READ_BATCH, max_bytes=READ_BYTES):
    """Read the records of one file in batches.

    Args:
        path: TFRecord file.
        batch_size: Most records of a batch.
        max_bytes: Most bytes of a batch, its largest record not counted, so that a record of any size can
            be read.

    Yields:
        `Records`, at least one, in the order of the file.

    Raises:
        InputError: the file is empty, is no TFRecord file, or has a corrupt or truncated record.
        OSError: it cannot be opened or read; the message names it.
    """
    path = os.fspath(path)
    if files.size_and_time(path)[0] == 0:
        raise InputError(f"every TFRecord file must hold a record. Received: {path}, which is empty.")
    yield from record_batches.read_batches(path, batch_size, max_bytes)


def read_records(path):
    """Read one file record by record: yields `bytes`; raises as `read_batches`."""
    for batch in read_batches(path):
        yield from batch.to_list()


def count_records(path):
    """Number of records in one file; raises as `read_batches`."""
    return sum(len(batch) for batch in read_batches(path))


def write_records(path, serialized):
    """Write a TFRecord file.

    Args:
        path: Where to; its folder exists.
        serialized: Iterable of `bytes`, one a record.

    Returns:
        `FileEntry`.

    Raises:
        OSError: the file cannot be written, as on a full disk; the message names it.
    """
    path = os.fspath(path)
    num_records, digest = 0, hashlib.sha256()
    with files.naming_file(path), files.open_file(path, "wb") as file:
        for batch in _write_batches(serialized):
            content = record_batches.frame(batch)
            file.write(content)
            digest.update(content)
            num_records += len(batch)
    return FileEntry(os.path.basename(path), num_records, digest.hexdigest())


def _write_batches(serialized):
    """Lists of `bytes` that are written together, from an iterable of them."""
    batch, num_bytes = [], 0
    for record in serialized:
        batch.append(record)
        num_bytes += len(record)
        if len(batch) == WRITE_BATCH or num_bytes >= WRITE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def write_file(path, serialized):
    """`write_records` to a file that appears under its name only when complete."""
    with files.write_whole(path) as partial:
        entry = write_records(partial, serialized)
    return dataclasses.replace(entry, name=os.path.basename(path))


def parse_examples(batch, lengths, path, first_record, narrow=()):
    """Decode a batch of records whose features have fixed lengths.

    Args:
        batch: `Records` of one file, at least one.
        lengths: Dict from feature name to its length in this file.
        path: The file, for messages.
        first_record: Number of the batch's first record.
        narrow: Names of whole-number features that may come in any integer type, for speed.

    Returns:
        Dict from feature name to array `[n, length]`, int64 or float32.

    Raises:
        InputError: a record is no `tf.train.Example`, lacks a feature, or has it in another length or type.
    """
    dtypes = {name: schema.dtype(name) for name in lengths}
    columns = decode_columns(batch, dtypes)
    if columns is None or any((counts != lengths[name]).any() for name, (_, counts) in columns.items()):
        return _parse_by_tensorflow(batch, lengths, path, first_record)
    return {
        name: (values if name in narrow else values.astype(dtypes[name], copy=False)).reshape(
            len(batch), lengths[name]
        )
        for name, (values, _) in columns.items()
    }


def parse_ragged(batch, dtypes, path, first_record):
    """Decode a batch of records whose features have any lengths.

    Args:
        batch: `Records` of one file, at least one.
        dtypes: Dict from feature name to "int64" or "float32". A record that lacks a feature has 0 values.
        path: The file, for messages.
        first_record: Number of the batch's first record.

    Returns:
        Dict from name to (values of all records, number of values of each, int64 `[n]`).

    Raises:
        InputError: a record is no `tf.train.Example`, or has a feature in another type.
    """
    columns = decode_columns(batch, dtypes)
    if columns is None:
        return _parse_ragged_by_tensorflow(batch, dtypes, path, first_record)
    return {
        name: (values.astype(dtypes[name], copy=False), counts) for name, (values, counts) in columns.items()
    }


def _parse_by_tensorflow(batch, lengths, path, first_record):
    """`parse_examples` of records in any form."""
    tf = import_quietly("tensorflow")
    wanted = {
        name: tf.io.FixedLenFeature([length], schema.dtype(name))
        for name, length in lengths.items()
        if length
    }
    serialized = batch.to_list()

    def check_records():
        for number, record in enumerate(serialized, first_record):
            check_lengths(path, number, feature_lengths(record, path, number, lengths), lengths)

    try:
        columns = tf.io.parse_example(serialized, wanted)
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
        # TensorFlow's message has no record number that holds beyond the batch, and it quotes the record:
        # where that is no text, Python cannot even show it
        check_records()
        raise InputError(f"{path}: {error}") from error
    empty = {
        name: np.zeros((len(batch), 0), schema.dtype(name)) for name, length in lengths.items() if not length
    }
    if empty:
        check_records()  # TensorFlow takes a feature of length 0 for missing where it has no kind
    return {name: column.numpy() for name, column in columns.items()} | empty


def _parse_ragged_by_tensorflow(batch, dtypes, path, first_record):
    """`parse_ragged` of records in any form."""
    tf = import_quietly("tensorflow")
    wanted = {name: tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64) for name, dtype in dtypes.items()}
    serialized = batch.to_list()
    try:
        columns = tf.io.parse_example(serialized, wanted)
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
        for number, record in enumerate(serialized, first_record):
            for name, feature in features_of(record, path, number).items():
                kind = feature.WhichOneof("kind")
                lists = {"int64": "int64_list", "float32": "float_list"}
                if name in dtypes and kind not in (lists[dtypes[name]], None):
                    raise InputError(
                        f"{path}, record {number}: {name} must hold {dtypes[name]}. Received: a {kind}."
                    ) from error
        raise InputError(f"{path}: {error}") from error
    return {name: (column.values.numpy(), column.row_lengths().numpy()) for name, column in columns.items()}
