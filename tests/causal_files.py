"""Small files for causal language modelling, written and read by plain loops: no packing code is used."""

import numpy as np
from unpacked_records import example, read_records

from bert_packed import schema
from bert_packed.records import tfrecords
from bert_packed.records.examples import Example


def make_sequence(rng, length, goes_on=False, vocab_size=300):
    """A sequence of random tokens, id 0 among them: dict of lists, as an unpacked record has it."""
    tokens = rng.integers(0, vocab_size, length + 1).tolist()
    mask = [1] * length if goes_on else [1] * (length - 1) + [0]
    num_bytes = [int(rng.integers(0, 9)) * has_label for has_label in mask]
    return {
        schema.INPUT_IDS: tokens[:-1],
        schema.LABEL_IDS: [token * has_label for token, has_label in zip(tokens[1:], mask, strict=True)],
        schema.LABEL_MASK: mask,
        schema.LABEL_BYTES: num_bytes,
        schema.NUM_BYTES: [sum(num_bytes)],
    }


def make_sequences(lengths, seed=0, vocab_size=300):
    """Sequences of these lengths, of which every third goes on in another."""
    rng = np.random.default_rng(seed)
    return [make_sequence(rng, length, number % 3 == 2, vocab_size) for number, length in enumerate(lengths)]


def write_sequences(path, sequences):
    """Write dicts of lists as one TFRecord file; returns the path as text."""
    tfrecords.write_records(path, [example(features) for features in sequences])
    return str(path)


def write_causal(path, lengths, seed=0):
    """Write `make_sequences`; returns the path as text."""
    return write_sequences(path, make_sequences(lengths, seed))


def read_examples(paths):
    """The records of files, in order: list of dicts of lists."""
    found = []
    for path in sorted(map(str, paths)):
        for record in read_records(path):
            features = Example.FromString(record).features.feature
            found.append(
                {
                    name: list(getattr(value, value.WhichOneof("kind") or "int64_list").value)
                    for name, value in features.items()
                }
            )
    return found


def sequences_of(pack):
    """The sequences of a pack, or parts of them, slot after slot: list of dicts of lists."""
    found = []
    for slot in range(1, max(pack[schema.INPUT_MASK], default=0) + 1):
        places = [place for place, owner in enumerate(pack[schema.INPUT_MASK]) if owner == slot]
        part = {
            name: [pack[name][place] for place in places]
            for name in (schema.INPUT_IDS, schema.LABEL_IDS, schema.POSITION_IDS)
        }
        part[schema.LABEL_MASK] = [int(pack[schema.LABEL_MASK][place] == slot) for place in places]
        part[schema.NUM_BYTES] = [pack[schema.SEQUENCE_BYTES][slot - 1]]
        assert pack[schema.SEQUENCE_WEIGHTS][slot - 1] == 1
        found.append(part)
    return found
