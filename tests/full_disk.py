"""A disk that takes no more, for what the body of a `with` writes."""

import contextlib
import resource


@contextlib.contextmanager
def largest_file(num_bytes):
    """Let no file of this process grow past a size: it then has what EFBIG says, as ENOSPC no file name."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
