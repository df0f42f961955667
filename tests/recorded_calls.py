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
        main, config_class: Of the command.
        recorded: `(module, name)` of functions or classes that work as ever.
        replaced: Dict from such pairs to what is called in their place.
        flags: By name.

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


def arguments(seen, function, name):
    """The values that an argument of a recorded function had, one a call."""
    return [call.get(name) for call in seen.calls.get(function, [])]


def other_run(folder):
    """A folder that holds a run under other flags."""
    (folder / "checkpoint-77").mkdir(parents=True)
    record = {"flags": {"learning_rate": 9.0}, "model": {}, "data": {}, "inputs": {}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder
