"""How records enter and leave TFRecord files: read, write, count and decode `tf.train.Example`.

The one place in `data_gen` that imports TensorFlow. Record numbers count from 1, in messages too.
"""

import contextlib
import dataclasses
import os
import shlex

import numpy as np
from google.protobuf.message import DecodeError

from data_gen import schema
from data_gen.cli.quiet_import import import_quietly
from data_gen.cli.settings import InputError
from data_gen.jobs import files
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
        raise InputError(_damage(path, num_records))


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
            _check_lengths(path, number, feature_lengths(record, path, number, lengths), lengths)
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
            for name, feature in _features(record, path, number).items():
                kind = feature.WhichOneof("kind")
                lists = {"int64": "int64_list", "float32": "float_list"}
                if name in dtypes and kind not in (lists[dtypes[name]], None):
                    raise InputError(
                        f"{path}, record {number}: {name} must hold {dtypes[name]}. Received: a {kind}."
                    ) from error
        raise InputError(f"{path}: {error}") from error
    return {name: (column.values.numpy(), column.row_lengths().numpy()) for name, column in columns.items()}


def feature_lengths(record, path, number, names):
    """Lengths of the named features of one record.

    Args:
        record: `bytes`.
        path, number: Where it comes from, for messages.
        names: Feature names it must have; others are ignored.

    Returns:
        Dict from name to number of values.

    Raises:
        InputError: the record is no `tf.train.Example`, lacks a feature, or has it in another type.
    """
    found = _features(record, path, number)
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(
            f"{path}, record {number}: features {', '.join(missing)} are missing. "
            f"Received: {', '.join(sorted(found)) or 'no feature'}."
        )
    lengths = {}
    for name in names:
        kind = found[name].WhichOneof("kind")
        wanted = "float_list" if schema.dtype(name) == "float32" else "int64_list"
        if kind not in (wanted, None):  # None: written without a value
            raise InputError(f"{path}, record {number}: {name} must be a {wanted}. Received: a {kind}.")
        lengths[name] = len(getattr(found[name], wanted).value)
    return lengths


def feature_names(record, path, number):
    """Names of all features of one record: set of str; raises as `feature_lengths`."""
    return set(_features(record, path, number))


def first_record(path):
    """The first record of a file, `bytes`; raises as `read_batches`."""
    return next(iter(read_batches(path, batch_size=1))).numpy()[0]


def find_objective(path):
    """What is learnt from the records of a file, packed or not, as `PackSpec.objective`.

    What has no `label_mask` counts as BERT's, and its readers say what is missing.
    """
    names = feature_names(first_record(path), path, 1)
    return schema.CAUSAL_LM if schema.LABEL_MASK in names else schema.MLM_NSP


def find_common_objective(paths):
    """The objective that all files are for; raises `InputError` where they disagree."""
    found = {find_objective(path): path for path in paths}
    if len(found) > 1:
        raise InputError(f"all files must be for one objective. Received: {found}.")
    return next(iter(found))


def read_pack_spec(paths, argument="input_file", pattern=None, kinds=None):
    """Read S, K and P from the first record of every file of packs, BERT's or for causal language modelling.

    Args:
        paths: List of paths, at least one.
        argument, pattern: Flag and value that name them, for the command in the message about unpacked files.
        kinds: Which feature has which length: `schema.PACKED_LENGTHS` or another layout's; None for those
            of the records' objective.

    Returns:
        `schema.PackSpec`, whose `objective` says what is learnt from them.

    Raises:
        InputError: files disagree, a file holds unpacked records, or features are missing or of lengths that
            no packed record has.
    """
    specs = {}
    for path in paths:
        record = first_record(path)
        names = feature_names(record, path, 1)
        if schema.POSITION_IDS not in names and any(
            all(name in names for name in unpacked)
            for unpacked in (schema.UNPACKED_LENGTHS, schema.CAUSAL_UNPACKED_LENGTHS)
        ):
            raise InputError(_say_pack_first(path, record, argument, pattern or path))
        is_causal = kinds is None and schema.LABEL_MASK in names
        wanted = kinds or (schema.CAUSAL_LENGTHS if is_causal else schema.PACKED_LENGTHS)
        lengths = feature_lengths(record, path, 1, wanted)
        sizes = {"P": 0, **common_lengths(lengths, wanted, path)}
        specs[path] = schema.PackSpec(sizes["S"], sizes["K"], sizes["P"])
    first = paths[0]
    for path, spec in specs.items():
        if spec.objective != specs[first].objective:
            raise InputError(
                "all files of packs must be for one objective. Received: "
                f"{first}: {specs[first].objective}; {path}: {spec.objective}."
            )
        if spec != specs[first]:
            raise InputError(
                "all files of packs must have one max_seq_length, max_sequences_per_pack and "
                f"max_predictions_per_pack. Received: {first}: {_spec_text(specs[first])}; "
                f"{path}: {_spec_text(spec)}. Pack them together, or with the same "
                "--max_sequences_per_pack and --max_predictions_per_pack."
            )
    return specs[first]


def common_lengths(lengths, kinds, path):
    """The lengths S, K, P of a file, from the lengths of its features.

    Args:
        lengths: Dict from feature name to length in the file's first record.
        kinds: `schema.PACKED_LENGTHS` or `schema.UNPACKED_LENGTHS`.
        path: The file, for messages.

    Returns:
        Dict from "S", "K", "P" to a length.

    Raises:
        InputError: features that must be equally long are not.
    """
    sizes = {}
    for name, kind in kinds.items():
        wanted = kind if isinstance(kind, int) else sizes.setdefault(kind, lengths[name])
        if lengths[name] != wanted:
            raise InputError(
                f"{path}, record 1: {name} must have length {wanted}. Received: {lengths[name]}."
            )
    return sizes


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
        raise InputError(_describe_damage(path)) from error
    except tf.errors.OpError as error:
        kinds = {tf.errors.NotFoundError: FileNotFoundError, tf.errors.PermissionDeniedError: PermissionError}
        raise kinds.get(type(error), OSError)(f"{path}: {error.message}") from error


def _features(record, path, number):
    try:
        return tf.train.Example.FromString(record).features.feature
    except DecodeError as error:
        raise InputError(
            f"{path}, record {number}: must be a tf.train.Example. Received: {error}."
        ) from error


def _check_lengths(path, number, lengths, wanted):
    for name, length in lengths.items():
        if length != wanted[name]:
            raise InputError(
                f"{path}, record {number}: {name} must have length {wanted[name]}, as in the file's first "
                f"record. Received: {length}."
            )


def _say_pack_first(path, record, argument, pattern):
    """The message about unpacked records, with the command that packs them."""
    length = feature_lengths(record, path, 1, [schema.INPUT_IDS])[schema.INPUT_IDS]
    if schema.LABEL_MASK in feature_names(record, path, 1):
        length = "LENGTH"  # no padding says how long others are
    name = "packed" if argument == "input_file" else f"packed_{argument.removesuffix('_input_file')}"
    folder = os.path.join(os.path.dirname(path) or ".", name)
    return (
        f"{path} holds unpacked records; pack them first: python data_gen/pack_tfrecords.py "
        f"--input_file={shlex.quote(pattern)} --max_seq_length={length} --output_dir={shlex.quote(folder)}"
    )


def _spec_text(spec):
    return f"{spec.max_seq_length}, {spec.max_sequences_per_pack}, {spec.max_predictions_per_pack}"


def _describe_damage(path):
    """The message for a file that TensorFlow cannot read to its end."""
    num_good = 0
    with contextlib.suppress(tf.errors.OpError):  # expected: the point is how many came before it
        for _ in _open_dataset(path):
            num_good += 1
    return _damage(path, num_good)


def _damage(path, num_good):
    if num_good == 0:
        return f"{path} is not a TFRecord file, or its record 1 is truncated or corrupt."
    return f"{path}, record {num_good + 1}: the record is truncated or corrupt."
