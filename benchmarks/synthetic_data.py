"""Unpacked records of random tokens, as many as asked for and as long as Wikipedia's: input of benchmarks."""

import os

import numpy as np

from bert_packed import schema
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples

VOCAB_SIZE = 30522
FIRST_WORD = 999  # below stand the special tokens of BERT's vocabulary
FULL_RATE = 0.4  # share of sequences that fill S; Wikipedia at 512 has about as many
MIN_LENGTH = 12
BATCH = 2048


def draw_lengths(rng, num_sequences, max_seq_length):
    """Random lengths: many full, the others spread over all."""
    spread = (rng.beta(1.2, 1.2, num_sequences) * max_seq_length).astype(np.int64)
    spread = np.clip(spread, min(MIN_LENGTH, max_seq_length), max_seq_length)
    return np.where(rng.random(num_sequences) < FULL_RATE, max_seq_length, spread)


def write_sequences(folder, num_sequences, max_seq_length, num_files=4, seed=0, draw=draw_lengths):
    """Write unpacked records into `folder`; returns the paths.

    Args:
        folder: Made where it is missing.
        num_sequences, max_seq_length: How many, and the most tokens in one.
        num_files: Files to spread them over.
        seed: Whole number.
        draw: Function `(rng, num_sequences, max_seq_length)` to int64 lengths.
    """
    os.makedirs(folder, exist_ok=True)
    paths = []
    for index in range(num_files):
        rng = np.random.default_rng((seed, index))
        count = num_sequences * (index + 1) // num_files - num_sequences * index // num_files
        paths.append(os.path.join(folder, f"sequences-{index:05d}-of-{num_files:05d}.tfrecord"))
        tfrecords.write_records(paths[-1], _serialize(rng, count, max_seq_length, draw))
    return paths


def _serialize(rng, num_sequences, max_seq_length, draw):
    room = schema.default_predictions(max_seq_length)
    columns = np.arange(max_seq_length)
    for start in range(0, num_sequences, BATCH):
        size = min(BATCH, num_sequences - start)
        lengths = draw(rng, size, max_seq_length)[:, None]
        is_token = columns < lengths
        num_predictions = np.clip(np.round(0.15 * lengths).astype(np.int64), 1, room)
        is_used = np.arange(room) < num_predictions
        positions = 1 + np.arange(room) * (lengths - 1) // num_predictions
        yield from serialize_examples(
            {
                schema.INPUT_IDS: rng.integers(FIRST_WORD, VOCAB_SIZE, is_token.shape) * is_token,
                schema.INPUT_MASK: is_token.astype(np.int64),
                schema.SEGMENT_IDS: (is_token & (columns >= lengths // 2)).astype(np.int64),
                schema.MASKED_LM_POSITIONS: np.where(is_used, positions, 0),
                schema.MASKED_LM_IDS: rng.integers(FIRST_WORD, VOCAB_SIZE, is_used.shape) * is_used,
                schema.MASKED_LM_WEIGHTS: is_used.astype(np.float32),
                schema.NEXT_SENTENCE_LABELS: rng.integers(0, 2, (size, 1)),
            }
        )
