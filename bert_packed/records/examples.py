"""Decode serialized `tf.train.Example` records: many at once, or what one of them holds.

Records in a form that `example_columns.py` does not read are parsed one by one, by protobuf.
"""

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records.example_columns import decode_columns

LISTS = {"int64": "int64_list", "float32": "float_list"}
GRAPHCORE_FEATURE = "packed_input_ids"  # of a layout that was written once


def _example_class():
    """The class of `tf.train.Example`, from its three messages."""
    kinds, types = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.DescriptorProto

    def field(name, number, kind, type_name="", label=kinds.LABEL_OPTIONAL, **more):
        type_name = f".records.{type_name}" if type_name else None
        return kinds(name=name, number=number, type=kind, type_name=type_name, label=label, **more)

    message, many = kinds.TYPE_MESSAGE, kinds.LABEL_REPEATED
    lists = {"Bytes": kinds.TYPE_BYTES, "Float": kinds.TYPE_FLOAT, "Int64": kinds.TYPE_INT64}
    choices = [
        field(f"{name.lower()}_list", number, message, f"{name}List", oneof_index=0)
        for number, name in enumerate(lists, 1)
    ]
    entry = types(
        name="FeatureEntry",
        field=[field("key", 1, kinds.TYPE_STRING), field("value", 2, message, "Feature")],
        options={"map_entry": True},
    )
    entries = field("feature", 1, message, "Features.FeatureEntry", many)
    messages = [
        *(
            types(name=f"{name}List", field=[field("value", 1, kind, "", many)])
            for name, kind in lists.items()
        ),
        types(name="Feature", field=choices, oneof_decl=[{"name": "kind"}]),
        types(name="Features", field=[entries], nested_type=[entry]),
        types(name="Example", field=[field("features", 1, message, "Features")]),
    ]
    pool = descriptor_pool.DescriptorPool()  # not the default one, to which TensorFlow adds the same names
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="records", message_type=messages)
    file.syntax = "proto3"
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("records.Example"))


_Example = _example_class()


def feature_names(record, path, number):
    """Names of all features of one record: set of str; raises as `feature_lengths`."""
    return set(_features(record, path, number))


def feature_lengths(record, path, number, names):
    """Numbers of values of the named features of one record: dict; `path` and `number` are for messages.

    Raises:
        InputError: the record is no `tf.train.Example`, lacks a feature, or has it in another type.
    """
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
        raise InputError(
            f"{path}, record {number}: features {', '.join(missing)} are missing. "
            f"Received: {', '.join(sorted(found)) or 'no feature'}."
        )


def parse_example(record, path, number, lengths):
    """`parse_examples` of one record: dict from name to array `[length]`."""
    found = _features(record, path, number)
    values = {
        name: getattr(found[name], LISTS[schema.dtype(name)]).value for name in lengths if name in found
    }
    # A feature that is missing or of another type has length 0, too
    if any(length == 0 or len(values.get(name, ())) != length for name, length in lengths.items()):
        _check_lengths(_lengths(found, path, number, lengths), lengths, path, number)
    return {name: np.fromiter(values[name], schema.dtype(name), length) for name, length in lengths.items()}


def parse_examples(batch, lengths, narrow=(), origins=None):
    """Decode records whose features have fixed lengths: dict from name to `[n, length]`, int64 or float32.

    Args:
        batch: `Records`, at least one.
        lengths: Dict from feature name to its length in this file; other features are passed over.
        narrow: Names of whole-number features that may come in any integer type, for speed.
        origins: List of n (path, record number), if the batch holds records of several places.

    Raises:
        InputError: a record is no `tf.train.Example`, lacks a feature, or has it in another length or type.
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
    """Decode records whose features have any lengths; 0 where a record lacks one.

    Args:
        batch: `Records`, at least one.
        dtypes: Dict from feature name to "int64" or "float32".

    Returns:
        Dict from name to (values of all records, number of values of each, int64 `[n]`). `InputError` where a
        record is no `tf.train.Example`, or has a feature in another type.
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
        # A feature that is looked up is made, without a value
        values[name] = np.array(getattr(found[name], LISTS[dtype]).value, dtype)
    return values


def _origins(batch):
    return [(batch.path, number) for number in range(batch.number, batch.number + len(batch))]


def _features(record, path, number):
    try:
        return _Example.FromString(record).features.feature
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


def _check_lengths(lengths, wanted, path, number):
    for name, length in lengths.items():
        if length != wanted[name]:
            raise InputError(
                f"{path}, record {number}: {name} must have length {wanted[name]}, as in the file's first "
                f"record. Received: {length}."
            )
