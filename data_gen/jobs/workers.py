"""Local processes that work for this one, and end with it."""

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent import futures

from bert_packed.core.freed_memory import LARGE_ARRAYS, keep_freed_memory

STATUS_ORPHANED = 1


def start_workers(number, prepare=None, *arguments, freed_memory=LARGE_ARRAYS):
    """A pool of processes that leave Ctrl-C to this one, which reports it once, and end with it.

    Without the second, the workers of a killed run would go on writing beside those of the next.

    Args:
        number: Processes.
        prepare: Function that each calls first, with `arguments`; both can be pickled.
        freed_memory: Settings of `keep_freed_memory` for each; None leaves the C library as it is.

    Returns:
        `ProcessPoolExecutor`.
    """
    # Spawned, not forked: TensorFlow's and the tokenizer's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    return futures.ProcessPoolExecutor(number, context, _begin, (freed_memory, prepare, *arguments))


@contextlib.contextmanager
def telling_lost_workers():
    """Raise `OSError` where a worker of the block's pool was killed."""
    try:
        yield
    except futures.process.BrokenProcessPool as error:
        raise OSError("a worker process ended without a word, as when the system is out of memory") from error


def _begin(freed_memory, prepare, *arguments):
    if freed_memory:
        keep_freed_memory(freed_memory)
    if prepare:
        prepare(*arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    with contextlib.suppress(OSError):
        multiprocessing.parent_process().join()
    os._exit(STATUS_ORPHANED)
