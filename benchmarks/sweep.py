"""Sets of training runs, one command after another, each of which continues where it was stopped.

DIR/NAME is the output directory of a run. Whether a run is complete, may continue, or was made under other
flags or on other files is decided by its command, as for any run.
"""

import collections
import dataclasses
import math
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.runner import Settings
from bert_packed.core.command_line import TOP, parse
from bert_packed.core.settings import InputError, setting
from bert_packed.records.inputs import find_files, folder_of
from bert_packed.records.provenance import read_manifest
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.tasks.squad.config import SquadConfig

PRETRAINING, SQUAD = "run_pretraining.py", "run_squad.py"
CONFIGS = {PRETRAINING: PretrainingConfig, SQUAD: SquadConfig}
WARMUP_SHARE = 0.1  # of the steps of a pre-training
MOST_UNEVEN = 0.05


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a training command."""

    name: str  # of its folder, `VARIANT-seedN`
    flags: dict  # without `output_dir`; an empty value is left out
    more_flags: str = ""  # as one text; they come last
    program: str = PRETRAINING


def parse_seeds(text):
    """Check different whole numbers with commas; raises `ValueError`."""
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
        raise ValueError("different whole numbers, separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class SweepConfig(Settings):
    """Flags of every set of runs; checks itself, raises `InputError`."""

    output_dir: str = setting("", "where the runs and the pictures go", required=True)
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
    # An equal number of sequences is not enough: other ones of other lengths would be compared
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
        None where all are complete, else an exit status: that of the run that failed or was stopped.
    """
    check_runs(runs, config.output_dir)
    if config.print_commands:
        print(*(shlex.join(command_of(run, config.output_dir)) for run in runs), sep="\n")
        return 0
    for number, run in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {run.name}", flush=True)
        if status := take(run, config.output_dir):
            print(f"{run.name} ended with status {status}; the same command continues", file=sys.stderr)
            return status
    return None


def take(run, folder):
    """Take a run, or continue it; returns its exit status. Ctrl-C reaches it too: it saves and ends."""
    return subprocess.Popen(command_of(run, folder), stdin=subprocess.DEVNULL).wait()
