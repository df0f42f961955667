"""Splits of the documents, and the documents of each pass over the text, by the weights of their sources.

Four documents with 2, 5, 0 and 2 readings:

    passes 0 and 1    [0 1 3]
    passes 2, 3, 4    [1]

A pair is a pass (the *duplicate*, which determines segments and masks) and a document. Pairs are numbered
pass by pass and shuffled, but never stored. A random next sentence comes from another document of the same
pass, so that sources have the same proportions there as elsewhere.
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
    """Consecutive passes over the same documents."""

    first: int  # number of the first pass
    num_passes: int
    documents: np.ndarray  # int64 [d], ascending

    @property
    def num_pairs(self):
        return self.num_passes * len(self.documents)


def split_documents(num_documents, eval_fraction, seed):
    """Split documents: dict from "train" and, unless `eval_fraction` is 0, "eval" to int64, ascending.

    Raises `InputError` for a single document, if both splits need one.
    """
    if not eval_fraction:
        return {"train": np.arange(num_documents)}
    if num_documents < 2:
        raise InputError(f"`eval_fraction` must be 0 for a text of one document. Received: {eval_fraction}.")
    num_eval = max(1, round(num_documents * eval_fraction))
    places = shuffle_places(np.arange(num_documents), num_documents, (seed, 0, 0, 0, CHOOSE_EVAL))
    return {"train": np.flatnonzero(places >= num_eval), "eval": np.flatnonzero(places < num_eval)}


def choose_readings(sources, weights, num_passes, seed):
    """Choose the number of readings of each document: int64 `[d]`, from `sources`, int `[d]`.

        weight 2.5 in one pass, four documents of the source   ->   for instance [2 3 3 2]

    Each document is read `num_passes` times its source's weight, rounded down. Where that has a fraction,
    that share of the source's documents, rounded to an integer and chosen by the seed, is read once more.
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
    """Write a split's documents, int64 `[d]`, ascending, and their readings, beside the corpus."""
    with storage.write_whole(_path(corpus_dir, split)) as partial, storage.open_file(partial, "wb") as file:
        np.save(file, np.stack([documents, readings]))


def load_passes(corpus_dir, split):
    """`plan_passes` for the file of `save_readings`."""
    with storage.open_file(_path(corpus_dir, split)) as file:
        return plan_passes(*np.load(file))


def plan_passes(documents, readings):
    """Passes in which each document has its `readings`: list of `Passes`, each with fewer documents."""
    passes, first = [], 0
    for num_readings in np.unique(readings[readings > 0]).tolist():
        passes.append(Passes(first, num_readings - first, documents[readings >= num_readings]))
        first = num_readings
    return passes


def shuffled_pairs(first, last, passes, seed, split_index):
    """The pairs of a split at places `first` to `last` of the shuffle, grouped by `passes`.

    Returns a list of (int64 `[m, 2]`, pairs of duplicate and document; int64 `[d]`, the documents from which
    their random nexts come). The latter are those of their passes, or of the first ones if their own have
    only one.
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
