"""Which files a flag such as `--input_file` means."""

import glob
import os

from data_gen.settings import InputError


def find_files(pattern, argument):
    """Find the files that comma-separated paths and globs name, as google-research/bert's flags do.

    Args:
        pattern: `"train-*.tfrecord,more/eval.tfrecord"`; `**` crosses folders. Folders are never matched.
        argument: Name of the flag, for messages.

    Returns:
        List of paths, sorted, each once.

    Raises:
        InputError: a part of the pattern matches no file, or a file has no bytes.
    """
    found = set()
    for part in (part.strip() for part in pattern.split(",")):
        # a file whose own name holds a bracket or a star is that file, not a glob
        paths = [part] if os.path.isfile(part) else glob.glob(part, recursive=True)
        files = [path for path in paths if os.path.isfile(path)]
        if not files:
            raise InputError(f"`{argument}` must match at least one file. Received: {part!r}.")
        found.update(files)
    for path in sorted(found):
        if os.path.getsize(path) == 0:
            raise InputError(f"`{argument}` must match files with content. Received: {path}, which is empty.")
    return sorted(found)
