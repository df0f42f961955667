"""Files that a command writes beside its work, where a flag names one: its tables as JSON, its picture."""

import json
import os
import tempfile
from pathlib import Path

from bert_packed.core.settings import InputError

OUTPUT_FLAGS = ("json", "picture", "markdown")  # in every command that has them

TRIAL_SUFFIX = 24 * "0" + ".partial"  # a file that is half-written has a longer name by as much


def check_output_file(flag, path):
    """Raise `InputError` where a file could not be written: now, not when the work is done.

    Nothing is left behind, and nothing that is there changes.

    Args:
        flag: Name of the flag that `path` was given to.
        path: Of a local file; "" for none.
    """
    if not path:
        return
    rule = f"`{flag}` must be a file to write. Received: {path!r}"
    if "://" in path:
        raise InputError(f"{rule}, a URL.")
    if os.path.exists(path) and not os.path.isfile(path):  # a device would be replaced, as a file is
        raise InputError(f"{rule}, {'a directory' if os.path.isdir(path) else 'no file'}.")
    if not os.path.basename(path):
        raise InputError(f"{rule}, a directory.")
    folder = Path(path).absolute().parent
    while not folder.exists():  # those that are missing are made with the file
        folder = folder.parent
    try:
        # by trying: what a folder's mode says is not true for everyone, nor on every file system
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{Path(path).name}.", suffix=TRIAL_SUFFIX):
            pass
    except OSError as error:
        raise InputError(f"{rule}: {error.strerror} in {folder}.") from error


def write_json(path, content):
    """Write JSON under its final name only when complete, and the folders that it lacks."""
    partial = Path(f"{path}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())  # else a power loss may leave the new name on an empty file
    partial.replace(path)
