"""What the manifests beside the input files promise: their vocabulary and their numbers of records."""

import os

import numpy as np

from data_gen.output import read_manifest
from data_gen.settings import InputError

# Keys of a manifest that say which vocabulary the token ids belong to; packs inherit them.
VOCABULARY_KEYS = ("vocab_size", "vocab_sha256", "do_lower_case")


def read_input_manifests(files):
    """Read the manifests of the directories that hold `files`.

    Files from elsewhere have none, and then nothing is promised.

    Args:
        files: List of paths.

    Returns:
        Dict with those of `VOCABULARY_KEYS` that are known, and dict from path to its promised number of
        records.

    Raises:
        InputError: two directories have different vocabularies.
    """
    vocabulary, known_from, num_records = {}, None, {}
    for directory in sorted({os.path.dirname(path) or "." for path in files}):
        manifest = read_manifest(directory)
        if manifest is None:
            continue
        found = {key: manifest[key] for key in VOCABULARY_KEYS if key in manifest}
        if known_from is not None and found != vocabulary:
            raise InputError(
                f"all inputs must have one vocabulary. Received: {known_from}: {vocabulary}; "
                f"{directory}: {found}."
            )
        if known_from is None:
            vocabulary, known_from = found, directory
        for entry in _listed_files(manifest):
            num_records[os.path.join(directory, entry["name"])] = entry["num_records"]
    return vocabulary, {path: num_records[_key(path)] for path in files if _key(path) in num_records}


def check_num_records(path, received, promised):
    """Raise `InputError` where a file has another number of records than was promised; None = nobody did."""
    if promised is not None and promised != received:
        raise InputError(
            f"{path} must hold {promised} records, as the manifest.json beside it says. Received: {received}."
        )


def check_vocabulary(sequences, vocab_size):
    """Raise `InputError` where a token or label is outside a vocabulary.

    Args:
        sequences: `Sequences` of one batch.
        vocab_size: Number of ids, from 0; None where it is not known, and then nothing is checked.
    """
    if vocab_size is None:
        return
    for ids, offsets in (
        (sequences.tokens, sequences.offsets),
        (sequences.prediction_ids, sequences.prediction_offsets),
    ):
        if ids.max(initial=0) >= vocab_size:
            place = int(np.argmax(ids >= vocab_size))
            owner = int(np.searchsorted(offsets, place, side="right")) - 1
            raise InputError(
                f"{sequences.origin(owner)}: token ids must be below the vocab_size={vocab_size} that the "
                f"manifest.json beside it names. Received: {ids[place]}."
            )


def _key(path):
    return os.path.join(os.path.dirname(path) or ".", os.path.basename(path))


def _listed_files(manifest):
    """The file entries of a manifest, of packs or of splits."""
    groups = [manifest, *manifest.get("splits", {}).values()]
    return [entry for group in groups for entry in group.get("files", [])]
