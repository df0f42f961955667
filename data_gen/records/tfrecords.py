"""How records enter and leave TFRecord files: read, write, count and decode `tf.train.Example`.

The one place in `data_gen` that imports TensorFlow. Record numbers count from 1, in messages too.
"""

import contextlib
import dataclasses
import os

import numpy as np

from data_gen import schema
from data_gen.cli.quiet_import import import_quietly
from data_gen.cli.settings import InputError
from data_gen.jobs import files
from data_gen.records.examples import check_lengths, feature_lengths, features_of
from data_gen.records.frame_contents import describe_damage
from data_gen.records.frames import FRAME_BYTES, BatchSizes

tf = import_quietly("tensorflow")

READ_BATCH = 1024  # records; a batch of S=512 decodes to about 20 MB
BUFFER_BYTES = 2**18  # of a file, read at once
READ_BYTES = 2**23  # of a batch as well: numbers of one byte decode to eight times that


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
        String tensors `[n]`, n <= batch_size, one serialized record each, in the order of the file.

    Raises:
        InputError: the file is empty, is no TFRecord file, or has a corrupt or truncated record.
        OSError: it cannot be opened or read; the message names it.
    """
    path = os.fspath(path)
    with files.open_file(path):
        size, _ = files.size_and_time(path)  # TensorFlow's own error for a missing file is no OSError
    if size == 0:
        raise InputError(f"every TFRecord file must hold a record. Received: {path}, which is empty.")
    num_records, num_bytes = 0, 0
    for batch in _read_within(path, batch_size, max_bytes):
        num_records += len(batch)
        num_bytes += batch_bytes(batch)
        yield batch
    if num_bytes != size:
        # TensorFlow takes a file that ends within a record's header for a complete one
        raise InputError(describe_damage(path, num_records))


def read_records(path):
    """Read one file record by record: yields `bytes`; raises as `read_batches`."""
    for batch in read_batches(path):
        yield from batch.numpy()


def batch_bytes(batch):
    """Bytes that records, a string tensor `[n]`, take in a file: int."""
    return FRAME_BYTES * len(batch) + int(tf.reduce_sum(tf.strings.length(batch)))


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
        OSError: the file cannot be written, as on a full disk.
    """
    path = os.fspath(path)
    num_records = 0
    try:
        with tf.io.TFRecordWriter(path) as writer:
            for record in serialized:
                writer.write(record)
                num_records += 1
    except tf.errors.OpError as error:
        # which begins with the path too, where the system refuses to write
        raise OSError(f"{path}: {error.message.removeprefix(f'{path};').strip()}") from error
    return FileEntry(os.path.basename(path), num_records, files.file_sha256(path))


def write_file(path, serialized):
    """`write_records` to a file that appears under its name only when complete."""
    with files.write_whole(path) as partial:
        entry = write_records(partial, serialized)
    return dataclasses.replace(entry, name=os.path.basename(path))


def parse_examples(batch, lengths, path, first_record):
    """Decode a batch of records whose features have fixed lengths.

    Args:
        batch: String tensor `[n]` of one file.
        lengths: Dict from feature name to its length in this file.
        path: The file, for messages.
        first_record: Number of the batch's first record.

    Returns:
        Dict from feature name to array `[n, length]`, int64 or float32.

    Raises:
        InputError: a record is no `tf.train.Example`, lacks a feature, or has it in another length or type.
    """
    wanted = {
        name: tf.io.FixedLenFeature([length], schema.dtype(name))
        for name, length in lengths.items()
        if length
    }
    try:
        columns = tf.io.parse_example(batch, wanted)
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
        # TensorFlow's message has no record number that holds beyond the batch, and it quotes the record:
        # where that is no text, Python cannot even show it
        for number, record in enumerate(batch.numpy(), first_record):
            check_lengths(path, number, feature_lengths(record, path, number, lengths), lengths)
        raise InputError(f"{path}: {error}") from error
    arrays = {name: column.numpy() for name, column in columns.items()}
    empty = {name: np.zeros((len(batch), 0), schema.dtype(name)) for name in lengths if name not in arrays}
    return {**arrays, **empty}


def parse_ragged(batch, dtypes, path, first_record):
    """Decode a batch of records whose features have any lengths.

    Args:
        batch: String tensor `[n]` of one file.
        dtypes: Dict from feature name to "int64" or "float32". A record that lacks a feature has 0 values.
        path: The file, for messages.
        first_record: Number of the batch's first record.

    Returns:
        Dict from name to (values of all records, number of values of each, int64 `[n]`).

    Raises:
        InputError: a record is no `tf.train.Example`, or has a feature in another type.
    """
    wanted = {name: tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64) for name, dtype in dtypes.items()}
    try:
        columns = tf.io.parse_example(batch, wanted)
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
        for number, record in enumerate(batch.numpy(), first_record):
            for name, feature in features_of(record, path, number).items():
                kind = feature.WhichOneof("kind")
                lists = {"int64": "int64_list", "float32": "float_list"}
                if name in dtypes and kind not in (lists[dtypes[name]], None):
                    raise InputError(
                        f"{path}, record {number}: {name} must hold {dtypes[name]}. Received: a {kind}."
                    ) from error
        raise InputError(f"{path}: {error}") from error
    return {name: (column.values.numpy(), column.row_lengths().numpy()) for name, column in columns.items()}


def _read_within(path, batch_size, max_bytes):
    """Batches of one file, each within `max_bytes`: yields string tensors; raises as `read_batches`."""
    sizes = BatchSizes(path, batch_size, max_bytes)
    num_read, batches = 0, None
    while True:
        # TensorFlow batches by number alone
        if sizes.look_ahead() or batches is None:
            dataset = _open_dataset(path).skip(num_read).batch(sizes.size)
            batches = _name_errors(dataset, path)
        batch = next(batches, None)
        if batch is None:
            return
        yield batch
        num_read += len(batch)
        sizes.advance(len(batch))


def _open_dataset(path):
    """The records of a file: what `tf.data.TFRecordDataset` does, which traces a function for every file."""
    variant = tf.raw_ops.TFRecordDataset(filenames=[path], compression_type="", buffer_size=BUFFER_BYTES)
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))


def _name_errors(dataset, path):
    """The batches of a dataset, TensorFlow's errors as ours: `InputError` for damage, otherwise `OSError`."""
    try:
        yield from dataset
    except tf.errors.DataLossError as error:
        raise InputError(_describedescribe_damage(path)) from error
    except tf.errors.OpError as error:
        kinds = {tf.errors.NotFoundError: FileNotFoundError, tf.errors.PermissionDeniedError: PermissionError}
        raise kinds.get(type(error), OSError)(f"{path}: {error.message}") from error


def _describedescribe_damage(path):
    """The message for a file that TensorFlow cannot read to its end."""
    num_good = 0
    with contextlib.suppress(tf.errors.OpError):  # expected: the point is how many came before it
        for _ in _open_dataset(path):
            num_good += 1
    return describe_damage(path, num_good)
