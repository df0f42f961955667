"""`tf.train.Example` as protocol buffers have it, without TensorFlow and without our own encoder.

The messages and their numbers are those of TensorFlow's example.proto and feature.proto.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELD = descriptor_pb2.FieldDescriptorProto
PACKAGE = "example_protos"
LISTS = {"BytesList": FIELD.TYPE_BYTES, "FloatList": FIELD.TYPE_FLOAT, "Int64List": FIELD.TYPE_INT64}


def _describe():
    file = descriptor_pb2.FileDescriptorProto(name="example_protos.proto", package=PACKAGE, syntax="proto3")

    def add(message, name, number, kind, label=FIELD.LABEL_OPTIONAL, **options):
        options |= {"type_name": f".{PACKAGE}.{kind}"} if isinstance(kind, str) else {}
        kind = FIELD.TYPE_MESSAGE if isinstance(kind, str) else kind
        message.field.add(name=name, number=number, type=kind, label=label, **options)

    feature = descriptor_pb2.DescriptorProto(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(LISTS.items(), 1):
        add(file.message_type.add(name=name), "value", 1, kind, FIELD.LABEL_REPEATED)
        field = f"{name.removesuffix('List').lower()}_list"
        add(feature, field, number, name, oneof_index=0)
    file.message_type.append(feature)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, FIELD.TYPE_STRING)
    add(entry, "value", 2, "Feature")
    add(features, "feature", 1, "Features.FeatureEntry", FIELD.LABEL_REPEATED)
    add(file.message_type.add(name="Example"), "features", 1, "Features")
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_describe())
Example, Feature, Features, FloatList, Int64List = (
    message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    for name in ("Example", "Feature", "Features", "FloatList", "Int64List")
)
