"""Sources of a text in `--input_file`, files and weights, and the documents of each pass over them.

    "wiki/*.parquet:2,books/*.txt"     two sources: the documents of wiki/ are read twice as often

A source is a part between commas. Its *weight*, the number after its last colon, is the number of readings
of each document per pass over the text: any number above 0, by default 1. It is not a share of a mixture, as
in `interleave_datasets` of Hugging Face's `datasets`: a share would repeat documents by a hidden factor,
which depends on the sizes of all other sources. Overfitting depends on repetitions, and papers report these
("Language Models are Few-Shot Learners", arXiv:2005.14165, Table 2.2).

Four documents with 2, 5, 0 and 2 readings:

    passes 0 and 1    [0 1 3]
    passes 2, 3, 4    [1]

A pair is a pass (the *duplicate*, which determines segments and masks) and a document. Pairs are numbered
pass by pass and shuffled, but never stored. A random next sentence comes from another document of the same
pass, so that sources have the same proportions there as elsewhere.
"""

import dataclasses
import importlib.util
import os
import re

import numpy as np

from bert_packed.core import storage
from bert_packed.core.hub import pin_data_sets
from bert_packed.core.settings import InputError
from bert_packed.records.inputs import check_found, find_parts, match_files
from bert_packed.records.shuffle import shuffle_places
from data_gen.jobs.steps import read_array, write_array
from data_gen.text.corpus import is_separated, is_table

# Names such as 2024_01 are no numbers, though `float` reads them
WEIGHT = re.compile(
    r"(.*):([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf|infinity))", re.IGNORECASE | re.DOTALL
)
LARGEST_WEIGHT = 10**6  # more is a mistake, and would count readings beyond 64 bits
DATASET_STATE = "state.json"  # names the data files in a folder of `Dataset.save_to_disk`
SPLITS_OF_DATASET = "dataset_dict.json"  # a file in a folder of such folders


@dataclasses.dataclass(frozen=True)
class Source:
    """One part of `--input_file`."""

    pattern: str  # as given, without its weight
    weight: float  # readings of each document per pass
    paths: tuple[str, ...]  # sorted, without those that an earlier source has


def find_text_sources(pattern):
    """Find the sources of a text, and their files: list of `Source`, in the order of the pattern.

    Each part is a path or glob, or names folders of Hugging Face's `datasets`. Only a number after the last
    colon is a weight, unless a file has the whole part as its name:

        "a.txt:0.5"  "s3://b/c.txt"  "d:e.txt"  "f.txt:2" (a file, if there is one of that name)
    """
    found = []
    for part, paths in find_parts(pin_data_sets(pattern), "input_file", _match_texts):
        name, weight = (part, 1.0) if storage.is_file(part) else _split_weight(part)
        if not 0 < weight <= LARGEST_WEIGHT:  # nan is not either
            raise InputError(
                f"`input_file` must have weights above 0 and up to {LARGEST_WEIGHT}. Received: {part!r}."
            )
        found.append((name, weight, paths))
    owners = {}
    for index, (_, weight, paths) in enumerate(found):
        for path in paths:
            owner = owners.setdefault(_place(path), index)
            if found[owner][1] != weight:
                raise InputError(
                    "`input_file` must give each file one weight. Received: "
                    f"{path} with {found[owner][1]:g} and {weight:g}."
                )
    kept = check_found([path for *_, paths in found for path in paths], "input_file")
    _check_readers(kept)
    return [
        Source(name, weight, tuple(path for path in kept if owners[_place(path)] == index))
        for index, (name, weight, _) in enumerate(found)
    ]


def _split_weight(part):
    """(Part without its weight, weight), by default 1."""
    match = WEIGHT.fullmatch(part)
    return (match[1].rstrip(), float(match[2])) if match else (part, 1.0)


def _match_texts(part):
    if storage.is_file(part):
        return [part]
    pattern, _ = _split_weight(part)
    folders = [pattern] if storage.is_folder(pattern) else filter(storage.is_folder, storage.match(pattern))
    return [*match_files(pattern), *(path for folder in folders for path in _files_of_dataset(folder))]


def _files_of_dataset(folder):
    """The data files in a folder that `datasets` saved; [] for other folders."""
    if storage.is_file(os.path.join(folder, SPLITS_OF_DATASET)):
        names = [name for name in storage.list_names(folder) if storage.is_folder(os.path.join(folder, name))]
        raise InputError(
            "`input_file` must name one split of a saved data set. "
            f"Received: {folder}, which has {', '.join(names)}."
        )
    state = os.path.join(folder, DATASET_STATE)
    if not storage.is_file(state):
        return []
    try:
        names = [entry["filename"] for entry in storage.read_json(state)["_data_files"]]
        paths = [os.path.join(folder, name) for name in names]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{state} must list the data set's files. Received: {error!r}.") from error
    for path in paths:
        if not storage.is_file(path):
            raise InputError(f"{path} must be there, as {state} lists it. Received: no such file.")
    return paths


def _place(path):
    return path if storage.is_remote(path) else os.path.abspath(path)


def _check_readers(paths):
    """Raise `InputError` for tables without a reader, or without pyarrow."""
    if separated := [path for path in paths if is_separated(path)]:
        raise InputError(
            "`input_file` must be plain text, JSON lines (.jsonl) or Parquet (.parquet), the last two with "
            f"the text in `text`; commas, tabs and quotes would become words. Received: {separated[0]}."
        )
    tables = [path for path in paths if is_table(path)]
    if tables and importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            "`input_file` must be lines or JSON lines where pyarrow is not installed: "
            f"pip install 'bert_packed[arrow]'. Received: {tables[0]}."
        )


# These are the fifth numbers of random keys, as in `create_steps.py`
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
    write_array(_path(corpus_dir, split), np.stack([documents, readings]))


def load_passes(corpus_dir, split):
    return plan_passes(*read_array(_path(corpus_dir, split)))


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
