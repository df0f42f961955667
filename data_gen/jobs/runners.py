"""Runners of the steps of a command: local processes, or Apache Beam by `beam_runner.py`."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import threading
from concurrent import futures

from bert_packed.core.freed_memory import LARGE_ARRAYS, keep_freed_memory
from bert_packed.core.settings import InputError

LOCAL = "local"
RUNNERS = (LOCAL, "DirectRunner", "FlinkRunner", "SparkRunner", "DataflowRunner")
# One process is as fast up to here, because others take time to start
BYTES_THAT_PAY = 2**26  # of records to pack
TEXT_BYTES_THAT_PAY = 2**24  # of text to make records of
STATUS_ORPHANED = 1

NUM_WORKERS_HELP = (
    "local processes; 0 = as many as pay: one per CPU core, or one alone for an input of less than 64 MiB"
)
TEXT_WORKERS_HELP = (
    "local processes; 0 = as many as pay: one per CPU core, or one alone for less than 16 MiB of text"
)
RUNNER_HELP = (
    "who does the work: local processes, or a runner of Apache Beam (extra `beam`), whose own flags stand in "
    "the environment variable BEAM_OPTIONS"
)


def choose_num_workers(num_workers, num_bytes, bytes_that_pay=BYTES_THAT_PAY):
    """The number of processes for `--num_workers` and an input's size, where 0 = as many as pay."""
    if num_workers:
        return num_workers
    return num_cores() if num_bytes > bytes_that_pay else 1


def num_cores():
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def check_runner(runner, num_workers):
    """Raise `InputError` where a runner is not installed, or cannot honour `num_workers`."""
    if runner == LOCAL:
        return
    if num_workers:
        raise InputError(
            f"`num_workers` must be 0 with --runner={runner}, which has its own flags for it. "
            f"Received: {num_workers}."
        )
    if importlib.util.find_spec("apache_beam") is None:
        raise InputError(
            f"`runner` must be {LOCAL} where Apache Beam is not installed: pip install 'bert_packed[beam]'. "
            f"Received: {runner}."
        )


def start_workers(number, prepare=None, *arguments, freed_memory=LARGE_ARRAYS):
    """A pool of processes that leave Ctrl-C to this one, which reports it once, and end with it.

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
    # Or the workers of a killed run would go on writing beside those of the next
    with contextlib.suppress(OSError):
        multiprocessing.parent_process().join()
    os._exit(STATUS_ORPHANED)
