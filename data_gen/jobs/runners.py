"""Who does the steps of a command: local processes, or a runner of Apache Beam."""

import importlib.util
import os

from bert_packed.core.settings import InputError

LOCAL = "local"
RUNNERS = (LOCAL, "DirectRunner", "FlinkRunner", "SparkRunner", "DataflowRunner")
# Starting processes takes as long as one alone needs for so much: of records to pack, of text to make them of
BYTES_THAT_PAY = 2**26
TEXT_BYTES_THAT_PAY = 2**24

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
    """The number of processes for `--num_workers`, where 0 = as many as pay.

    Args:
        num_workers: The setting.
        num_bytes: Size of the input.
        bytes_that_pay: Up to here one process is as fast.
    """
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
