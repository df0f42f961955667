"""Steps on Apache Beam, one element each, with results in a folder that all machines share."""

import contextlib
import importlib
import io
import itertools
import math
import os
import shlex
import socket
import threading
import time

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

from bert_packed.core import storage
from bert_packed.core.runtime import repeating
from bert_packed.core.settings import InputError

OPTIONS_VARIABLE = "BEAM_OPTIONS"
# Beam knows no short name of these
FULL_NAMES = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}
# Beam installs these parts as extras: their names, and modules
PARTS = {
    "DataflowRunner": ("gcp", ["apache_beam.runners.dataflow.internal.apiclient"]),
    "DaskRunner": ("dask", ["distributed", "apache_beam.runners.dask.dask_runner"]),
}
ANSWER_SECONDS = 10  # a job server answers sooner
ALIVE_SECONDS = 5  # interval of a worker's signs of life
LOST_SECONDS, OVER = 90, "over"
BUG = ".bug"  # suffix of notes of errors that are not the user's


def run_pipeline(runner, function, elements, work_folder):
    """Apply a module's function to every element, on any machine that sees `work_folder`.

    The environment variable `BEAM_OPTIONS` has the runner's options. Those after a lone `--` are for a job
    server; Beam does not know them, so they are passed on unchecked. An `InputError` or `OSError` of the
    function is raised here.
    """
    pipeline = _make_pipeline(runner)
    folder = os.path.join(work_folder, "errors")
    for one in (folder, _signs_of(folder)):
        storage.remove_folder(one)
        storage.make_folder(one)
    # Dask would call a tuple that begins with a function
    numbered = [(number, function, folder, element) for number, element in enumerate(elements)]
    try:
        # Beam would, without the reshuffle, fuse everything with the single step that creates the list
        _ = pipeline | beam.Create(numbered) | beam.Reshuffle() | beam.Map(_apply)
        # Dataflow starts machines, for minutes
        start = math.inf if runner == "DataflowRunner" else time.monotonic()
        _wait_for(pipeline.run(), _signs_of(folder), len(numbered), start)
    except Exception as error:  # each runner has its own errors
        if any(name.endswith(BUG) for name in storage.list_names(folder)):
            raise  # a mistake of ours needs its traceback
        _raise_noted(folder)
        raise OSError(f"{runner} failed: {type(error).__name__}: {_last_line(error)}") from error
    _raise_noted(folder)


def _wait_for(result, folder, number, start):
    """Wait for the end of a pipeline, or of all its elements: some runners wait for a lost worker.

    `start` is the time from which on workers must show signs of life. Raises `OSError` where one is lost.
    """
    failed, seen, last = [], {}, start  # signs of life, and when they have changed

    def wait():
        try:
            result.wait_until_finish()
        except Exception as error:
            failed.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while waiting.is_alive():
        waiting.join(ALIVE_SECONDS)
        now, before = time.monotonic(), seen
        signs = {name: _read_sign(folder, name) for name in storage.list_names(folder)}
        is_new = {name: before.get(name, ("",))[0] != sign for name, sign in signs.items()}
        seen = {name: (sign, now) if is_new[name] else before[name] for name, sign in signs.items()}
        last = now if any(is_new.values()) else last
        running = [since for sign, since in seen.values() if sign != OVER]
        if waiting.is_alive() and now - min([last, *running]) > LOST_SECONDS:
            threading.Thread(target=result.cancel, daemon=True).start()
            if len(seen) == number and not running:
                return
            raise OSError(f"a worker was lost: no sign of life for {LOST_SECONDS} seconds")
    if failed:
        raise failed[0]


def _read_sign(folder, name):
    with contextlib.suppress(FileNotFoundError):  # a temporary one
        return storage.read_text(os.path.join(folder, name))
    return OVER


def _signs_of(folder):
    return f"{folder}-alive"


def _make_pipeline(runner):
    """A pipeline with the runner's options, all checked."""
    if runner in PARTS:
        _check_part(runner)
    full_name = FULL_NAMES.get(runner, runner)
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
            options = PipelineOptions(words[:end], runner=full_name)
            unknown = options.get_all_options(retain_unknown_options=True).keys() - known
            if unknown:  # Beam would drop it with a warning
                raise ValueError(f"--{min(unknown)} is none")
            # this raises ValueError, too, for a missing option that the runner requires
            words = words[:end] + words[end + 1 :]
            _check_server(options.view_as(PortableOptions).job_endpoint)
            return beam.Pipeline(options=PipelineOptions(words, runner=full_name))
    except (ValueError, TypeError, SystemExit) as error:
        reason = _last_line(complaint.getvalue()).partition("error: ")[2] or _last_line(error)
        raise InputError(
            f"`{OPTIONS_VARIABLE}` must be flags of {runner}: {reason}. Received: {text!r}."
        ) from error


def _check_server(endpoint):
    """Raise `ValueError` where nobody listens, for which Beam waits for minutes."""
    host, _, port = (endpoint or "").rpartition(":")
    if host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(f"no job server at --job_endpoint={endpoint}: {error}") from error


def _check_part(runner):
    """Raise `InputError` where Beam was installed without a runner's part; makes its options known."""
    extra, modules = PARTS[runner]
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"`runner` {runner} must have its part of Beam: pip install 'apache-beam[{extra}]'. "
            f"Received: {error}."
        ) from error


def _last_line(error):
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
    details = [line for line in lines if line.startswith("details = ")]  # gRPC's form
    return (details or lines)[-1].rstrip(".") if lines else ""


def _raise_noted(folder):
    for name in storage.list_names(folder):
        kind, message = storage.read_text(os.path.join(folder, name)).split("\n", 1)
        raise {"input": InputError, "system": OSError}[kind](message)


def _apply(numbered):
    """Call the function, and note its error for the parent."""
    # Beam itself would hide a user's error in a traceback
    number, function, folder, element = numbered
    path = os.path.join(folder, f"{number:09d}")
    try:
        with _alive(os.path.join(_signs_of(folder), f"{number:09d}")):
            function(element)
    except (InputError, OSError) as error:
        kind = "input" if isinstance(error, InputError) else "system"
        storage.write_text(path, f"{kind}\n{error}")
    except Exception as error:  # a bug of ours: noted for the parent, and raised again
        storage.write_text(path + BUG, f"{error}")
        raise


@contextlib.contextmanager
def _alive(path):
    """Write a sign of life every few seconds while the body runs."""
    numbers = itertools.count()

    def sign():
        storage.write_text(path, f"{next(numbers)}")

    sign()
    try:
        with repeating(sign, ALIVE_SECONDS):
            yield
    finally:
        storage.write_text(path, OVER)
