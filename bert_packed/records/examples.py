"""Decoding of `tf.train.Example` records, a batch at once, or what one of them holds.

The bytes of a record, where n is a varint of what follows, to the end of the value or of the record:

    0A n  { 0A n  { 0A n  name   12 n  { 1A n  { 0A n  varints } } } ... }       whole numbers
                                         12 n  { 0A n  floats  }                 numbers with a fraction

A batch is read so if all of its records have their features in one order, as programs write them. Other
records, which the format allows, are parsed one by one by protobuf, several times as slowly.
"""

import itertools

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from bert_packed import schema
from bert_packed.core.settings import InputError

EXAMPLE_FEATURES, FEATURES_FEATURE, ENTRY_KEY, ENTRY_VALUE, LIST_VALUE = 0x0A, 0x0A, 0x0A, 0x12, 0x0A
KINDS = {"int64": 0x1A, "float32": 0x12}
MORE = 0x80  # of a varint's byte: another follows
MAX_SIZE_BYTES = 4  # of a varint that says a size: records of 256 MiB and more are left to protobuf
MAX_VARINT_BYTES = 10
MAX_NARROW_BYTES = 4  # of varints whose numbers fit into 32 bits
BYTES_AT_ONCE = 2**16  # decoded together, in a core's cache


class OtherFormError(Exception):
    """A record has another form than the one that is read here."""


def decode_columns(records, dtypes):
    """Decode features, "int64" or "float32" by name, of a batch; None where a record has another form.

    Returns a dict from name to (values of all records: float32, or the first of uint8, uint32 and int64 that
    holds them; number of values of each, int64 `[n]`).
    """
    try:
        found = _find_values(records, dtypes)
        return {name: _decode(records.content, *found[name], dtype) for name, dtype in dtypes.items()}
    except OtherFormError:
        return None


def decode_varints(content, ends):
    """Decode the varints of several rows: uint8, uint32 or int64, and how many each row has, int64 `[n]`.

    bytes  1  172 2  5 7,  ends  [3 5]   ->   values  [1 300 5 7],  counts  [2 2]
    """
    is_last = content < MORE
    row_ends = ends[ends > 0]
    if not is_last[row_ends - 1].all():
        raise OtherFormError
    if is_last.all():
        return content, np.diff(ends, prepend=0)
    values = _join_bytes(content, np.uint32, MAX_NARROW_BYTES)
    if values is None:
        values = _join_bytes(content, np.uint64, MAX_VARINT_BYTES)
        if values is None:
            raise OtherFormError
        values = values.view(np.int64)
    limits = itertools.pairwise([0, *ends.tolist()])
    return values, np.array([np.count_nonzero(is_last[start:end]) for start, end in limits])


def _join_bytes(content, dtype, most):
    """The numbers of varints that follow one another, uint8 `[m]`; None where one has over `most` bytes."""
    # numbers are read as if one began at every byte, which needs no gathering; the others are dropped after
    lower, goes_on = content & 0x7F, content >= MORE
    begins = np.concatenate([[True], ~goes_on[:-1]])
    found = []
    for start in range(0, len(content), BYTES_AT_ONCE):
        end = start + BYTES_AT_ONCE
        values, follows = lower[start:end].astype(dtype), goes_on[start:end] & begins[start:end]
        for number in range(1, most + 1):
            if not follows.any():
                break
            if number == most:
                return None
            part = lower[start + number : end + number].astype(dtype)
            part <<= dtype(7 * number)
            part *= follows[: len(part)]
            values[: len(part)] |= part
            more = goes_on[start + number : end + number]
            follows = follows[: len(more)] & more
        # indexing with a mask takes twice as long as compress where the mask alternates
        found.append(np.compress(begins[start:end], values))
    return np.concatenate(found)


def _find_values(records, dtypes):
    """Places of the packed values of features: dict from name to starts and ends, int64 `[n]`."""
    names = {name.encode(): name for name in dtypes}
    reader = _Reader(records)
    reader.expect(EXAMPLE_FEATURES)
    reader.expect_size(records.ends)
    found = {}
    while reader.place[0] < records.ends[0]:
        reader.expect(FEATURES_FEATURE)
        ends = reader.read_size() + reader.place
        name = reader.read_name()
        reader.expect(ENTRY_VALUE)
        reader.expect_size(ends)
        if name in names:
            if names[name] in found:
                raise OtherFormError
            reader.expect(KINDS[dtypes[names[name]]])
            reader.expect_size(ends)
            if (reader.place < ends).any():  # else none has a value
                reader.expect(LIST_VALUE)
                reader.expect_size(ends)
            found[names[name]] = reader.place, ends
        reader.go_to(ends)
    if (reader.place != records.ends).any() or found.keys() != dtypes.keys():
        raise OtherFormError
    return found


def _decode(content, starts, ends, dtype):
    limits = zip(starts.tolist(), ends.tolist(), strict=True)
    values = np.frombuffer(b"".join([content[start:end] for start, end in limits]), np.uint8)
    sizes = ends - starts
    if dtype == "float32":
        if (sizes % 4).any():
            raise OtherFormError
        return values.view("<f4"), sizes // 4
    return decode_varints(values, np.cumsum(sizes))


class _Reader:
    """Reads the same field of all records at once, at `place`, int64 `[n]`; raises where they differ."""

    def __init__(self, records):
        self._content = records.content
        self._bytes = np.frombuffer(records.content or b"\0", np.uint8)  # of empty records: one to look at
        self._ends = records.ends
        self.place = records.starts

    def go_to(self, place):
        if (place > self._ends).any() or (place < self.place).any():
            raise OtherFormError
        self.place = place

    def expect(self, tag):
        """Pass over a tag of one byte."""
        if (self._peek() != tag).any():
            raise OtherFormError
        self.go_to(self.place + 1)

    def expect_size(self, ends):
        """Pass over a size that must lead to `ends`."""
        if (self.read_size() + self.place != ends).any():
            raise OtherFormError

    def read_size(self):
        sizes, goes_on = np.zeros(len(self.place), np.int64), np.ones(len(self.place), bool)
        for number in range(MAX_SIZE_BYTES):
            byte = np.where(goes_on, self._peek(), 0)
            self.go_to(self.place + goes_on)
            sizes |= (byte & (MORE - 1)).astype(np.int64) << 7 * number
            goes_on = byte >= MORE
            if not goes_on.any():
                return sizes
        raise OtherFormError

    def read_name(self):
        """The key of an entry, which must be the same in all: `bytes`."""
        self.expect(ENTRY_KEY)
        sizes = self.read_size()
        size, start = int(sizes[0]), int(self.place[0])
        self.go_to(self.place + sizes)
        key = self._content[start : start + size]
        if (sizes != size).any():
            raise OtherFormError
        if (self._bytes[self.place[:, None] + np.arange(-size, 0)] != np.frombuffer(key, np.uint8)).any():
            raise OtherFormError
        return key

    def _peek(self):
        return self._bytes[np.minimum(self.place, len(self._bytes) - 1)]


LISTS = {"int64": "int64_list", "float32": "float_list"}
GRAPHCORE_FEATURE = "packed_input_ids"  # of a layout that was written once
# The part of TensorFlow's example.proto and feature.proto that is read and written here
MESSAGES = """
name: "example.proto" package: "records" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 oneof_index: 0 type_name: "BytesList" }
  field { name: "float_list" number: 2 oneof_index: 0 type_name: "FloatList" }
  field { name: "int64_list" number: 3 oneof_index: 0 type_name: "Int64List" }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type_name: "Feature" }
  }
  field { name: "feature" number: 1 type_name: "FeatureEntry" label: LABEL_REPEATED }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
"""


def _example_class():
    """The class of `tf.train.Example`."""
    pool = descriptor_pool.DescriptorPool()  # not the default one, to which TensorFlow adds the same names
    pool.Add(text_format.Parse(MESSAGES, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("records.Example"))


Example = _example_class()


def feature_names(record, path, number):
    """Names of all features of one record: set of str; raises as `feature_lengths`."""
    return set(_features(record, path, number))


def feature_lengths(record, path, number, names):
    """Numbers of values of the named features of one record: dict; `path` and `number` are for messages."""
    return _lengths(_features(record, path, number), path, number, names)


def check_names(found, names, path, number):
    """Raise `InputError` where some names are not among those `found` in a record."""
    missing = [name for name in names if name not in found]
    if missing and GRAPHCORE_FEATURE in found:
        raise InputError(
            f"{path} must be packed again: its layout is no longer read. Received: Graphcore's layout "
            "(--output_format=graphcore), which bert_packed 0.1.0 read up to commit fcee3e1."
        )
    if missing:
        received = ", ".join(repr(name)[1:-1] for name in sorted(found))  # a damaged name may break lines
        raise InputError(
            f"{path}, record {number}: features {', '.join(missing)} are missing. "
            f"Received: {received or 'no feature'}."
        )


def parse_example(record, path, number, lengths):
    """`parse_examples` of one record: dict from name to array `[length]`."""
    found = _features(record, path, number)
    for name, length in _lengths(found, path, number, lengths).items():
        if length != lengths[name]:
            raise InputError(
                f"{path}, record {number}: {name} must have length {lengths[name]}, as in the file's first "
                f"record. Received: {length}."
            )
    return {name: _values(found[name], schema.dtype(name)) for name in lengths}


def parse_examples(batch, lengths, narrow=(), origins=None):
    """Decode records whose features have fixed `lengths`: dict from name to `[n, length]`, int64 or float32.

    Whole numbers of the features in `narrow` may come in any integer type, for speed. `origins` are n (path,
    record number), if the batch holds records of several places.
    """
    dtypes = {name: schema.dtype(name) for name in lengths}
    columns = decode_columns(batch, dtypes)
    if columns is None or any((counts != lengths[name]).any() for name, (_, counts) in columns.items()):
        origins = _origins(batch) if origins is None else origins
        rows = [
            parse_example(record, *origin, lengths)
            for record, origin in zip(batch.to_list(), origins, strict=True)
        ]
        return {name: np.stack([row[name] for row in rows]) for name in lengths}
    return {
        name: (values if name in narrow else values.astype(dtypes[name], copy=False)).reshape(
            len(batch), lengths[name]
        )
        for name, (values, _) in columns.items()
    }


def parse_ragged(batch, dtypes):
    """Decode features, "int64" or "float32" by name, of any lengths; 0 where a record lacks one.

    Returns a dict from name to (values of all records, number of values of each, int64 `[n]`).
    """
    columns = decode_columns(batch, dtypes)
    if columns is None:
        pairs = zip(batch.to_list(), _origins(batch), strict=True)
        rows = [_parse_any_lengths(record, *origin, dtypes) for record, origin in pairs]
        columns = {
            name: (np.concatenate([row[name] for row in rows]), np.array([len(row[name]) for row in rows]))
            for name in dtypes
        }
    return {
        name: (values.astype(dtypes[name], copy=False), counts) for name, (values, counts) in columns.items()
    }


def _parse_any_lengths(record, path, number, dtypes):
    found, values = _features(record, path, number), {}
    for name, dtype in dtypes.items():
        kind = found[name].WhichOneof("kind") if name in found else None
        if kind not in (LISTS[dtype], None):
            raise InputError(f"{path}, record {number}: {name} must hold {dtype}. Received: a {kind}.")
        values[name] = _values(found[name], dtype)  # a missing feature that is looked up is made, empty
    return values


def _values(feature, dtype):
    return np.fromiter(getattr(feature, LISTS[dtype]).value, dtype)


def _origins(batch):
    return [(batch.path, number) for number in batch.numbers.tolist()]


def _features(record, path, number):
    try:
        return Example.FromString(record).features.feature
    except DecodeError as error:
        raise InputError(
            f"{path}, record {number}: must be a tf.train.Example. Received: {error}."
        ) from error


def _lengths(found, path, number, names):
    check_names(found, names, path, number)
    lengths = {}
    for name in names:
        kind, wanted = found[name].WhichOneof("kind"), LISTS[schema.dtype(name)]
        if kind not in (wanted, None):  # None: written without a value
            raise InputError(f"{path}, record {number}: {name} must be a {wanted}. Received: a {kind}.")
        lengths[name] = len(getattr(found[name], wanted).value)
    return lengths
