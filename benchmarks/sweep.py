"""Sets of training runs, one command after another, each of which continues where it was stopped.

DIR/NAME is the output directory of a run, DIR/NAME.log the output of its command. Whether a run is
complete, may continue, or was made under other flags or on other files is decided by its command, as for
any run.
"""

import collections
import contextlib
import dataclasses
import math
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.results import Settings
from bert_packed.core.command_line import TOP, parse
from bert_packed.core.settings import InputError, setting
from bert_packed.records.inputs import find_files, folder_of
from bert_packed.records.manifests import read_manifest
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.tasks.squad.config import SquadConfig

PRETRAINING, SQUAD = "run_pretraining.py", "run_squad.py"
CONFIGS = {PRETRAINING: PretrainingConfig, SQUAD: SquadConfig}
WARMUP_SHARE = 0.1  # of the steps of a pre-training
MOST_UNEVEN = 0.05
STATUS_OF_SIGNAL = 128


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a training command."""

    name: str  # of its folder, `VARIANT-seedN`
    flags: dict  # without `output_dir`; an empty value is left out
    more_flags: str = ""  # as one text; they come last
    program: str = PRETRAINING


def parse_seeds(text):
    """Different whole numbers with commas; raises `ValueError`."""
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
        raise ValueError("different whole numbers, separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class SweepConfig(Settings):
    """Flags of every set of runs; checks itself, raises `InputError`."""

    output_dir: str = setting("", "where the runs, their logs and the pictures go", required=True)
    seeds: str = setting("1,2,3", "of the runs of a variant, comma-separated", parse=parse_seeds)
    max_eval_steps: int = setting(0, "evaluation batches of 8 packs; 0 = all of the held-out data", minimum=0)
    print_commands: bool = setting(False, "only print the command of each run")


def read_packing_factor(config, packed, unpacked):
    """Packing factor of the records of flag `packed`, by their manifests: float.

    Raises:
        InputError: no manifest is beside them, or those of flag `unpacked` are not the same sequences at
        depth 1.
    """
    (num_packs, in_packs), (num_rows, in_rows) = (_count(config, name) for name in (packed, unpacked))
    num_sequences = in_packs.total()
    # As many sequences are not enough: other ones of other lengths would be compared
    if num_rows != in_rows.total() or in_packs != in_rows:
        raise InputError(
            f"`{unpacked}` must hold the {num_sequences:,} sequences of {packed} at depth 1. Received: "
            f"{in_rows.total():,} in {num_rows:,} rows{'' if in_packs == in_rows else ', of other lengths'}."
        )
    return num_sequences / num_packs


def _count(config, name):
    """Packs in the records of a flag, and a `Counter` of their sequences by length."""
    num_packs, by_length = 0, collections.Counter()
    for folder in {folder_of(path) for path in find_files(getattr(config, name), name)}:
        manifest = read_manifest(folder)
        if not manifest:
            raise InputError(
                f"`{name}` must have manifest.json beside it. Received: {getattr(config, name)}, without."
            )
        num_packs += manifest["num_packs"]
        histogram = manifest["histogram"]
        by_length.update(dict(zip(histogram["lengths"], histogram["counts"], strict=True)))
    return num_packs, by_length


def packs_of(num_sequences, packing_factor, name):
    """Packs that hold about as many sequences, for one update: int.

    Raises:
        InputError: the nearest number of packs holds over 5 % more or fewer, by the flag `name`.
    """
    num_packs = max(1, round(num_sequences / packing_factor))
    seen = num_packs * packing_factor
    if abs(seen / num_sequences - 1) > MOST_UNEVEN:
        raise InputError(
            f"`{name}` must let an update on packs see within {MOST_UNEVEN:.0%} of it. Received: "
            f"{num_sequences}, where {num_packs} packs of {packing_factor:.3g} sequences hold {seen:.4g}."
        )
    return num_packs


def steps_for(num_sequences, sequences_per_step, num_points):
    """Flags of a pre-training that sees a number of sequences, with a number of points in its logs: dict."""
    num_steps = max(1, round(num_sequences / sequences_per_step))
    interval = math.ceil(num_steps / num_points)
    return {
        "num_train_steps": num_steps,
        "num_warmup_steps": round(WARMUP_SHARE * num_steps),
        **dict.fromkeys(("log_steps", "eval_steps", "save_checkpoints_steps"), interval),
        "keep_checkpoint_max": 1,
    }


def command_of(run, folder):
    """The command line of a run in DIR, `folder`: list of arguments; raises `InputError`."""
    flags = {**run.flags, "output_dir": Path(folder) / run.name}
    try:
        more = shlex.split(run.more_flags)
    except ValueError as error:
        raise InputError(
            f"flags of runs must be as in a shell. Received: {run.more_flags}: {error}."
        ) from error
    given = [f"--{name}={value}" for name, value in flags.items() if value != ""]
    return [sys.executable, str(TOP / run.program), *given, *more]


def check_runs(runs, folder):
    """Raise `InputError` where a flag of a run is wrong, or `more_flags` change one of them."""
    for run in runs:
        settings = parse(CONFIGS[run.program], command_of(run, folder)[1:])
        for name, value in run.flags.items():
            if value != "" and getattr(settings, name) != value:
                raise InputError(
                    f"flags of runs must leave {name} of {run.name} as it is, {value!r}. Received: "
                    f"{run.more_flags}."
                )


def run_all(runs, config):
    """Take or continue runs after all their flags are checked, or print their command lines for a shell.

    Returns:
        None where all are complete, else an exit status.
    """
    check_runs(runs, config.output_dir)
    if config.print_commands:
        print(*(shlex.join(command_of(run, config.output_dir)) for run in runs), sep="\n")
        return 0
    return take_runs(runs, config.output_dir) or None


def take_runs(runs, folder):
    """Take all runs, each after the one that it starts from, until one is stopped.

    Returns:
        0, or 128 and the number of the signal that stopped a run or this command.

    Raises:
        InputError: a command failed, or a run began from weights that have been replaced since.
    """
    for number, run in enumerate(runs, start=1):
        _check_start(run, folder)
        print(f"run {number} of {len(runs)}: {run.name}", flush=True)
        status = _take(run, folder)
        if status:
            print("stopped after saving; the same command continues", file=sys.stderr)
            return status
    return 0


def _check_start(run, folder):
    """Raise `InputError` where a run began before the newest weights of its start were written."""
    from bert_packed.checkpoints.checkpoint import WEIGHTS, list_checkpoints
    from bert_packed.runs.run_directory import FLAGFILE

    start, began = run.flags.get("init_checkpoint"), Path(folder, run.name, FLAGFILE)
    checkpoints = list_checkpoints(Path(start)) if start else []
    if not checkpoints or not began.exists():
        return
    # The flagfile is written at a run's start, and never again. A run itself checks the path of its start
    # alone: phase 1 taken again would leave phase 2 as it was
    if (checkpoints[-1] / WEIGHTS).stat().st_mtime_ns > began.stat().st_mtime_ns:
        raise InputError(
            f"{run.name} must be from the newest checkpoint of {start}. Received: a run that began before; "
            f"remove {began.parent} to take it again."
        )


def _take(run, folder):
    """Take a run, or continue it, until it is complete or stopped; returns a status as `take_runs`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{run.name}.log"
    with log.open("ab") as output:  # a run that continues adds to what it said before
        process = subprocess.Popen(
            command_of(run, folder), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        with _handing_on_signals(process) as received:
            status = process.wait()
    if received and status == 0:  # after its last step
        return STATUS_OF_SIGNAL + received[-1]
    if status in (STATUS_OF_SIGNAL + signal.SIGTERM, STATUS_OF_SIGNAL + signal.SIGINT):
        return status
    if status:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise InputError(
            f"every run must end well. Received: status {status} of {run.name}; {log} ends with: "
            f"{lines[-1] if lines else 'nothing'}"
        )
    return 0


@contextlib.contextmanager
def _handing_on_signals(process):
    """Yields the list of the signals that came; the run saves at its next step and ends."""
    received = []

    def hand_on(number, _):
        received.append(number)
        process.send_signal(number)

    # What this command ignores, as under nohup, its runs inherit as ignored
    numbers = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
