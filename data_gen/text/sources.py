"""The sources of a text in `--input_file`: files and weights.

    "wiki/*.parquet:2,books/*.txt"     two sources: the documents of wiki/ are read twice as often

A source is a part between commas. Its *weight*, the number after its last colon, is the number of readings
of each document per pass over the text: any number above 0, by default 1. It is not a share of a mixture, as
in `interleave_datasets` of Hugging Face's `datasets`: a share would repeat documents by a hidden factor,
which depends on the sizes of all other sources. Overfitting depends on repetitions, and papers report these
("Language Models are Few-Shot Learners", arXiv:2005.14165, Table 2.2).
"""

import dataclasses
import importlib.util
import os
import re

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.inputs import check_found, find_parts, match_files
from data_gen.text.corpus import is_separated, is_table

WEIGHT = re.compile(
    r"(.*):([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf|infinity))", re.IGNORECASE | re.DOTALL
)
LARGEST_WEIGHT = 10**6  # more is a mistake, and would count readings beyond 64 bits
DATASET_STATE = "state.json"  # in a folder of `Dataset.save_to_disk`: names its data files
SPLITS_OF_DATASET = "dataset_dict.json"  # in a folder of such folders


@dataclasses.dataclass(frozen=True)
class Source:
    """One part of `--input_file`."""

    pattern: str  # as given, without its weight
    weight: float  # readings of each document per pass
    paths: tuple[str, ...]  # sorted, without those that an earlier source has


def find_text_sources(pattern):
    """Find the sources of a text, and their files: list of `Source`, in the order of the pattern.

    Each part is a path or glob, as in `records/inputs.find_files`, or names folders of Hugging Face's
    `datasets`. Only a number after the last colon is a weight, unless a file has the whole part as its name:

        "a.txt:0.5"  "s3://b/c.txt"  "d:e.txt"  "f.txt:2" (a file, if there is one of that name)

    Raises:
        InputError: as `find_files`; a weight is not above 0, or over `LARGEST_WEIGHT`; a file has two
            weights; a folder holds several splits, or lacks files; a file is a .csv or .tsv; pyarrow is not
            installed for a table.
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
    """(Part without its weight, weight), by default 1."""
    match = WEIGHT.fullmatch(part)
    return (match[1].rstrip(), float(match[2])) if match else (part, 1.0)


def _match_texts(part):
    """The files that a part names, directly or by folders of data sets."""
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
