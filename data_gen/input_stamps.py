"""Whether an input file is still the one that a run began with: by its size and when it last changed."""

import contextlib

from data_gen import files
from data_gen.settings import InputError


def stamp_files(paths):
    """What files are now: list of [path, bytes, time of the last change in nanoseconds], plain JSON."""
    return [[path, *files.size_and_time(path)] for path in paths]


@contextlib.contextmanager
def unchanged(stamps):
    """Read files in the block, and know that all of it was read of the files as they were stamped.

        with unchanged([["a.txt", 4711, 1700000000000000000]]):
            checksum = file_sha256("a.txt")     of the file that the stamp is of

    Args:
        stamps: Some of what `stamp_files` returned.

    Raises:
        InputError: a file has changed since it was stamped, or was replaced or changed during the block. It
            comes in place of an `InputError` of the block, which half-changed files may cause.
    """
    inodes = {path: files.inode(path) for path, _, _ in stamps}
    _check(stamps, inodes)
    try:
        yield
    except InputError:
        _check(stamps, inodes)
        raise
    _check(stamps, inodes)


def _check(stamps, inodes):
    for path, size, time in stamps:
        now_size, now_time = files.size_and_time(path)
        if (now_size, now_time, files.inode(path)) != (size, time, inodes[path]):
            received = f"{now_size} bytes, before {size}" if now_size != size else "a change, or another file"
            raise InputError(f"{path} must stay as it is while it is read. Received: {received}.")
