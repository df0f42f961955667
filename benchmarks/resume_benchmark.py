"""Command line: how long a pre-training run takes to its first batch, at its start and when it continues.

    python -m benchmarks.resume_benchmark --json=resume_benchmark.json

Packs are small and repeat, so that there may be millions of them: what counts here is their number and their
bytes. Each way is measured `--repeats` times, in turns, in one process that has imported everything, with no
byte of the data in memory (on Linux); the median stands in the table, with what the process read.
"""

import dataclasses
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent import futures

from benchmarks.this_machine import cpu_name
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import check_settings, setting

DESCRIPTION = """
Measures the time to the first batch of training: from the start, and continuing at half an epoch, with and
without what an earlier start found out about the files. Prints the CPU and a table.
"""
NUM_DISTINCT = 2048  # packs; the others repeat them
DEPTH = 2
WAYS = (("start", False), ("start again", True), ("continue at half an epoch, files unknown", False))
LAST_WAY = ("continue at half an epoch", True)


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Settings of one benchmark; checks itself, raises `InputError`."""

    num_packs: int = setting(8_000_000, "packs, in all files", minimum=1)
    num_files: int = setting(64, "files", minimum=1)
    max_seq_length: int = setting(16, "tokens per pack", minimum=8)
    batch_size: int = setting(32, "packs per batch", minimum=1)
    shuffle_buffer_size: int = setting(1000, "packs held to shuffle", minimum=1)
    repeats: int = setting(3, "measurements of each way, of which the median counts", minimum=1)
    work_dir: str = setting("", "folder for the data, removed at the end; empty = a temporary one")
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)


def main(config):
    """Write packs, measure, and print the table."""
    folder = tempfile.mkdtemp(prefix="resume_benchmark_", dir=config.work_dir or None)
    try:
        size = write_packs(config, folder)
        rows = measure_ways(config, folder)
    finally:
        shutil.rmtree(folder)
    print(f"CPU: {cpu_name()}, {os.cpu_count()} cores")
    print(f"data: {config.num_packs:,} packs in {config.num_files} files, {size / 2**20:,.0f} MiB")
    print_table(rows, config.json)


def write_packs(config, folder):
    """Write the files, and a manifest that vouches for them; returns their bytes."""
    from benchmarks.encoding_speed import make_packs
    from bert_packed.core.files import file_sha256
    from bert_packed.core.output_files import write_json
    from bert_packed.records import tfrecords
    from bert_packed.records.example_bytes import serialize_examples

    records = serialize_examples(make_packs(NUM_DISTINCT, config.max_seq_length, DEPTH))
    made, entries = {}, []  # files of equally many packs are copies of one
    for index in range(config.num_files):
        count = config.num_packs * (index + 1) // config.num_files
        count -= config.num_packs * index // config.num_files
        name = f"packed-{index:05d}-of-{config.num_files:05d}.tfrecord"
        path = os.path.join(folder, name)
        if count in made:
            shutil.copyfile(made[count], path)
        else:
            tfrecords.write_records(path, (records[number % NUM_DISTINCT] for number in range(count)))
            made[count] = path
        entries.append({"name": name, "num_records": count, "sha256": file_sha256(path)})
    lengths = {"lengths": [config.max_seq_length // DEPTH], "counts": [DEPTH * config.num_packs]}
    counts = {"num_packs": config.num_packs, "num_sequences": DEPTH * config.num_packs}
    write_json(
        os.path.join(folder, "manifest.json"),
        {"kind": "packed", "files": entries, "histogram": lengths, **counts},
    )
    return sum(os.path.getsize(os.path.join(folder, entry["name"])) for entry in entries)


def measure_ways(config, folder):
    """Seconds to the first batch and MiB read, of each way: rows of a table."""
    ways = (*WAYS, LAST_WAY)
    found = {way: [] for way in ways}
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, context) as pool:
        for _ in range(config.repeats):
            for way in ways:
                found[way].append(pool.submit(_measure, way, config, folder).result())
    rows = []
    for (name, are_known), figures in found.items():
        known, first, num_read = map(list, zip(*figures, strict=True))
        rows.append(
            {
                "way": name,
                "files known": "yes" if are_known else "no",
                "seconds to know the data": statistics.median(known),
                "seconds to the first batch": statistics.median(first),
                "slowest": max(first),
                "MiB read": "not measured" if None in num_read else statistics.median(num_read) / 2**20,
            }
        )
    return rows


def _measure(way, config, folder):
    """One start of a run: seconds to know its data and to have a batch, bytes read."""
    from bert_packed.core.quiet_import import import_quietly

    import_quietly("tensorflow")
    from bert_packed.data.input_pipeline import train_batches
    from bert_packed.runs.pretraining_config import TrainConfig
    from bert_packed.runs.pretraining_data import read_data
    from bert_packed.runs.run_directory import SCANS_FILE

    name, are_known = way
    output = os.path.join(folder, "run")
    store = os.path.join(output, SCANS_FILE)
    stores = [store, os.path.join(folder, SCANS_FILE)]  # the run's, and that beside the files
    settings = TrainConfig(input_file=os.path.join(folder, "*.tfrecord"), output_dir=output)
    if are_known:
        assert os.path.exists(store)  # of the way before
    else:
        for kept in filter(os.path.exists, stores):
            os.remove(kept)
    _forget(folder)
    step = config.num_packs // 2 // config.batch_size if name.startswith("continue") else 0
    before, start = _bytes_read(), time.perf_counter()
    data = read_data(settings)
    known = time.perf_counter() - start
    arguments = (config.batch_size, settings.random_seed, config.shuffle_buffer_size, step)
    batches = train_batches(data.train.index, data.train.spec, *arguments).as_numpy_iterator()
    next(batches)
    first = time.perf_counter() - start
    num_read = None if before is None else _bytes_read() - before
    del batches
    return known, first, num_read


def _forget(folder):
    """Have the system drop the files of a folder from memory, where it can."""
    for path in filter(os.path.isfile, (os.path.join(folder, name) for name in os.listdir(folder))):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            advise = getattr(os, "posix_fadvise", None)
            if advise:
                advise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_read():
    """Bytes that this process has read since it began, from memory or disk; None where no system tells."""
    try:
        with open("/proc/self/io") as file:
            return int(next(line for line in file if line.startswith("rchar")).split()[1])
    except (OSError, StopIteration):
        return None


if __name__ == "__main__":
    sys.exit(run(main, BenchmarkConfig, DESCRIPTION))
