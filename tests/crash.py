"""Run a command in a new process and kill it, or a worker: at a chosen change of a file, or later.

Processes come from multiprocessing's fork server, which has TensorFlow imported already.
"""

import contextlib
import multiprocessing
import os
import signal
from pathlib import Path
from unittest import mock

from bert_packed.core import storage
from bert_packed.records import tfrecords
from data_gen import pack_job, pack_steps

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["data_gen.pack_job", "data_gen.text.create_job", "crash"])
TIMEOUT = 120  # seconds; no run here takes more than a few


def start(function, config, fatal_change=None):
    """Start `function(config)`, which kills itself before the n-th change of a name, n = `fatal_change`."""
    process = _CONTEXT.Process(target=_run, args=(function, config, fatal_change))
    process.start()
    return process


def pack_on_levels(config):
    """Pack in runs of a few kilobytes, of which two are merged at a time."""
    sizes = mock.patch.multiple(pack_steps, RUN_BYTES=2**14, FAN_IN=2)
    with sizes, mock.patch.object(tfrecords, "READ_BATCH", 200):
        return pack_job.pack(config)


def finish(process):
    """Wait for a process; returns its exit code, negative for a signal."""
    process.join(TIMEOUT)
    assert not process.is_alive()
    return process.exitcode


def kill_after(process, seconds, whom="process"):
    """Kill a process after some seconds, unless it ends before; returns whether it did not end well.

    `whom` is "process" for it alone, "group" for its workers as well, "worker" for one of these alone.
    """
    process.join(seconds)
    victims = find_workers(process.pid)[:1] if whom == "worker" else [process.pid]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            (os.killpg if whom == "group" else os.kill)(pid, signal.SIGKILL)
    return finish(process) != 0


def find_workers(pid):
    """Process ids of the workers of a process that runs `Job`."""
    found = []
    for children in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # a thread or a process that has just ended
            for child in children.read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def all_bytes(folder):
    """Content of every file of a folder, hidden ones and subfolders included."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _run(function, config, fatal_change):
    os.setpgrp()  # for those who kill the whole group
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
            change(*arguments)

        return change_or_die

    for name in ("replace", "remove", "remove_folder", "make_folder"):
        setattr(storage, name, counted(getattr(storage, name)))
