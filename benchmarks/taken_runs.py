"""Runs taken one after the other, each by the ordinary command, stopped with us and gone on with.

DIR/NAME is the output directory of a run, DIR/NAME.log what its command printed, in all its parts.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.changed_inputs import find_changed_input
from benchmarks.kept_runs import (
    as_begun,
    find_outdated,
    is_complete,
    note_scoring,
)
from benchmarks.planned_runs import SQUAD, command_of, settings_of
from bert_packed.core.settings import InputError

STATUS_OF_SIGNAL = 128


def print_commands(runs, folder):
    """Print the command line of each run; returns an exit status. Raises `InputError` of a wrong flag."""
    for run in runs:
        settings_of(run, folder)
    for run in runs:
        print(shlex.join(command_of(run, folder)))
    return 0


def take_all(runs, folder, after_each=lambda: None):
    """Take, in order, the runs that are not complete, until one is stopped.

    Args:
        runs: List of `planned_runs.Run`.
        folder: DIR.
        after_each: Called after each run that was taken to its end.

    Returns:
        An exit status, as of `take`.

    Raises:
        InputError: a flag of one of them is wrong, one is outdated, or was made with files that changed
            since, before the first is taken; or a command failed.
    """
    for run in runs:
        settings_of(run, folder)
    _refuse_outdated(runs, folder)
    _refuse_changed(runs, folder)
    for number, run in enumerate(runs, start=1):
        if is_complete(run, folder):
            continue
        _refuse_outdated([run], folder)
        print(f"run {number} of {len(runs)}: {run.name}", flush=True)
        if run.program == SQUAD:
            note_scoring(run, folder)
        status = take(as_begun(run, folder), folder)
        if status:
            print("stopped after saving; the same command goes on", file=sys.stderr)
            return status
        after_each()
    return 0


def _refuse_outdated(runs, folder):
    names = find_outdated(runs, folder)
    if names:
        raise InputError(
            f"every run in {folder} must be from the newest checkpoint of its start. Received: "
            f"{', '.join(names)}, begun before that was taken anew; removed, they are taken again."
        )


def _refuse_changed(runs, folder):
    changed = {run.name: find_changed_input(Path(folder) / run.name) for run in runs}
    names = [name for name, path in changed.items() if path]
    if names:
        raise InputError(
            f"every run in {folder} must be of files as they are now. Received: {', '.join(names)}, made "
            f"before {changed[names[0]]} changed; removed, they are taken again."
        )


def take(run, folder):
    """Start a run or go on with it, until it is complete or stopped.

    A SIGTERM or SIGINT to this process is handed on; the run saves at the next step, and this returns. One
    that comes after the last step stops us all the same, though the run is complete.

    Args:
        run, folder: As of `planned_runs.command_of`.

    Returns:
        0, or 128 and the number of the signal that stopped it, or us.

    Raises:
        InputError: its command failed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{run.name}.log"
    with log.open("ab") as output:
        # In our group: what ends all of it, ends the run. Ctrl-C so reaches it twice, which it takes for once
        process = subprocess.Popen(
            command_of(run, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        with _handing_on_signals(process) as handed_on:
            status = process.wait()
    if handed_on and status == 0:
        return STATUS_OF_SIGNAL + handed_on[-1]
    stopped_by = -status if status < 0 else status - STATUS_OF_SIGNAL
    if stopped_by in (signal.SIGTERM, signal.SIGINT):
        return STATUS_OF_SIGNAL + stopped_by
    if status:
        raise InputError(
            f"every run must end well. Received: status {status} of {run.name}; {log} ends with: "
            f"{_last_line(log)}"
        )
    return 0


@contextlib.contextmanager
def _handing_on_signals(process):
    """Yields the list of the signals that came."""
    handed_on = []

    def hand_on(number, _):
        handed_on.append(number)
        if process.poll() is None:
            os.kill(process.pid, number)

    numbers = [
        number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield handed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_line(log):
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
