"""The manifest of a directory of records, and the names of the files beside them."""

import json
import os

from bert_packed.core import files
from bert_packed.core.settings import InputError

MANIFEST_NAME = "manifest.json"
SCANS_NAME = ".scans.npz"  # of `kept_scans.py`


def read_manifest(directory, any_json=False):
    """The `manifest.json` of a directory as a dict, or None where it has none.

    Args:
        directory: Path.
        any_json: Whether it may be another program's: JSON that is no object counts as none then.

    Raises:
        InputError: the file is not JSON, or not an object without `any_json`.
    """
    path = os.path.join(directory, MANIFEST_NAME)
    try:
        content = json.loads(files.read_text(path))
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise InputError(f"{path} must be JSON of few levels. Received: lists within lists.") from error
    except ValueError as error:  # no JSON, no text, or a number of thousands of digits
        raise InputError(f"{path} must be JSON. Received: {error}.") from error
    if not isinstance(content, dict):
        if any_json:
            return None
        raise InputError(f"{path} must be a JSON object. Received: {type(content).__name__}.")
    return content


def is_of_scans(name):
    """Whether a name in a folder is that of the kept scans, or of what a killed write of them left."""
    return name == SCANS_NAME or (name.startswith(SCANS_NAME) and name.endswith(files.PARTIAL_SUFFIX))
