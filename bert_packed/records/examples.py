"""What one serialized `tf.train.Example` holds, read without TensorFlow.

Record numbers count from 1.
"""

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from bert_packed import schema
from bert_packed.core.settings import InputError

GRAPHCORE_FEATURE = "packed_input_ids"  # of a layout that was written once


def _example_class():
    """The class of `tf.train.Example`, from its three messages.

    In a pool of its own: TensorFlow may be imported later, and brings the same names.
    """
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="records", syntax="proto3")

    def add_message(parent, name):
        message = parent.add()
        message.name = name
        return message

    def add_field(message, name, number, kind, type_name=None, repeated=False, oneof=None):
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, type=kind, label=label)
        if type_name:
            field.type_name = f".records.{type_name}"
        if oneof is not None:
            field.oneof_index = oneof

    lists = (("bytes", kinds.TYPE_BYTES), ("float", kinds.TYPE_FLOAT), ("int64", kinds.TYPE_INT64))
    feature = add_message(file.message_type, "Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(lists, 1):
        values = add_message(file.message_type, f"{name.title()}List")
        add_field(values, "value", 1, kind, repeated=True)
        add_field(feature, f"{name}_list", number, kinds.TYPE_MESSAGE, f"{name.title()}List", oneof=0)
    features = add_message(file.message_type, "Features")
    entry = add_message(features.nested_type, "FeatureEntry")
    entry.options.map_entry = True
    add_field(entry, "key", 1, kinds.TYPE_STRING)
    add_field(entry, "value", 2, kinds.TYPE_MESSAGE, "Feature")
    add_field(features, "feature", 1, kinds.TYPE_MESSAGE, "Features.FeatureEntry", repeated=True)
    example = add_message(file.message_type, "Example")
    add_field(example, "features", 1, kinds.TYPE_MESSAGE, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("records.Example"))


_Example = _example_class()


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
    found = features_of(record, path, number)
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
    return set(features_of(record, path, number))


def parse_example(record, path, number, lengths):
    """The values of the named features of one record.

    Args:
        record: `bytes`.
        path, number: Where it comes from, for messages.
        lengths: Dict from feature name to its length in this file.

    Returns:
        Dict from name to array `[length]`, int64 or float32.

    Raises:
        InputError: as `feature_lengths`, or a feature has another length.
    """
    found = features_of(record, path, number)
    try:
        values = {
            name: found[name].float_list.value
            if schema.dtype(name) == "float32"
            else found[name].int64_list.value
            for name in lengths
        }
    except KeyError:
        values = {}
    if any(len(values[name]) != length for name, length in lengths.items()):
        check_lengths(path, number, feature_lengths(record, path, number, lengths), lengths)
    return {name: np.fromiter(values[name], schema.dtype(name), length) for name, length in lengths.items()}


def features_of(record, path, number):
    try:
        return _Example.FromString(record).features.feature
    except DecodeError as error:
        raise InputError(
            f"{path}, record {number}: must be a tf.train.Example. Received: {error}."
        ) from error


def check_lengths(path, number, lengths, wanted):
    """Raise `InputError` where the lengths of a record's features are not as wanted."""
    for name, length in lengths.items():
        if length != wanted[name]:
            raise InputError(
                f"{path}, record {number}: {name} must have length {wanted[name]}, as in the file's first "
                f"record. Received: {length}."
            )
