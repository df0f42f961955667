"""What the manifests beside the input files promise: their vocabulary, numbers of records and checksums."""

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
        Dict with those of `VOCABULARY_KEYS` that are known, and dict from path to what is promised of it:
        dict with `num_records` and `sha256`, where they are known.

    Raises:
        InputError: two directories have different vocabularies.
    """
    vocabulary, known_from, promised = {}, None, {}
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
            kept = {key: entry[key] for key in ("num_records", "sha256") if entry.get(key)}
            promised[os.path.join(directory, entry["name"])] = kept
    return vocabulary, {path: promised[_key(path)] for path in files if _key(path) in promised}


def check_promises(promised, path, num_records, sha256):
    """Raise `InputError` where a file is not what the manifest beside it says.

    The number of records finds files that lost whole ones, or have some twice, which their own checksums
    cannot tell; the checksum of the file finds all else.

    Args:
        promised: Of this file, as `read_input_manifests` returns it.
        path, num_records, sha256: The file, and what it is.
    """
    for rule, wanted, received in (
        ("hold {} records", promised.get("num_records"), num_records),
        ("have the SHA-256 {}", promised.get("sha256"), sha256),
    ):
        if wanted not in (None, received):
            raise InputError(
                f"{path} must {rule.format(wanted)}, as the manifest.json beside it says. "
                f"Received: {received}."
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
    entries = [entry for group in groups for entry in group.get("files", [])]
    # another program's manifest.json promises nothing that we know of
    return [entry for entry in entries if isinstance(entry, dict) and "name" in entry]
