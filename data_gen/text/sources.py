"""The sources of a text that `--input_file` names: files and weights.

    "wiki/*.parquet:2,books/*.txt"     two sources: the documents of wiki/ are read twice as often

A source is a part between commas. Its *weight*, the number behind its last colon, is the number of readings
of each document in every pass over the text: 1 where there is none, any number above 0. It is no share of a
mixture, as in `interleave_datasets` of Hugging Face's `datasets`. Data are made once: a share would drop
or repeat documents by a factor that nobody sees and that changes with the size of every other source. And
overfitting depends on repetitions, which papers report (the epochs of each data set in "Language Models are
Few-Shot Learners", arXiv:2005.14165, Table 2.2). The manifest counts documents and readings of each source.
"""

import dataclasses
import importlib.util
import os
import re

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.inputs import check_found, find_parts, match_files
from data_gen.text.corpus import is_table

WEIGHT = re.compile(
    r"(.*):([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf|infinity))", re.IGNORECASE | re.DOTALL
)
LARGEST_WEIGHT = 10**6  # more is a mistake, and would count readings beyond 64 bits
DATASET_STATE = "state.json"  # in a folder that `Dataset.save_to_disk` wrote: which files are its data
SPLITS_OF_DATASET = "dataset_dict.json"  # in a folder of such folders


@dataclasses.dataclass(frozen=True)
class Source:
    """One part of `--input_file`."""

    pattern: str  # as it was given, without its weight
    weight: float  # readings of each document in every pass
    paths: tuple[str, ...]  # sorted, without those that an earlier source has


def find_text_sources(pattern):
    """Find the sources of a text, and their files.

    Each part is a path or glob, as in `records/inputs.find_files`, or names folders of Hugging Face's
    `datasets`. Only a number behind its last colon is a weight; what is a file's whole name is that file:

        "a.txt:0.5"  "s3://b/c.txt"  "d:e.txt"  "f.txt:2" (one file, where there is one of that name)

    Returns:
        List of `Source`, in the order of the pattern.

    Raises:
        InputError: as `find_files`; a weight is not above 0, or over `LARGEST_WEIGHT`; a file has two
            weights; a folder holds several splits, or lacks files; pyarrow is not installed for a table.
    """
    found = []
    for part, paths in find_parts(pattern, "input_file", _match_texts):
        name, weight = (part, 1.0) if storage.is_file(part) else _split_weight(part)
        if not 0 < weight <= LARGEST_WEIGHT:  # which nan is not either
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
    """A part without its weight, and that: 1 where there is none."""
    match = WEIGHT.fullmatch(part)
    return (match[1].rstrip(), float(match[2])) if match else (part, 1.0)


def _match_texts(part):
    """The files that a part names, with those of the data sets whose folders it names."""
    if storage.is_file(part):
        return [part]
    pattern, _ = _split_weight(part)
    folders = [pattern] if storage.is_folder(pattern) else filter(storage.is_folder, storage.match(pattern))
    return [*match_files(pattern), *(path for folder in folders for path in _files_of_dataset(folder))]


def _files_of_dataset(folder):
    """The data files in a folder that `datasets` saved; none in any other."""
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
    """One spelling of a path, for all that name the same."""
    return path if storage.is_remote(path) else os.path.abspath(path)


def _check_readers(paths):
    """Raise `InputError` for a table where its reader is not installed."""
    tables = [path for path in paths if is_table(path)]
    if tables and importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            "`input_file` must be lines or JSON lines where pyarrow is not installed: "
            f"pip install 'bert_packed[arrow]'. Received: {tables[0]}."
        )
