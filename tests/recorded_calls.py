"""Commands in this process, with the arguments of chosen functions recorded."""

import contextlib
import inspect
import io
import json
import types

import pytest

from bert_packed.core import command_line


def run(main, config_class, recorded=(), replaced=None, **flags):
    """A command under flags: its exit status, what it printed, and the calls of chosen functions.

    Args:
        main, config_class: Function and config class of the command.
        recorded: Pairs `(module, name)` of functions or classes that still do their work.
        replaced: Dict from such pairs to what is called in their place.
        flags: Values of flags by name.

    Returns:
        Namespace of `status`, `error`, `out` and `calls`: the dicts of arguments, by name of the function.
    """
    seen = types.SimpleNamespace(calls={})
    replaced = replaced or {}

    def recording(name, function, stand_in):
        def call(*arguments, **keywords):
            bound = inspect.signature(function).bind(*arguments, **keywords)
            seen.calls.setdefault(name, []).append(bound.arguments)
            return stand_in(*arguments, **keywords)

        return call

    argv = ["command", *(f"--{name}={value!s}" for name, value in flags.items())]
    error, out = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (*recorded, *replaced):
            function = getattr(module, name)
            patch.setattr(module, name, recording(name, function, replaced.get((module, name), function)))
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
            seen.status = command_line.run(main, config_class, argv)
    seen.error, seen.out = error.getvalue(), out.getvalue()
    return seen


def assert_refused(main, config_class, message, **flags):
    """Assert that a command refuses flags in one line that holds `message`, with exit status 2."""
    seen = run(main, config_class, **flags)
    assert (seen.status, seen.error.count("\n")) == (2, 1) and message in seen.error, seen.error


def arguments(seen, function, name):
    """The values that an argument of a recorded function had, one a call."""
    return [call.get(name) for call in seen.calls.get(function, [])]


def other_run(folder):
    """A folder that holds a run under other flags."""
    (folder / "checkpoint-77").mkdir(parents=True)
    record = {"flags": {"learning_rate": 9.0}, "model": {}, "data": {}, "inputs": {}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder
