"""The manifest of a directory of records, and the names of the files beside them."""

import os

from bert_packed.core import storage

MANIFEST_NAME = "manifest.json"
SCANS_NAME = ".scans.npz"  # of `file_scans.py`


def read_manifest(directory, any_json=False):
    """The `manifest.json` of a directory as a dict, or None where it has none; `InputError` if it is no JSON.

    With `any_json` it may be another program's: JSON that is no object counts as none, and is no mistake.
    """
    kind = object if any_json else dict
    content = storage.read_json(os.path.join(directory, MANIFEST_NAME), kind, default=None)
    return content if isinstance(content, dict) else None


def is_of_scans(name):
    """True if a name in a folder is that of the kept scans, or of what a killed write of them left."""
    return name == SCANS_NAME or (name.startswith(SCANS_NAME) and name.endswith(storage.PARTIAL_SUFFIX))


def listed_files(manifest):
    """The file entries of a manifest, of packs or of splits; other JSON has none."""
    splits = manifest.get("splits")
    groups = [manifest, *(dicts_in(list(splits.values())) if isinstance(splits, dict) else [])]
    entries = [entry for group in groups for entry in dicts_in(group.get("files"))]
    return [entry for entry in entries if isinstance(entry.get("name"), str)]


def dicts_in(values):
    """The dicts in a list; none where it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
