"""Local processes that work for this one, and end with it."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from concurrent import futures

STATUS_ORPHANED = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of the C library's malloc.h
MAX_MMAP_THRESHOLD = 2**25  # bytes; it takes no more
KEPT_BYTES = 2**31 - 1


def start_workers(number, prepare=None, *arguments):
    """A pool of processes that leave Ctrl-C to this one, which reports it once, and end with it.

    Without the second, the workers of a killed run would go on writing beside those of the next.

    Args:
        number: Processes.
        prepare: Function that each calls first, with `arguments`; both can be pickled.

    Returns:
        `ProcessPoolExecutor`.
    """
    # Spawned, not forked: TensorFlow's and the tokenizer's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    return futures.ProcessPoolExecutor(number, context, _begin, (prepare, *arguments))


@contextlib.contextmanager
def telling_lost_workers():
    """Raise `OSError` where a worker of the block's pool was killed."""
    try:
        yield
    except futures.process.BrokenProcessPool as error:
        raise OSError("a worker process ended without a word, as when the system is out of memory") from error


def keep_freed_memory():
    """Let this process keep memory that it frees, for what it takes next.

    Arrays of some megabytes, taken and freed many times a second, otherwise go back to the system each time,
    which hands them out again page by page: a tenth of the time that packing takes. The most that a process
    holds at once stays the same. Only the C library of most Linux systems can be told so.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        tell = ctypes.CDLL(None).mallopt
        tell(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        tell(M_TRIM_THRESHOLD, KEPT_BYTES)


def _begin(prepare, *arguments):
    keep_freed_memory()
    if prepare:
        prepare(*arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    with contextlib.suppress(OSError):
        multiprocessing.parent_process().join()
    os._exit(STATUS_ORPHANED)
