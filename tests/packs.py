"""Small batches for tests: the same sequences packed and unpacked, built by a plain loop.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack.
"""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples

VOCAB_SIZE = 31


@dataclasses.dataclass
class Sequence:
    """One BERT input: equally long `tokens` and `token_types`, predictions, and the next-sentence label."""

    tokens: list
    token_types: list
    prediction_positions: list
    prediction_ids: list
    nsp_label: int


def random_sequence(rng, length, num_predictions=None):
    """A sequence of random tokens with random predictions (1 to length // 3 unless given)."""
    if num_predictions is None:
        num_predictions = int(rng.integers(1, max(2, length // 3)))
    split = int(rng.integers(1, length)) if length > 1 else 1
    return Sequence(
        tokens=rng.integers(1, VOCAB_SIZE, length).tolist(),
        token_types=[0] * split + [1] * (length - split),
        prediction_positions=sorted(rng.permutation(length)[:num_predictions].tolist()),
        prediction_ids=rng.integers(1, VOCAB_SIZE, num_predictions).tolist(),
        nsp_label=int(rng.integers(2)),
    )


FLOATS = {"prediction_sequences", "slot_weights"}


def batch_of(packs, max_seq_length, num_slots, num_predictions):
    """The batch dict of a list of packs, each a list of `Sequence`."""
    spec = schema.PackSpec(max_seq_length, num_slots, num_predictions)
    batch = {
        BATCH_NAMES[name]: np.zeros(
            (len(packs), *spec.shape(name)), "f4" if BATCH_NAMES[name] in FLOATS else "i4"
        )
        for name in schema.PACKED_LENGTHS
    }
    for row, pack in enumerate(packs):
        start = used = 0
        for slot, sequence in enumerate(pack):
            place = slice(start, start + len(sequence.tokens))
            batch["token_ids"][row, place] = sequence.tokens
            batch["sequence_ids"][row, place] = slot + 1
            batch["token_type_ids"][row, place] = sequence.token_types
            batch["position_ids"][row, place] = range(len(sequence.tokens))
            for position, label in zip(sequence.prediction_positions, sequence.prediction_ids, strict=True):
                batch["prediction_positions"][row, used] = start + position
                batch["prediction_ids"][row, used] = label
                batch["prediction_sequences"][row, used] = slot + 1
                used += 1
            batch["cls_positions"][row, slot] = start
            batch["nsp_labels"][row, slot] = sequence.nsp_label
            batch["slot_weights"][row, slot] = 1
            start = place.stop
    return batch


def packed_and_unpacked(seed=0, max_seq_length=24):
    """Two batches of the same sequences: five packs that hold 4, 3, 1, 2 and 1, and eleven packs of one.

    One sequence has no prediction, one pack is full, the others end in padding.
    """
    rng = np.random.default_rng(seed)
    lengths = [[3, 9, 4, 8], [5, 6, 10], [20], [2, 17], [1]]
    packs = [[random_sequence(rng, length) for length in pack] for pack in lengths]
    packs[1][0] = random_sequence(rng, 5, num_predictions=0)
    sequences = [[sequence] for pack in packs for sequence in pack]
    assert sum(len(pack) > 1 for pack in packs) == 3
    packed = batch_of(packs, max_seq_length, num_slots=4, num_predictions=12)
    unpacked = batch_of(sequences, max_seq_length, num_slots=1, num_predictions=8)
    return packed, unpacked


def random_packs(rng, num_packs, max_seq_length, max_sequences=4):
    """Packs of one to four random sequences that fit `max_seq_length`."""
    packs = []
    for _ in range(num_packs):
        lengths = rng.integers(
            3, max_seq_length // max_sequences + 1, int(rng.integers(1, max_sequences + 1))
        )
        packs.append([random_sequence(rng, int(length)) for length in lengths])
    return packs


def write_packs(path, packs, max_seq_length, num_slots=4, num_predictions=12):
    """Write packs as a packed TFRecord file, in the layout of `schema.py`."""
    batch = batch_of(packs, max_seq_length, num_slots, num_predictions)
    features = {name: batch[ours] for name, ours in BATCH_NAMES.items()}
    return tfrecords.write_records(path, serialize_examples(features))
