"""Command line: what several processes gain in packing, phase by phase, start-up and imports included.

    python -m benchmarks.packing_processes --input_file='instances/*.tfrecord' --json=processes.json

The command `pack_tfrecords.py` runs with one process, with several, and as several commands at once, of one
process each, in turns, so that a machine that slows down slows all; medians stand in the table. The last way
is what to compare with: cores that share a cache, the memory or a clock, or that a host has lent out twice,
do less together than each does alone, whatever the program.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent import futures
from pathlib import Path

from benchmarks.this_machine import cpu_name
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError, check_settings, setting
from data_gen.jobs.runners import num_cores

DESCRIPTION = """
Runs pack_tfrecords.py on your records with one process, with several, and as that many commands at once that
share no work, in turns. Prints the CPU and a table: seconds of each phase, of processors too, and how many
times as fast several processes are. The last lines are the whole command, from its start to its end, and the
commands at once, as long as the work of one of them took: what your cores let several processes gain.
"""
COMMAND = Path(__file__).parents[1] / "data_gen" / "pack_tfrecords.py"
WHOLE = "whole command"
AT_ONCE = "commands at once"


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """Settings of the measurement; checks itself, raises `InputError`."""

    input_file: str = setting("", "unpacked TFRecords to pack: comma-separated paths or globs")
    num_workers: int = setting(2, "processes of the parallel way", minimum=2)
    max_seq_length: int = setting(512, "tokens per pack", minimum=3)
    repeats: int = setting(3, "runs of each way, whose median counts", minimum=1)
    work_dir: str = setting(
        "", "folder for `num_workers` sets of packs, removed at the end; empty = temporary"
    )
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        if not self.input_file:
            raise InputError("`input_file` must be given. Received: ''.")


def main(config):
    """Measure, and print the table."""
    folder = tempfile.mkdtemp(prefix="packing_processes_", dir=config.work_dir or None)
    alone, several, at_once = [], [], []
    try:
        for _ in range(config.repeats):
            alone.append(_pack(config, 1, folder))
            several.append(_pack(config, config.num_workers, folder))
            at_once.append(_pack_at_once(config, folder))
    finally:
        shutil.rmtree(folder)
    rows, num_sequences = compare_phases(alone, several)
    print(f"CPU: {cpu_name()}, {num_cores()} cores; {num_sequences:,} sequences")
    print_table([*rows, compare_at_once(rows[-1], at_once)], config.json)


def compare_phases(alone, several):
    """The phases of one process beside those of several.

    Args:
        alone, several: Lists of what `pack_tfrecords.py --json` wrote, a dict a run.

    Returns:
        List of rows, dicts, the last of which is the whole command; and the number of sequences.
    """
    names = [phase["phase"] for phase in alone[0]["phases"]]
    rows = []
    for place, name in enumerate([*names, WHOLE]):
        row = {"phase": name}
        for title, runs in (("one", alone), ("several", several)):
            phases = [run["phases"] if name == WHOLE else [run["phases"][place]] for run in runs]
            row[f"{title}, s"] = statistics.median(map(_seconds, phases))
            row[f"{title}, CPU s"] = statistics.median(map(_cpu_seconds, phases))
        row["times"] = row["one, s"] / row["several, s"] if row["several, s"] else None
        rows.append(row)
    return rows, alone[0]["sequences"]


def compare_at_once(whole, at_once):
    """What is gained by commands that share no work: the last row of the table.

    Args:
        whole: Row of the whole command, from `compare_phases`.
        at_once: List of lists of what `pack_tfrecords.py --json` wrote, of the commands that ran at the same
            time.

    Returns:
        Row like `whole`. The seconds of several are those until the last command ended, divided by their
        number: so long took the work of one.
    """
    seconds = [max(_seconds(run["phases"]) for run in runs) / len(runs) for runs in at_once]
    cpu_seconds = [statistics.mean(_cpu_seconds(run["phases"]) for run in runs) for runs in at_once]
    found = {"several, s": statistics.median(seconds), "several, CPU s": statistics.median(cpu_seconds)}
    return {**whole, "phase": AT_ONCE, **found, "times": whole["one, s"] / found["several, s"]}


def _seconds(phases):
    return phases[-1]["end"] - phases[0]["begin"]


def _cpu_seconds(phases):
    return sum(phase["parent_cpu"] + (phase["workers_cpu"] or 0.0) for phase in phases)


def _pack_at_once(config, folder):
    """Pack the same by each of several commands at the same time: list of what `_pack` returns."""
    folders = [tempfile.mkdtemp(dir=folder) for _ in range(config.num_workers)]
    with futures.ThreadPoolExecutor(config.num_workers) as pool:
        return list(pool.map(lambda one: _pack(config, 1, one), folders))


def _pack(config, num_workers, folder):
    """Pack once: what the command's `--json` holds; raises `InputError` with what it says."""
    report = os.path.join(folder, "report.json")
    flags = {
        "input_file": config.input_file,
        "output_dir": os.path.join(folder, "packs"),
        "max_seq_length": config.max_seq_length,
        "num_workers": num_workers,
        "json": report,
    }
    command = [sys.executable, str(COMMAND), *(f"--{name}={value}" for name, value in flags.items())]
    paths = [str(COMMAND.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise InputError(done.stderr.strip().rpartition("\n")[2].partition("error: ")[2] or done.stderr)
    shutil.rmtree(flags["output_dir"])
    (row,) = json.loads(Path(report).read_text())
    return row


if __name__ == "__main__":
    sys.exit(run(main, ProcessesConfig, DESCRIPTION))
