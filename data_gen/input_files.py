"""Which files a flag such as `--input_file` means."""

from data_gen import files
from data_gen.provenance import SUFFIX
from data_gen.settings import InputError


def find_files(pattern, argument):
    """Find the files that comma-separated paths and globs name, as google-research/bert's flags do.

    Args:
        pattern: `"train-*.tfrecord,more/eval.tfrecord"`; `**` crosses folders. A glob matches no folder, and
            none of our own indexes, which `--provenance` leaves beside records.
        argument: Name of the flag, for messages.

    Returns:
        List of paths, sorted, each once.

    Raises:
        InputError: a part of the pattern matches no file, or a file has no bytes.
    """
    found = set()
    for part in (part.strip() for part in pattern.split(",")):
        # a file whose own name holds a bracket or a star is that file, not a glob
        is_name = files.is_file(part)
        paths = [part] if is_name else files.match(part)
        paths = [path for path in paths if files.is_file(path) and (is_name or not path.endswith(SUFFIX))]
        if not paths:
            raise InputError(f"`{argument}` must match at least one file. Received: {part!r}.")
        found.update(paths)
    for path in sorted(found):
        if files.size_and_time(path)[0] == 0:
            raise InputError(f"`{argument}` must match files with content. Received: {path}, which is empty.")
    return sorted(found)
