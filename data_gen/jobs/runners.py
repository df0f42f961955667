"""Choice of runners for steps, local processes or Apache Beam, and pools of local workers."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import threading
from concurrent import futures

from bert_packed.core.runtime import LARGE_ARRAYS, keep_freed_memory
from bert_packed.core.settings import InputError

LOCAL = "local"
OF_BEAM = ("DirectRunner", "PortableRunner", "DaskRunner", "FlinkRunner", "SparkRunner", "DataflowRunner")
RUNNERS = (LOCAL, *OF_BEAM)
# One process is as fast up to here, because others take time to start
BYTES_THAT_PAY = 2**26  # records to pack
TEXT_BYTES_THAT_PAY = 2**24  # text to make records of
STATUS_ORPHANED = 1
MAX_WORKERS = 2**12  # local processes; more is a slip

NUM_WORKERS_HELP = (
    "local processes; 0 = as many as pay: one per CPU core, or one alone for an input of less than 64 MiB"
)
TEXT_WORKERS_HELP = (
    "local processes; 0 = as many as pay: one per CPU core, or one alone for less than 16 MiB of text"
)
RUNNER_HELP = (
    "who does the work: local processes, or a runner of Apache Beam (extra `beam`), whose own flags are in "
    "the environment variable BEAM_OPTIONS"
)


def choose_num_workers(num_workers, num_bytes, bytes_that_pay=BYTES_THAT_PAY):
    """The number of processes for `--num_workers` (0 = automatic) and the size of the input."""
    if num_workers:
        return num_workers
    return num_cores() if num_bytes > bytes_that_pay else 1


def num_cores():
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def check_runner(runner, num_workers):
    """Raise `InputError` for a runner that is not installed, or that cannot honour `num_workers`."""
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
    """A `ProcessPoolExecutor` whose workers ignore Ctrl-C, which this process reports, and end with it.

    Each worker calls `prepare(*arguments)` first. `freed_memory` are settings of `keep_freed_memory`; None
    leaves the C library unchanged.
    """
    # Workers are spawned: TensorFlow's and the tokenizer's threads do not survive a fork
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
    # The workers of a killed run would otherwise write alongside those of the next
    with contextlib.suppress(OSError):
        multiprocessing.parent_process().join()
    os._exit(STATUS_ORPHANED)
