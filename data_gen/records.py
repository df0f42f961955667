"""How records enter and leave TFRecord files: read, write, count, encode and decode `tf.train.Example`.

The one place in `data_gen` that imports TensorFlow. Record numbers count from 1, in messages too.
"""

import dataclasses
import hashlib
import os
import shlex

import numpy as np
from google.protobuf.message import DecodeError

from data_gen import schema
from data_gen.quiet_import import import_quietly
from data_gen.settings import InputError

tf = import_quietly("tensorflow")

READ_BATCH = 1024  # records; a batch of S=512 decodes to about 20 MB
FRAME_BYTES = 16  # around each record: its length (8), and two checksums (4 each)


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


def read_batches(path, batch_size=READ_BATCH):
    """Read the records of one file in batches.

    Yields:
        String tensors `[n]`, n <= batch_size, one serialized record each, in the order of the file.

    Raises:
        InputError: the file is empty, is no TFRecord file, or has a corrupt or truncated record.
        OSError: it cannot be opened.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:  # TensorFlow's own error for a missing file is no OSError
        size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise InputError(f"every TFRecord file must hold a record. Received: {path}, which is empty.")
    num_records, num_bytes = 0, 0
    dataset = tf.data.TFRecordDataset(path).batch(batch_size)
    try:
        for batch in dataset:
            num_records += len(batch)
            num_bytes += FRAME_BYTES * len(batch) + int(tf.reduce_sum(tf.strings.length(batch)))
            yield batch
    except tf.errors.DataLossError as error:
        raise InputError(_describe_damage(path)) from error
    if num_bytes != size:
        # TensorFlow takes a file that ends within a record's header for a complete one
        raise InputError(_damage(path, num_records))


def read_records(path):
    """Read one file record by record: yields `bytes`; raises as `read_batches`."""
    for batch in read_batches(path):
        yield from batch.numpy()


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
        raise OSError(f"{path}: {error.message}") from error
    return FileEntry(os.path.basename(path), num_records, file_sha256(path))


def file_sha256(path):
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def serialize_examples(features):
    """Encode a batch of fixed-length features as `tf.train.Example` records.

    Equal to TensorFlow's deterministic serialization, byte for byte, and about twenty times as fast: the
    numbers of the whole batch become varints at once.

    Args:
        features: Dict from feature name to array `[n, length]`; written as float32 or int64 by
            `schema.dtype`. Whole numbers are not negative.

    Returns:
        List of n `bytes`. Features stand in the order of their names, so that equal features are equal bytes.

    Raises:
        ValueError: shapes do not fit, or a whole number is negative.
    """
    shapes = {name: np.shape(values) for name, values in features.items()}
    if any(len(shape) != 2 for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
        raise ValueError(f"every feature must have shape [n, length] with one n. Received: {shapes}.")
    columns = [_encode_feature(name, np.asarray(features[name])) for name in sorted(features)]
    records = []
    for parts in zip(*columns, strict=True):
        body = b"".join(parts)
        records.append(_field(1, body))  # Example.features
    return records


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


def read_pack_spec(files, argument="input_file", pattern=None):
    """Read S, K and P from the first record of every file of packs.

    Args:
        files: List of paths, at least one.
        argument, pattern: Flag and value that name them, for the command in the message about unpacked files.

    Returns:
        `schema.PackSpec`.

    Raises:
        InputError: files disagree, a file holds unpacked records, or features are missing or of lengths that
            no packed record has.
    """
    specs = {}
    for path in files:
        record = first_record(path)
        names = feature_names(record, path, 1)
        if schema.POSITION_IDS not in names and all(name in names for name in schema.UNPACKED_LENGTHS):
            raise InputError(_say_pack_first(path, record, argument, pattern or path))
        lengths = feature_lengths(record, path, 1, schema.PACKED_LENGTHS)
        sizes = common_lengths(lengths, schema.PACKED_LENGTHS, path)
        specs[path] = schema.PackSpec(sizes["S"], sizes["K"], sizes["P"])
    first = files[0]
    for path, spec in specs.items():
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
    try:
        for _ in tf.data.TFRecordDataset(path):
            num_good += 1
    except tf.errors.DataLossError:
        pass  # expected: the point is how many came before it
    return _damage(path, num_good)


def _damage(path, num_good):
    if num_good == 0:
        return f"{path} is not a TFRecord file, or its record 1 is truncated or corrupt."
    return f"{path}, record {num_good + 1}: the record is truncated or corrupt."


def _encode_feature(name, values):
    """Entries of the Example's feature map: yields n `bytes`."""
    num_rows, length = values.shape
    if schema.dtype(name) == "float32":
        content = np.ascontiguousarray(values, "<f4").tobytes()
        ends = np.arange(1, num_rows + 1) * (4 * length)
        kind = 2  # Feature.float_list
    else:
        content, ends = encode_varints(values)
        kind = 3  # Feature.int64_list
    entries = {}  # few distinct sizes: nearly every row finds its header made
    start = 0
    for end in ends.tolist():
        size = end - start
        if size not in entries:
            entries[size] = _entry_header(name, kind, size)
        yield entries[size] + content[start:end]
        start = end


def _entry_header(name, kind, size):
    """The bytes of a feature-map entry that stand before `size` bytes of packed values."""
    values = _field_header(1, size)  # Int64List.value or FloatList.value
    feature = _field_header(kind, len(values) + size) + values
    entry_value = _field_header(2, len(feature) + size) + feature
    key = _field(1, name.encode())
    return _field_header(1, len(key) + len(entry_value) + size) + key + entry_value


def _field(number, content):
    return _field_header(number, len(content)) + content


def _field_header(number, size):
    """Tag and length of a length-delimited protocol-buffer field."""
    return bytes([number << 3 | 2]) + encode_varints(np.array([[size]]))[0]


def encode_varints(values):
    """Encode whole numbers as protocol-buffer varints: 7 bits a byte, lowest first, high bit = more follow.

        [[1 300]        ->   bytes  1  172 2  5 7
         [5   7]]            ends   3 5

    Args:
        values: Integer array `[n, length]`, not negative.

    Returns:
        `bytes` of all rows, and int64 `[n]`: where each row ends in them.

    Raises:
        ValueError: a value is negative.
    """
    if values.size and values.min() < 0:
        raise ValueError(f"whole numbers must not be negative. Received: {values.min()}.")
    num_rows, length = values.shape
    largest = int(values.max()) if values.size else 0
    if largest < 128:
        return values.astype(np.uint8).tobytes(), np.arange(1, num_rows + 1) * length
    num_bytes = -(-largest.bit_length() // 7)
    rest = values.astype(np.uint32 if largest < 2**32 else np.uint64)
    encoded = np.empty((num_rows, length, num_bytes), np.uint8)
    used = np.empty((num_rows, length, num_bytes), bool)
    used[..., 0] = True  # the number 0 takes a byte as well
    for place in range(num_bytes):
        encoded[..., place] = rest & 127
        rest = rest >> 7
        more = rest != 0
        encoded[..., place] |= more.astype(np.uint8) << 7
        if place + 1 < num_bytes:
            used[..., place + 1] = more
    widths = np.count_nonzero(used.reshape(num_rows, -1), axis=1)
    return encoded[used].tobytes(), np.cumsum(widths)
