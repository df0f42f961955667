"""Command line: how fast packs are written, against the straightforward way, and in how much memory.

    python -m benchmarks.data_benchmark --json=data_benchmark.json

Every way is measured `--repeats` times, in turns, and its best time stands in the table: other programs slow
single runs down, but none makes one faster. Memory is above the imports, at the peak of each process: of the
process that takes most, and the sum over the one that packs and its workers. The largest of all runs stands
in the table; "not measured" where the system does not tell, which is everywhere but on Linux.
"""

import dataclasses
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent import futures

from benchmarks.peak_memory import MemoryWatch
from benchmarks.this_machine import cpu_name
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import check_settings, setting

DESCRIPTION = """
Measures packing on synthetic records: encoding packs as TFRecords, and the whole of pack_tfrecords, against
the straightforward way of one Example at a time. Prints the CPU, and a table with the peak memory above the
imports: of the process that takes most, and summed over all.
"""
NOT_MEASURED = "not measured"
MEMORY_COLUMNS = ("MiB, largest process", "MiB, all processes")
PACKS_PER_ROUND = 512  # encoded at once, as pack_tfrecords does


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Settings of one benchmark; checks itself, raises `InputError`."""

    num_sequences: int = setting(200_000, "sequences to pack", minimum=16)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    max_sequences_per_pack: int = setting(3, "most sequences in a pack", minimum=1)
    num_workers: int = setting(2, "processes of the parallel way", minimum=1)
    repeats: int = setting(3, "measurements of each way, of which the best counts", minimum=1)
    plain: bool = setting(True, "also measure the straightforward way, which holds all data in memory")
    encoding: bool = setting(True, "also measure encoding alone, without files to read")
    work_dir: str = setting("", "folder for the data, removed at the end; empty = a temporary one")
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)


def main(config):
    """Measure, and print the table."""
    folder = tempfile.mkdtemp(prefix="data_benchmark_", dir=config.work_dir or None)
    try:
        rows = encoding_rows(config) if config.encoding else []
        rows += packing_rows(config, folder)
    finally:
        shutil.rmtree(folder)
    print(f"CPU: {cpu_name()}, {os.cpu_count()} cores")
    print_table(rows, config.json)


def encoding_rows(config):
    """Packs encoded and written per second: one Example at a time, batched, and by several processes."""
    from benchmarks.encoding_speed import measure_batched, measure_plain

    num_rounds = max(1, config.num_sequences // (8 * PACKS_PER_ROUND))
    arguments = (num_rounds, PACKS_PER_ROUND, config.max_seq_length, config.max_sequences_per_pack)
    ways = [("batched", 1), ("batched", config.num_workers)]
    if config.plain:
        ways.insert(0, ("one Example at a time", 1))
    rates = dict.fromkeys(ways, 0.0)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(config.num_workers) as pool:
        for _ in range(config.repeats):
            for name, processes in rates:
                measure = measure_plain if name != "batched" else measure_batched
                barrier = manager.Barrier(processes)
                found = pool.map(measure, [(*arguments, barrier)] * processes, chunksize=1)
                rates[name, processes] = max(rates[name, processes], sum(found))
    return _rows("encode and write packs", "packs", rates)


def packing_rows(config, folder):
    """Sequences packed per second from file to file, with the peak memory above the imports, in MiB."""
    from benchmarks.synthetic_data import write_sequences

    paths = write_sequences(os.path.join(folder, "input"), config.num_sequences, config.max_seq_length, 8)
    ways = [("pack_tfrecords", 1), ("pack_tfrecords", config.num_workers)]
    if config.plain:
        ways.insert(0, ("one Example at a time", 1))
    rates, growths = dict.fromkeys(ways, 0.0), {way: [] for way in ways}
    context = multiprocessing.get_context("spawn")
    for _ in range(config.repeats):
        for way in rates:
            # a process for each: its peak memory is its own
            with futures.ProcessPoolExecutor(1, context) as pool:
                rate, *growth = pool.submit(_measure_packing, way, paths, folder, config).result()
            rates[way] = max(rates[way], rate)
            growths[way].append(growth)
    rows = _rows("pack from file to file", "sequences", rates)
    for row, way in zip(rows, rates, strict=True):
        for name, found in zip(MEMORY_COLUMNS, zip(*growths[way], strict=True), strict=True):
            row[name] = NOT_MEASURED if None in found else max(found) / 2**20
    return rows


def _measure_packing(way, paths, folder, config):
    """Pack once, in a fresh process: sequences per second, and the growths that `MemoryWatch` found."""
    from data_gen.pack_config import PackConfig
    from data_gen.pack_job import pack

    name, num_workers = way
    is_plain = name != "pack_tfrecords"
    if is_plain:  # imports TensorFlow: below it, what the workers of packing take would not show
        from benchmarks.plain_packing import pack_plainly
    output = os.path.join(folder, "output")
    os.makedirs(output)
    start = time.perf_counter()
    with MemoryWatch() as watch:
        if not is_plain:
            pack(
                PackConfig(
                    input_file=",".join(paths),
                    output_dir=output,
                    max_seq_length=config.max_seq_length,
                    max_sequences_per_pack=config.max_sequences_per_pack,
                    algorithm="lpfhp",
                    num_workers=num_workers,
                )
            )
        else:
            target = os.path.join(output, "packs.tfrecord")
            # one file of several: this way is as slow for few sequences as for many
            pack_plainly(paths[:1], target, config.max_seq_length, config.max_sequences_per_pack)
    seconds = time.perf_counter() - start
    shutil.rmtree(output)
    num_sequences = config.num_sequences / (len(paths) if is_plain else 1)
    return num_sequences / seconds, watch.largest_growth, watch.total_growth


def _rows(work, unit, rates):
    slowest = next(iter(rates.values()))
    return [
        {
            "work": work,
            "way": name,
            "processes": processes,
            "unit": unit,
            "per second": rate,
            "times the first": rate / slowest,
            **dict.fromkeys(MEMORY_COLUMNS, NOT_MEASURED),
        }
        for (name, processes), rate in rates.items()
    ]


if __name__ == "__main__":
    sys.exit(run(main, BenchmarkConfig, DESCRIPTION))
