"""Runs taken one after the other, each by the ordinary command, stopped with us and gone on with.

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
from bert_packed.runs.finetuning_config import SquadConfig
from bert_packed.runs.pretraining_config import TrainConfig
from data_gen.cli.command_line import TOP, parse
from data_gen.cli.settings import InputError, result_settings

STATUS_OF_SIGNAL = 128
PRETRAINING, SQUAD = "run_pretraining.py", "run_squad.py"
CONFIGS = {PRETRAINING: TrainConfig, SQUAD: SquadConfig}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a training command.

    Attributes:
        variant: What it is called in tables and pictures.
        seed: Of weights, dropout and order of the data.
        flags: Dict from flag to value, without `output_dir`; an empty value is left out.
        sequences_per_step: Expected.
        more_flags: Further flags, as one text; they come last.
        program: A key of `CONFIGS`.
    """

    variant: str
    seed: int
    flags: dict
    sequences_per_step: float
    more_flags: str = ""
    program: str = PRETRAINING

    @property
    def name(self):
        """Of its folder."""
        return f"{self.variant}-seed{self.seed}"


def parse_names(text, known):
    """Different ones of some names, with commas; raises `ValueError`."""
    wrong = [name for name in text.split(",") if name not in known]
    if wrong or len(set(text.split(","))) < len(text.split(",")):
        raise ValueError(f"different ones of {', '.join(known)}, separated by commas")
    return text


def parse_seeds(text):
    """`--seeds`: different whole numbers with commas; raises `ValueError`."""
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
        raise ValueError("different whole numbers, separated by commas")
    return text


def command_of(run, folder):
    """The command line of a run, a `Run`, in DIR, `folder`: list of arguments."""
    flags = {**run.flags, "output_dir": Path(folder) / run.name}
    given = [f"--{name}={value}" for name, value in flags.items() if value != ""]
    return [sys.executable, str(TOP / run.program), *given, *shlex.split(run.more_flags)]


def settings_of(run, folder):
    """What the command line of a run means: a config of `CONFIGS`; raises `InputError`."""
    return parse(CONFIGS[run.program], command_of(run, folder)[1:])


def is_complete(run, folder):
    """Whether a run has taken, logged and evaluated its last step, under these flags.

    Arguments as of `command_of`. Of other flags its command is asked, which refuses to go on under them.
    """
    from bert_packed.runs.run_directory import RUN_FILE, SCORES_FILE
    from bert_packed.training.metrics_log import read_rows

    wanted = settings_of(run, folder)
    output_dir = Path(wanted.output_dir)
    try:
        kept = json.loads((output_dir / RUN_FILE).read_text())["flags"]
    except (OSError, ValueError, KeyError):
        return False  # the command itself says what is wrong with it
    # A flag that is newer than the run was at its default
    kept = {field.name: kept.get(field.name, field.default) for field in dataclasses.fields(wanted)}
    if any(kept[name] != value for name, value in result_settings(wanted).items()):
        return False
    if run.program == SQUAD:
        return (output_dir / SCORES_FILE).is_file()  # written last
    steps = [[int(row["step"]) for row in read_rows(output_dir / log)] for log in LOGS.values()]
    return all(of_log and of_log[-1] == wanted.num_train_steps for of_log in steps)


def print_commands(runs, folder):
    """Print the command line of each run; returns an exit status. Raises `InputError` of a wrong flag."""
    lines = [shlex.join(command_of(run, folder)) for run in runs if settings_of(run, folder)]
    print("\n".join(lines))
    return 0


def take_all(runs, folder, after_each=lambda: None):
    """Take, in order, the runs that are not complete, until one is stopped.

    Args:
        runs: List of `Run`.
        folder: DIR.
        after_each: Called after each run that was taken to its end.

    Returns:
        An exit status, as of `take`.

    Raises:
        InputError: a flag of one of them is wrong, before the first is taken; or a command failed.
    """
    for run in runs:
        settings_of(run, folder)
    for number, run in enumerate(runs, start=1):
        if is_complete(run, folder):
            continue
        print(f"run {number} of {len(runs)}: {run.name}", flush=True)
        status = take(run, folder)
        if status:
            print("stopped after saving; the same command goes on", file=sys.stderr)
            return status
        after_each()
    return 0


def take(run, folder):
    """Start a run or go on with it, until it is complete or stopped.

    A SIGTERM or SIGINT to this process is handed on; the run saves at the next step, and this returns.

    Args:
        run, folder: As of `command_of`.

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
            command_of(run, folder),
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
