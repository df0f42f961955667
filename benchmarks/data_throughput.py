"""Throughput and memory of writing packs: encoding alone, and `pack_tfrecords.py` from file to file.

python -m benchmarks.data_throughput --input_file='instances/*.tfrecord' --json=data_throughput.json
"""

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent import futures

import numpy as np

from benchmarks.peak_memory import MemoryWatch
from benchmarks.results import Settings, show
from benchmarks.synthetic_data import VOCAB_SIZE, random_packs, spec_of, wikipedia_corpus, write_sequences
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import read_json
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples

COMMAND = "data_gen.pack_tfrecords"
PLAIN, BATCHED = "one Example at a time", "batched"
PACK, AT_ONCE = "pack_tfrecords", "commands at once"
NUM_FILES = 8  # of synthetic records
PACKS_AT_ONCE = 512  # encoded together, as pack_tfrecords does
PLAIN_SHARE = 8  # the straightforward way has this part of the data: it is as slow for few as for many
MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True)
class ThroughputConfig(Settings):
    """Packs your records, or synthetic ones as long as Wikipedia's, by the command pack_tfrecords.py with
    one process, with several, and as that many commands at once that share no work, interleaved; and, on
    an eighth of the records, by the straightforward way of one Example at a time with all data in memory.
    Also encodes and writes packs alone.

    Tables: records a second of each way, the best of all repeats, since other programs slow single runs
    down and make none faster; its memory above the imports, the peak of the process that takes most and
    the sum of the peaks of all, the largest of all repeats (empty but on Linux); and the seconds of each
    phase, with one process and with several. Commands at once are the limit of your machine: cores that
    share a cache, the memory or a clock do less together than each does alone.
    """

    input_file: str = setting("", "unpacked TFRecords: paths or globs; empty = synthetic ones")
    num_sequences: int = setting(200_000, "synthetic sequences", minimum=NUM_FILES)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    max_sequences_per_pack: int = setting(3, "most sequences in a pack", minimum=1)
    num_workers: int = setting(2, "processes of the parallel ways", minimum=2)
    repeats: int = setting(3, "measurements of each way", minimum=1)
    plain: bool = setting(True, "also measure the straightforward way, of synthetic records alone")
    encoding: bool = setting(True, "also measure encoding alone")


def main(config):
    """Measure, print and write."""
    tables = {}
    if config.encoding:
        tables["encode and write packs"] = encoding_rows(config)
    with tempfile.TemporaryDirectory(prefix="data_throughput_") as folder:
        runs = measure_packing(config, folder)
    tables["pack from file to file"] = packing_rows(runs)
    tables["phases"] = phase_rows(runs)
    show("data_throughput", config, tables)


def encoding_rows(config):
    """Interleave encoding in one process and in several: rows of a table."""
    num_rounds = max(1, config.num_sequences // (8 * PACKS_AT_ONCE))
    sizes = config.max_seq_length, config.max_sequences_per_pack
    ways = [(BATCHED, 1), (BATCHED, config.num_workers)]
    if config.plain:
        ways.insert(0, (PLAIN, 1))
    rates = {way: [] for way in ways}
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(config.num_workers) as pool:
        for _ in range(config.repeats):
            for (name, processes), found in rates.items():
                barrier = manager.Barrier(processes)  # none encodes while another still makes its packs
                work = [(name, num_rounds, *sizes, barrier)] * processes
                found.append(sum(pool.map(packs_per_second, work, chunksize=1)))
    return rate_rows("packs", {way: max(found) for way, found in rates.items()})


def packs_per_second(arguments):
    """Packs per second that this process encodes and writes to a file, when all processes are ready."""
    name, num_rounds, max_seq_length, depth, barrier = arguments
    encode, num_packs = serialize_examples, num_rounds * PACKS_AT_ONCE
    if name == PLAIN:
        from benchmarks.plain_packing import serialize_one_by_one as encode  # TensorFlow

        num_rounds, num_packs = 1, max(1, num_packs // PLAIN_SHARE)
    arrays = make_packs(num_packs // num_rounds, max_seq_length, depth)
    with tempfile.NamedTemporaryFile(suffix=".tfrecord") as file:
        tfrecords.write_records(file.name, [b"warm"])
        barrier.wait()
        start = time.perf_counter()
        tfrecords.write_records(file.name, (one for _ in range(num_rounds) for one in encode(arrays)))
        return num_packs / (time.perf_counter() - start)


def make_packs(num_packs, max_seq_length, depth):
    """The arrays of packed records with Wikipedia's lengths: dict from feature to `[num_packs, ...]`."""
    corpus, rng = wikipedia_corpus(max_seq_length, depth), np.random.default_rng(0)
    spec = spec_of(corpus.plan.strategies, max_seq_length)
    return random_packs(corpus.draw_packs(num_packs, rng), spec, VOCAB_SIZE, rng)


@dataclasses.dataclass(frozen=True)
class PackingRun:
    """A measurement of a way to pack: sequences per second, memory and seconds of phases.

    `largest` and `total` are bytes above the imports, of the process that takes most and of all; None where
    the system does not say.
    """

    rate: float
    largest: int | None
    total: int | None
    phases: dict


def measure_packing(config, folder):
    """Interleave the ways to pack: dict from (way, processes) to a list of `PackingRun`."""
    from data_gen import pack_job  # noqa: F401 - the base of `MemoryWatch`: the command imports as much

    paths = [config.input_file]
    ways = [(PACK, 1), (PACK, config.num_workers), (AT_ONCE, config.num_workers)]
    if not config.input_file:
        sizes = config.num_sequences, config.max_seq_length, NUM_FILES
        paths = write_sequences(os.path.join(folder, "input"), *sizes)
        if config.plain:
            ways.insert(0, (PLAIN, 1))
    runs = {way: [] for way in ways}
    for _ in range(config.repeats):
        for (name, processes), found in runs.items():
            with tempfile.TemporaryDirectory(dir=folder) as output:
                if name == PLAIN:
                    found.append(_pack_plainly(paths[0], output, config))
                else:
                    shape = (processes, 1) if name == AT_ONCE else (1, processes)
                    found.append(_pack_by_commands(",".join(paths), output, config, *shape))
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
    return PackingRun(rate, watch.largest_growth, watch.total_growth, report["phases"])


def _start(**flags):
    command = [sys.executable, "-m", COMMAND, *(f"--{name}={value}" for name, value in flags.items())]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _pack_plainly(path, output, config):
    """Pack one file in the straightforward way, in a new process: `PackingRun`."""
    # Memory never shrinks: each measurement needs a process that has packed nothing before
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        sizes = config.max_seq_length, config.max_sequences_per_pack
        return pool.submit(plain_run, path, os.path.join(output, "packs.tfrecord"), *sizes).result()


def plain_run(path, target, max_seq_length, depth):
    """Pack one file in the straightforward way: `PackingRun`."""
    from benchmarks.plain_packing import pack_plainly  # imports TensorFlow: not in the memory

    start = time.perf_counter()
    with MemoryWatch() as watch:
        num_sequences = pack_plainly([path], target, max_seq_length, depth)
    rate = num_sequences / (time.perf_counter() - start)
    return PackingRun(rate, watch.largest_growth, watch.total_growth, {})


def packing_rows(runs):
    """Rows of a table, of `measure_packing`: the best rate and the largest memory of each way."""
    rows = rate_rows("sequences", {way: max(one.rate for one in found) for way, found in runs.items()})
    for row, found in zip(rows, runs.values(), strict=True):
        for title, name in (("MiB, largest process", "largest"), ("MiB, all processes", "total")):
            sizes = [getattr(one, name) for one in found]
            row[title] = None if None in sizes else max(sizes) / MEBIBYTE
    return rows


def phase_rows(runs):
    """Phases of the fastest commands with one process and with several: rows of a table."""
    one, several = (
        max(found, key=lambda run: run.rate).phases for (name, _), found in runs.items() if name == PACK
    )
    return [
        {
            "phase": phase,
            "one process, s": one[phase],
            "several, s": several[phase],
            "times": one[phase] / several[phase] if several[phase] else None,
        }
        for phase in one
        if phase in several
    ]


def rate_rows(unit, rates):
    """Rows of a table: rates of ways, each in units of the first too."""
    first = next(iter(rates.values()))
    return [
        {"way": name, "processes": processes, f"{unit}/s": rate, "times the first": rate / first}
        for (name, processes), rate in rates.items()
    ]


if __name__ == "__main__":
    sys.exit(run(main, ThroughputConfig))
