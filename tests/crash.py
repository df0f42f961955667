"""Runs a command in a process of its own and kills it: at a chosen change of a file, or after a while.

Processes come from multiprocessing's fork server, which has TensorFlow imported already.
"""

import multiprocessing
import os
import signal
from pathlib import Path

from data_gen import files

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["data_gen.pack_files", "data_gen.create_files", "crash"])
TIMEOUT = 120  # seconds; no run here takes more than a few


def start(function, config, fatal_change=None):
    """Start `function(config)`; with `fatal_change` = n it kills itself before its n-th change of a name."""
    process = _CONTEXT.Process(target=_run, args=(function, config, fatal_change))
    process.start()
    return process


def finish(process):
    """Wait for a process; returns its exit code, negative for a signal."""
    process.join(TIMEOUT)
    assert not process.is_alive()
    return process.exitcode


def kill_after(process, seconds):
    """Kill a process after some seconds, unless it ends before; returns whether it was killed."""
    process.join(seconds)
    process.kill()
    return finish(process) == -signal.SIGKILL


def all_bytes(folder):
    """Content of every file of a folder, hidden ones and subfolders included."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _run(function, config, fatal_change):
    if fatal_change is not None:
        _die_at(fatal_change)
    function(config)


def _die_at(fatal_change):
    num_changes = 0

    def counted(change):
        def change_or_die(*arguments):
            nonlocal num_changes
            num_changes += 1
            if num_changes == fatal_change:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments)

        return change_or_die

    for name in ("replace", "remove", "remove_folder", "make_folder"):
        setattr(files, name, counted(getattr(files, name)))
