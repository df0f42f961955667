"""How many packs a process encodes and writes per second, from arrays to a TFRecord file."""

import tempfile
import time

import numpy as np

from benchmarks.plain_packing import serialize
from benchmarks.synthetic_data import FIRST_WORD, VOCAB_SIZE
from bert_packed import schema
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples

PLAIN_SHARE = 8  # the plain way is measured on this part of the packs: it is as slow for few as for many


def make_packs(num_packs, max_seq_length, depth, seed=0):
    """Arrays of random packs with `depth` sequences each, as `assemble_packs` returns them."""
    rng = np.random.default_rng(seed)
    room = schema.default_predictions(max_seq_length) + depth - 1
    ends = np.sort(rng.integers(0, max_seq_length, (num_packs, depth - 1)), axis=1)
    columns = np.arange(max_seq_length)
    owners = 1 + (columns >= ends[:, :, None]).sum(axis=1)
    starts = np.concatenate([np.zeros((num_packs, 1), np.int64), ends], axis=1)
    arrays = {
        schema.INPUT_IDS: rng.integers(FIRST_WORD, VOCAB_SIZE, (num_packs, max_seq_length)),
        schema.INPUT_MASK: owners,
        schema.SEGMENT_IDS: columns % 2 * np.ones_like(owners),
        schema.POSITION_IDS: columns - np.take_along_axis(starts, owners - 1, axis=1),
        schema.MASKED_LM_POSITIONS: np.sort(rng.integers(0, max_seq_length, (num_packs, room)), axis=1),
        schema.MASKED_LM_IDS: rng.integers(FIRST_WORD, VOCAB_SIZE, (num_packs, room)),
        schema.MASKED_LM_WEIGHTS: np.ones((num_packs, room)),
        schema.NEXT_SENTENCE_POSITIONS: starts,
        schema.NEXT_SENTENCE_LABELS: rng.integers(0, 2, (num_packs, depth)),
        schema.NEXT_SENTENCE_WEIGHTS: np.ones((num_packs, depth)),
    }
    return {
        name: values.astype(np.float32 if name in schema.FLOAT_FEATURES else np.int32)
        for name, values in arrays.items()
    }


def measure_batched(arguments):
    """Packs per second of this process, `serialize_examples`; it starts when all processes are ready.

    Args:
        arguments: Rounds, packs of a round, S, K, and a barrier of all processes.
    """
    num_rounds, num_packs, max_seq_length, depth, barrier = arguments
    arrays = make_packs(num_packs, max_seq_length, depth)

    def encode():
        for _ in range(num_rounds):
            yield from serialize_examples(arrays)

    return num_rounds * num_packs / _time_writing(encode, barrier)


def measure_plain(arguments):
    """As `measure_batched`, with one `tf.train.Example` at a time."""
    num_rounds, num_packs, max_seq_length, depth, barrier = arguments
    num_packs = max(1, num_rounds * num_packs // PLAIN_SHARE)
    arrays = make_packs(num_packs, max_seq_length, depth)

    def encode():
        for row in range(num_packs):
            yield serialize({name: values[row].tolist() for name, values in arrays.items()})

    return num_packs / _time_writing(encode, barrier)


def _time_writing(encode, barrier):
    with tempfile.NamedTemporaryFile(suffix=".tfrecord") as file:
        tfrecords.write_records(file.name, [b"warm"])
        barrier.wait()
        start = time.perf_counter()
        tfrecords.write_records(file.name, encode())
        return time.perf_counter() - start
