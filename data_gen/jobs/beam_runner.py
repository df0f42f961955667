"""Steps on Apache Beam, one element each, with results in a folder that all machines share."""

import contextlib
import importlib
import io
import os
import shlex

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from bert_packed.core import storage
from bert_packed.core.settings import InputError

OPTIONS_VARIABLE = "BEAM_OPTIONS"
FULL_NAMES = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}  # where Beam knows no short one
PARTS = {  # of Beam, which it installs as extras: their names, and modules
    "DataflowRunner": ("gcp", ["apache_beam.runners.dataflow.internal.apiclient"]),
    "DaskRunner": ("dask", ["distributed", "apache_beam.runners.dask.dask_runner"]),
}
BUG = ".bug"  # suffix of notes of errors that are not the user's


def run_pipeline(runner, function, elements, work_folder):
    """Apply a module's function to every element, on any machine that sees `work_folder`.

    The environment variable `BEAM_OPTIONS` has the runner's options. Those after a lone `--` are for a job
    server; Beam does not know them, so they are passed on unchecked. An `InputError` or `OSError` of the
    function is raised here.
    """
    pipeline = _make_pipeline(runner)
    folder = os.path.join(work_folder, "errors")
    storage.remove_folder(folder)
    storage.make_folder(folder)
    # Dask would call a tuple that begins with a function
    numbered = [(number, function, folder, element) for number, element in enumerate(elements)]
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
            return beam.Pipeline(options=PipelineOptions(words, runner=full_name))
    except (ValueError, TypeError, SystemExit) as error:
        reason = _last_line(complaint.getvalue()).partition("error: ")[2] or _last_line(error)
        raise InputError(
            f"`{OPTIONS_VARIABLE}` must be flags of {runner}: {reason}. Received: {text!r}."
        ) from error


def _check_part(runner):
    """Raise `InputError` where Beam was installed without a runner's dependencies; makes its options known."""
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""


def _raise_noted(folder):
    for name in storage.list_names(folder):
        kind, message = storage.read_text(os.path.join(folder, name)).split("\n", 1)
        raise {"input": InputError, "system": OSError}[kind](message)


def _apply(numbered):
    """Call the function, and note its error for the parent."""
    # Beam itself would hide a user's error in a traceback
    number, function, folder, element = numbered
    try:
        function(element)
    except (InputError, OSError) as error:
        kind = "input" if isinstance(error, InputError) else "system"
        storage.write_text(os.path.join(folder, f"{number:09d}"), f"{kind}\n{error}")
    except Exception as error:  # a bug of ours: noted for the parent, and raised again
        storage.write_text(os.path.join(folder, f"{number:09d}{BUG}"), f"{error}")
        raise
