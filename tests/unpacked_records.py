"""Small unpacked records for tests, and plain loops that say what they and their packs hold."""

import numpy as np

from bert_packed import schema
from bert_packed.records import record_rules, tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.examples import Example, parse_examples
from bert_packed.records.read_bert import read_unpacked
from bert_packed.records.sequences import concatenate

PREDICTIONS = (schema.MASKED_LM_POSITIONS, schema.MASKED_LM_IDS, schema.MASKED_LM_WEIGHTS)


def make_features(lengths, max_seq_length, seed=0, max_predictions=4, vocab_size=300):
    """Features of unpacked records with random content; dict of arrays `[n, ...]`.

    Sequence i has 0 to max_predictions predictions, fewer where it is short.
    """
    rng = np.random.default_rng(seed)
    shape = {"S": max_seq_length, "P": max_predictions, 1: 1}
    features = {
        name: np.zeros((len(lengths), shape[kind]), schema.dtype(name))
        for name, kind in schema.UNPACKED_LENGTHS.items()
    }
    for row, length in enumerate(lengths):
        features[schema.INPUT_IDS][row, :length] = rng.integers(1, vocab_size, length)
        features[schema.INPUT_MASK][row, :length] = 1
        features[schema.SEGMENT_IDS][row, length // 2 : length] = 1
        count = rng.integers(0, min(max_predictions, length) + 1)
        features[schema.MASKED_LM_POSITIONS][row, :count] = np.sort(rng.choice(length, count, replace=False))
        features[schema.MASKED_LM_IDS][row, :count] = rng.integers(1, vocab_size, count)
        features[schema.MASKED_LM_WEIGHTS][row, :count] = 1
        features[schema.NEXT_SENTENCE_LABELS][row] = rng.integers(0, 2)
    return features


def write_features(path, features):
    """Write features as one TFRecord file; returns the path as text."""
    tfrecords.write_records(path, serialize_examples(features))
    return str(path)


def example(features):
    """One record as protocol buffers serialize it: floats, and weights of our schema, are a float_list."""
    lists = {}
    for name, values in features.items():
        is_float = len(values) and np.asarray(values).dtype.kind == "f"
        kind = "float_list" if is_float or schema.dtype(name) == "float32" else "int64_list"
        lists[name] = {kind: {"value": values}}
    return Example(features={"feature": lists}).SerializeToString(deterministic=True)


def read_records(path):
    """The records of a file: list of `bytes`."""
    return [record for batch in tfrecords.read_batches(path) for record in batch.to_list()]


def load(path):
    """All sequences of one unpacked file."""
    return concatenate(list(read_unpacked(path)))


def read_packs(paths):
    """All packs of some files, as one dict of arrays."""
    spec = record_rules.read_pack_spec(paths)
    return read_features(paths, {name: spec.size(kind) for name, kind in spec.lengths.items()})


def read_features(paths, lengths):
    """Features of these lengths of all records of some files: dict from name to array `[n, length]`."""
    parts = [parse_examples(batch, lengths) for path in paths for batch in tfrecords.read_batches(path)]
    return {name: np.concatenate([part[name] for part in parts]) for name in lengths}


def list_unpacked(features):
    """The sequences of unpacked features, each as a tuple that a test can compare and sort."""
    found = []
    for row in range(len(features[schema.INPUT_IDS])):
        its = {name: values[row].tolist() for name, values in features.items()}
        length = sum(its[schema.INPUT_MASK])
        predictions = zip(*(its[name] for name in PREDICTIONS), strict=True)
        found.append(
            (
                tuple(its[schema.INPUT_IDS][:length]),
                tuple(its[schema.SEGMENT_IDS][:length]),
                tuple((position, label) for position, label, weight in predictions if weight),
                its[schema.NEXT_SENTENCE_LABELS][0],
            )
        )
    return found


def list_packed(features):
    """The sequences of packed features, pack after pack, by a loop over tokens: as `list_unpacked`."""
    found = []
    for row in range(len(features[schema.INPUT_IDS])):
        its = {name: np.asarray(values[row]).tolist() for name, values in features.items()}
        for sequence in range(1, max(its[schema.INPUT_MASK]) + 1):
            places = [place for place, owner in enumerate(its[schema.INPUT_MASK]) if owner == sequence]
            predictions = zip(*(its[name] for name in PREDICTIONS), strict=True)
            found.append(
                (
                    tuple(its[schema.INPUT_IDS][place] for place in places),
                    tuple(its[schema.SEGMENT_IDS][place] for place in places),
                    tuple((at - places[0], label) for at, label, weight in predictions if weight == sequence),
                    its[schema.NEXT_SENTENCE_LABELS][sequence - 1],
                )
            )
    return found
