"""How runs are taken one after the other, each by the ordinary command, stopped with us and gone on with.

DIR/NAME is the output directory of a run, DIR/NAME.log what its command printed, in all its parts.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from bert_packed.reports.run_curves import LOGS
from bert_packed.runs.pretraining_config import TrainConfig
from data_gen.cli.command_line import TOP, parse
from data_gen.cli.settings import InputError, result_settings

STATUS_OF_SIGNAL = 128


def command_of(run, folder, more_flags=""):
    """The command line of a run: list of arguments.

    Args:
        run: `curve_runs.Run`.
        folder: DIR.
        more_flags: Flags for every run, as one text.
    """
    flags = {**run.flags, "output_dir": Path(folder) / run.name}
    given = [f"--{name}={value}" for name, value in flags.items() if value != ""]
    return [sys.executable, str(TOP / "run_pretraining.py"), *given, *shlex.split(more_flags)]


def settings_of(run, folder, more_flags=""):
    """What a run's command line means: `TrainConfig`; raises `InputError`, before any run is taken."""
    return parse(TrainConfig, command_of(run, folder, more_flags)[1:])


def is_complete(run, folder, more_flags=""):
    """Whether a run has taken, logged and evaluated its last step, under these flags.

    Arguments as of `command_of`. Of other flags its command is asked, which refuses to go on under them.
    """
    from bert_packed.runs.run_directory import RUN_FILE
    from bert_packed.training.metrics_log import read_rows

    wanted = settings_of(run, folder, more_flags)
    output_dir = Path(wanted.output_dir)
    try:
        kept = json.loads((output_dir / RUN_FILE).read_text())["flags"]
    except (OSError, ValueError, KeyError):
        return False  # the command itself says what is wrong with it
    # A flag that is newer than the run was at its default
    kept = {field.name: kept.get(field.name, field.default) for field in dataclasses.fields(wanted)}
    if any(kept[name] != value for name, value in result_settings(wanted).items()):
        return False
    steps = [[int(row["step"]) for row in read_rows(output_dir / log)] for log in LOGS.values()]
    return all(of_log and of_log[-1] == wanted.num_train_steps for of_log in steps)


def take(run, folder, more_flags=""):
    """Start a run or go on with it, until it is complete or stopped.

    A SIGTERM or SIGINT to this process is handed on; the run saves at the next step, and this returns.

    Args:
        run, folder, more_flags: As of `command_of`.

    Returns:
        0, or 128 and the number of the signal that stopped it.

    Raises:
        InputError: its command failed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{run.name}.log"
    with log.open("ab") as output:
        # In our group: what ends all of it, ends the run. Ctrl-C so reaches it twice, which it takes for once
        process = subprocess.Popen(
            command_of(run, folder, more_flags),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        with _handing_on_signals(process):
            status = process.wait()
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
    def hand_on(number, _):
        if process.poll() is None:
            os.kill(process.pid, number)

    numbers = [
        number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_line(log):
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
