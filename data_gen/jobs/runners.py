"""Runners of steps: pools of local workers, or Apache Beam with results in a shared folder."""

import contextlib
import importlib
import importlib.util
import io
import multiprocessing
import os
import shlex
import signal
import threading
from concurrent import futures

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from bert_packed.core import storage
from bert_packed.core.runtime import LARGE_ARRAYS, keep_freed_memory
from bert_packed.core.settings import InputError

LOCAL = "local"
RUNNERS = (LOCAL, "DirectRunner", "FlinkRunner", "SparkRunner", "DataflowRunner")
# Up to here one process is as fast, because others take time to start
BYTES_THAT_PAY = 2**26  # of records to pack
TEXT_BYTES_THAT_PAY = 2**24  # of text to make records of
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

    Args:
        number: Number of processes.
        prepare: Function that each worker calls first, with `arguments`; all picklable.
        freed_memory: Settings of `keep_freed_memory` for each; None leaves the C library unchanged.
    """
    # Spawned, not forked: TensorFlow's and the tokenizer's threads do not survive a fork
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
    # Else the workers of a killed run would write alongside those of the next
    with contextlib.suppress(OSError):
        multiprocessing.parent_process().join()
    os._exit(STATUS_ORPHANED)


OPTIONS_VARIABLE = "BEAM_OPTIONS"
BUG = ".bug"  # suffix of notes of errors that are not the user's


def run_pipeline(runner, function, elements, work_folder):
    """Apply a function to every element, on any machine.

    Args:
        runner: Name of a Beam runner, with options in the environment variable `BEAM_OPTIONS`, such as
            `--flink_master=host:8081 --parallelism=64`. Those after a lone `--` are for a job server; Beam
            does not know them, so they are passed on unchecked.
        function: A module's function.
        elements: List of picklable objects.
        work_folder: Folder that all machines see.

    Raises:
        InputError: `BEAM_OPTIONS` is wrong.
        InputError, OSError: the function's error for the first element that has one.
        OSError: the runner failed.
    """
    pipeline = _make_pipeline(runner)
    folder = os.path.join(work_folder, "errors")
    storage.remove_folder(folder)
    storage.make_folder(folder)
    numbered = [(function, folder, number, element) for number, element in enumerate(elements)]
    try:
        with pipeline:
            # without the reshuffle Beam would fuse everything with the single step that creates the list
            _ = pipeline | beam.Create(numbered) | beam.Reshuffle() | beam.Map(_apply)
    except Exception as error:  # each runner has its own errors
        if any(name.endswith(BUG) for name in storage.list_names(folder)):
            raise  # a mistake of ours needs its traceback
        _raise_noted(folder)
        raise OSError(f"{runner} failed: {type(error).__name__}: {_last_line(error)}") from error
    _raise_noted(folder)


def _make_pipeline(runner):
    """A pipeline with the runner's options, all checked; raises `InputError`."""
    if runner == "DataflowRunner":
        _check_dataflow()
    text = os.environ.get(OPTIONS_VARIABLE, "")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):  # argparse prints its usage, and then exits
            words = shlex.split(text)
            end = words.index("--") if "--" in words else len(words)
            for word in (words[:1], words[end + 1 : end + 2]):
                if word and not word[0].startswith("-"):
                    raise ValueError(f"{word[0]} is none")
            if words[end + 1 :] and runner == "DirectRunner":
                raise ValueError(f"{words[end + 1]} is for a job server, which {runner} has not")
            known = PipelineOptions([]).get_all_options().keys()
            options = PipelineOptions(words[:end], runner=runner)
            unknown = options.get_all_options(retain_unknown_options=True).keys() - known
            if unknown:  # Beam would drop it with a warning
                raise ValueError(f"--{min(unknown)} is none")
            # for a missing option that the runner requires, this raises ValueError too
            return beam.Pipeline(options=PipelineOptions(words[:end] + words[end + 1 :], runner=runner))
    except (ValueError, TypeError, SystemExit) as error:
        reason = _last_line(complaint.getvalue()).partition("error: ")[2] or _last_line(error)
        raise InputError(
            f"`{OPTIONS_VARIABLE}` must be flags of {runner}: {reason}. Received: {text!r}."
        ) from error


def _check_dataflow():
    """Raise `InputError` where Beam was installed without Dataflow's dependencies."""
    try:
        importlib.import_module("apache_beam.runners.dataflow.internal.apiclient")
    except ImportError as error:
        raise InputError(
            "`runner` DataflowRunner must have Google Cloud's part of Beam: pip install 'apache-beam[gcp]'. "
            f"Received: {error}."
        ) from error


def _last_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""


def _raise_noted(folder):
    """Raise the first error that a step has noted, if any."""
    for name in storage.list_names(folder):
        kind, message = storage.read_text(os.path.join(folder, name)).split("\n", 1)
        raise {"input": InputError, "system": OSError}[kind](message)


def _apply(numbered):
    """Call the function, and note its error for the parent."""
    # Beam itself would hide a user's error in a traceback
    function, folder, number, element = numbered
    try:
        function(element)
    except (InputError, OSError) as error:
        kind = "input" if isinstance(error, InputError) else "system"
        storage.write_text(os.path.join(folder, f"{number:09d}"), f"{kind}\n{error}")
    except Exception as error:  # a bug of ours: noted for the parent, and raised again
        storage.write_text(os.path.join(folder, f"{number:09d}{BUG}"), f"{error}")
        raise
