"""Throughput and memory of `pack_tfrecords.py` from file to file.

python -m benchmarks.data_throughput --input_file='instances/*.tfrecord' --json=data_throughput.json
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.runner import Settings, show
from benchmarks.step_memory import MemoryWatch
from benchmarks.synthetic_data import write_sequences
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import read_json

COMMAND = "data_gen.pack_tfrecords"
PACK, AT_ONCE = "pack_tfrecords", "commands at once"
NUM_FILES = 8  # of synthetic records
MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True)
class ThroughputConfig(Settings):
    """Packs your records, or synthetic ones as long as Wikipedia's, by the command pack_tfrecords.py with
    one process, with several, and as that many commands at once that share no work, interleaved.

    The table has records a second of each way, the best of all repeats, since other programs slow single
    runs down and make none faster; and its memory above the imports, the peak of the process that takes
    most and the sum of the peaks of all, the largest of all repeats (empty but on Linux). Commands at
    once are the limit of your machine: cores that share a cache, the memory or a clock do less together
    than each does alone. The seconds of each phase are in the --json of pack_tfrecords.
    """

    input_file: str = setting("", "unpacked TFRecords: paths or globs; empty = synthetic ones")
    num_sequences: int = setting(200_000, "synthetic sequences", minimum=NUM_FILES)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    max_sequences_per_pack: int = setting(3, "most sequences in a pack", minimum=1)
    num_workers: int = setting(2, "processes of the parallel ways", minimum=2)
    repeats: int = setting(3, "measurements of each way", minimum=1)


def main(config):
    """Measure, print and write."""
    with tempfile.TemporaryDirectory(prefix="data_throughput_") as folder:
        runs = measure_packing(config, folder)
    show("data_throughput", config, {"pack from file to file": packing_rows(runs)})


@dataclasses.dataclass(frozen=True)
class PackingRun:
    """A measurement of a way to pack: sequences per second, and memory.

    `largest` and `total` are bytes above the imports, of the process that takes most and of all; None where
    the system does not say.
    """

    rate: float
    largest: int | None
    total: int | None


def measure_packing(config, folder):
    """Interleave the ways to pack: dict from (way, processes) to a list of `PackingRun`."""
    from data_gen import pack_job  # noqa: F401 - the base of `MemoryWatch`: the command imports as much

    input_file = config.input_file
    if not input_file:
        sizes = config.num_sequences, config.max_seq_length, NUM_FILES
        input_file = ",".join(write_sequences(os.path.join(folder, "input"), *sizes))
    ways = (PACK, 1), (PACK, config.num_workers), (AT_ONCE, config.num_workers)
    runs = {way: [] for way in ways}
    for _ in range(config.repeats):
        for (name, processes), found in runs.items():
            with tempfile.TemporaryDirectory(dir=folder) as output:
                shape = (processes, 1) if name == AT_ONCE else (1, processes)
                found.append(_pack_by_commands(input_file, output, config, *shape))
    return runs


def _pack_by_commands(input_file, output, config, num_commands, num_workers):
    """Run commands at the same time, each of which packs the whole input: `PackingRun`."""
    reports = [os.path.join(output, f"{number}.json") for number in range(num_commands)]
    flags = {
        "input_file": input_file,
        "max_seq_length": config.max_seq_length,
        "max_sequences_per_pack": config.max_sequences_per_pack,
        "num_workers": num_workers,
    }
    start = time.perf_counter()
    with MemoryWatch() as watch:
        processes = [
            _start(**flags, output_dir=report.removesuffix(".json"), json=report) for report in reports
        ]
        errors = [process.communicate()[1] for process in processes]
    seconds = time.perf_counter() - start
    for process, error in zip(processes, errors, strict=True):
        if process.returncode:
            raise InputError(error.strip().rpartition("\n")[2].partition("error: ")[2] or error)
    (report,) = read_json(reports[0], list)
    rate = num_commands * report["sequences"] / seconds
    return PackingRun(rate, watch.largest_growth, watch.total_growth)


def _start(**flags):
    command = [sys.executable, "-m", COMMAND, *(f"--{name}={value}" for name, value in flags.items())]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def packing_rows(runs):
    """Rows of a table, from `measure_packing`: the best rate and the largest memory of each way."""
    rates = {way: max(one.rate for one in found) for way, found in runs.items()}
    first, rows = next(iter(rates.values())), []
    for (name, processes), found in runs.items():
        rate = rates[name, processes]
        row = {"way": name, "processes": processes, "sequences/s": rate, "times the first": rate / first}
        for title, key in (("MiB, largest process", "largest"), ("MiB, all processes", "total")):
            sizes = [getattr(one, key) for one in found]
            row[title] = None if None in sizes else max(sizes) / MEBIBYTE
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(run(main, ThroughputConfig))
