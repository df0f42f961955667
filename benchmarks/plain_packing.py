"""Packing written straightforwardly: one Example at a time in, one out, all data in memory.

The baseline of `data_throughput.py`. Loops over tokens are left to `list`; nothing here is slow on purpose.
"""

import random

from bert_packed import schema
from bert_packed.core.runtime import import_quietly
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.packing.histogram import count_lengths

tf = import_quietly("tensorflow")


def pack_plainly(input_files, output_file, max_seq_length, depth):
    """Pack BERT's unpacked records into one file of packs; returns the number of sequences."""
    by_length, num_predictions = {}, []
    for path in input_files:
        for serialized in tf.data.TFRecordDataset(path).as_numpy_iterator():
            sequence = read_sequence(serialized)
            by_length.setdefault(len(sequence["tokens"]), []).append(sequence)
            num_predictions.append(len(sequence["prediction_ids"]))
    lengths = [length for length, sequences in by_length.items() for _ in sequences]
    plan = ALGORITHMS["lpfhp"](count_lengths(lengths, max_seq_length), max_seq_length, depth)
    packs = []
    for strategy, count in plan.strategies.items():
        # `pop` takes each sequence once
        packs.extend([by_length[length].pop() for length in strategy] for _ in range(count))
    random.Random(0).shuffle(packs)
    room = max(1, *(sum(len(sequence["prediction_ids"]) for sequence in pack) for pack in packs))
    spec = schema.PackSpec(max_seq_length, depth, room)
    with tf.io.TFRecordWriter(str(output_file)) as writer:
        for pack in packs:
            writer.write(serialize(assemble(pack, spec)))
    return len(lengths)


def read_sequence(serialized):
    """One unpacked record as a dict of lists without padding."""
    features = tf.train.Example.FromString(serialized).features.feature
    length = sum(features[schema.INPUT_MASK].int64_list.value)
    num_predictions = int(sum(features[schema.MASKED_LM_WEIGHTS].float_list.value))
    return {
        "tokens": features[schema.INPUT_IDS].int64_list.value[:length],
        "token_type_ids": features[schema.SEGMENT_IDS].int64_list.value[:length],
        "prediction_positions": features[schema.MASKED_LM_POSITIONS].int64_list.value[:num_predictions],
        "prediction_ids": features[schema.MASKED_LM_IDS].int64_list.value[:num_predictions],
        "next_sentence_label": features[schema.NEXT_SENTENCE_LABELS].int64_list.value[0],
    }


def assemble(pack, spec):
    """The features of a pack, a list of what `read_sequence` returns: dict of lists."""
    features = {name: [] for name in schema.PACKED_LENGTHS}
    for index, sequence in enumerate(pack, 1):
        start, length = len(features[schema.INPUT_IDS]), len(sequence["tokens"])
        positions = sequence["prediction_positions"]
        features[schema.INPUT_IDS] += sequence["tokens"]
        features[schema.INPUT_MASK] += [index] * length
        features[schema.SEGMENT_IDS] += sequence["token_type_ids"]
        features[schema.POSITION_IDS] += range(length)
        features[schema.MASKED_LM_POSITIONS] += [start + position for position in positions]
        features[schema.MASKED_LM_IDS] += sequence["prediction_ids"]
        features[schema.MASKED_LM_WEIGHTS] += [index] * len(positions)
        features[schema.NEXT_SENTENCE_POSITIONS].append(start)
        features[schema.NEXT_SENTENCE_LABELS].append(sequence["next_sentence_label"])
        features[schema.NEXT_SENTENCE_WEIGHTS].append(1)
    for name, values in features.items():
        # Padding fills the fixed shape of the feature
        values += [0] * (spec.shape(name)[0] - len(values))
    return features


def serialize(features):
    """A dict of lists as a serialized Example."""
    feature = {}
    for name, values in features.items():
        if name in schema.FLOAT_FEATURES:
            feature[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            feature[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
