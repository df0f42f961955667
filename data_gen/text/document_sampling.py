"""Splits of the documents, and the documents of each pass over the text, by the weights of their sources.

Three documents that are to be read twice, 5 times and not at all, and a fourth, twice:

    passes 0 and 1    [0 1 3]
    passes 2, 3, 4    [1]

A pair is a pass (the *duplicate*: it chooses segments and masks) and a document. Pairs are numbered, pass
after pass, and shuffled; they are never stored. A random next sentence comes from another document of the
same pass, so that sources are mixed in them as they are everywhere else.
"""

import dataclasses
import os

import numpy as np

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.shuffle import shuffle_places

# Fifth numbers of random keys, as in `create_steps.py`
SHUFFLE_PAIRS, CHOOSE_EVAL, CHOOSE_READINGS = 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes, one after the other, that read the same documents."""

    first: int  # number of the first of them
    num_passes: int
    documents: np.ndarray  # int64 [d], ascending

    @property
    def num_pairs(self):
        return self.num_passes * len(self.documents)


def split_documents(num_documents, eval_fraction, seed):
    """Choose the documents of each split.

    Returns:
        Dict from "train" and, where `eval_fraction` is not 0, "eval" to document numbers, ascending, int64.

    Raises:
        InputError: there is one document, and both splits need one.
    """
    if not eval_fraction:
        return {"train": np.arange(num_documents)}
    if num_documents < 2:
        raise InputError(f"`eval_fraction` must be 0 for a text of one document. Received: {eval_fraction}.")
    num_eval = max(1, round(num_documents * eval_fraction))
    places = shuffle_places(np.arange(num_documents), num_documents, (seed, 0, 0, 0, CHOOSE_EVAL))
    return {"train": np.flatnonzero(places >= num_eval), "eval": np.flatnonzero(places < num_eval)}


def choose_readings(sources, weights, num_passes, seed):
    """Choose the number of readings of each document.

        weight 2.5 in one pass, four documents of the source   ->   for instance [2 3 3 2]

    Every document of a source is read `num_passes` times its weight, rounded down. Where that leaves a rest,
    that share of the source's documents, to the nearest whole number and by the seed, is read once more.

    Of `sources`, int `[d]`, the source of each document: int64 `[d]`.
    """
    readings = np.zeros(len(sources), np.int64)
    for index, weight in enumerate(weights):
        of_source = np.flatnonzero(sources == index)
        num_documents, least = len(of_source), int(num_passes * weight)
        num_more = round((num_passes * weight - least) * num_documents)
        key = (seed, index, 0, 0, CHOOSE_READINGS)
        readings[of_source] = least + (
            shuffle_places(np.arange(num_documents), num_documents, key) < num_more
        )
    return readings


def save_readings(corpus_dir, split, documents, readings):
    """Write the documents of a split, int64 `[d]`, ascending, and the readings of each, beside the corpus."""
    with storage.write_whole(_path(corpus_dir, split)) as partial, storage.open_file(partial, "wb") as file:
        np.save(file, np.stack([documents, readings]))


def load_passes(corpus_dir, split):
    """`plan_passes` of what `save_readings` wrote."""
    with storage.open_file(_path(corpus_dir, split)) as file:
        return plan_passes(*np.load(file))


def plan_passes(documents, readings):
    """Passes that read documents as often as `readings` says: list of `Passes`, each with fewer documents."""
    passes, first = [], 0
    for num_readings in np.unique(readings[readings > 0]).tolist():
        passes.append(Passes(first, num_readings - first, documents[readings >= num_readings]))
        first = num_readings
    return passes


def shuffled_pairs(first, last, passes, seed, split_index):
    """Draw the pairs of a split at places `first` to `last` of the shuffle, those of equal passes together.

    Returns:
        List of int64 `[m, 2]`, pairs (duplicate, document), and int64 `[d]`, the documents of which random
        nexts come for these: those of their passes, or of the first ones where that would be one alone.
    """
    bounds = np.cumsum([0, *(some.num_pairs for some in passes)])
    key = (seed, split_index, 0, 0, SHUFFLE_PAIRS)
    places = shuffle_places(np.arange(first, last), bounds[-1], key)
    found = []
    for some, begin, end in zip(passes, bounds[:-1], bounds[1:], strict=True):
        own = places[(places >= begin) & (places < end)] - begin
        duplicates, indices = np.divmod(own, len(some.documents))
        pairs = np.stack([some.first + duplicates, some.documents[indices]], axis=1)
        found.append((pairs, some.documents if len(some.documents) > 1 else passes[0].documents))
    return found


def _path(corpus_dir, split):
    return os.path.join(corpus_dir, f"{split}_documents.npy")
