"""A small text for tests, and its unpacked records read back."""

from pathlib import Path

import numpy as np
from unpacked_records import read_features

from bert_packed import schema
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen.text.create_config import CreateConfig

NUM_DOCUMENTS = 30


def write_text(folder):
    """A text in which every word names its document, and its vocabulary: two paths."""
    rng = np.random.default_rng(0)
    documents = [
        "\n".join(" ".join([f"doc{i}"] * rng.integers(1, 12)) for _ in range(rng.integers(1, 30)))
        for i in range(NUM_DOCUMENTS)
    ]
    path = folder / "text.txt"
    path.write_text("\n\n".join(documents))
    vocab = folder / "words.txt"
    vocab.write_text("\n".join([*SPECIAL_TOKENS, *(f"doc{i}" for i in range(NUM_DOCUMENTS))]))
    return path, vocab


def make_config(text, output_dir, **settings):
    path, vocab = text
    defaults = {"max_seq_length": 32, "dupe_factor": 2, "num_workers": 1, "num_shards": 3}
    files = {"input_file": str(path), "vocab_file": str(vocab), "output_dir": str(output_dir)}
    return CreateConfig(**{**defaults, **files, **settings})


def read_split(folder, split, length=32, num_predictions=5):
    """All features of a split: dict from name to array `[n, length]`."""
    lengths = {"S": length, "P": num_predictions, 1: 1}
    wanted = {name: lengths[kind] for name, kind in schema.UNPACKED_LENGTHS.items()}
    return read_features(sorted(Path(folder).glob(f"{split}-*.tfrecord")), wanted)


def restore(features):
    """`input_ids` with the labels back in place."""
    ids = features[schema.INPUT_IDS].copy()
    rows, slots = np.nonzero(features[schema.MASKED_LM_WEIGHTS])
    ids[rows, features[schema.MASKED_LM_POSITIONS][rows, slots]] = features[schema.MASKED_LM_IDS][rows, slots]
    return ids


def count_words(features):
    """Uses of each document's word in its own sequences, and as random nexts: two int `[NUM_DOCUMENTS]`."""
    words = restore(features) - len(SPECIAL_TOKENS)
    is_borrowed = features[schema.SEGMENT_IDS] * features[schema.NEXT_SENTENCE_LABELS] == 1
    own, borrowed = words[~is_borrowed], words[is_borrowed]
    return [np.bincount(some[some >= 0], minlength=NUM_DOCUMENTS) for some in (own, borrowed)]
