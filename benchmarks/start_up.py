"""Time until a command starts to work: to its help, to a missing input, to the first batch of a training.

python -m benchmarks.start_up
python -m benchmarks.start_up --of=first_batch --json=first_batch.json
"""

import dataclasses
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures

import numpy as np

from benchmarks.results import Settings, show
from benchmarks.synthetic_data import VOCAB_SIZE, random_packs, spec_of
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, check_divides, setting
from bert_packed.core.storage import file_sha256, write_json
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples

PARTS = COMMANDS_PART, FIRST_BATCH = "commands", "first_batch"


MISSING = "there-is-no-such-file"
MISTAKE = 2  # exit status
# Arguments of Python, and flags; those without a value name an input that a command looks for, or an output
COMMANDS = {
    "create_pretraining_data": ("data_gen.create_pretraining_data", "--input_file", "--output_dir"),
    "pack_tfrecords": ("data_gen.pack_tfrecords", "--input_file", "--output_dir"),
    "verify_tfrecords": ("data_gen.verify_tfrecords", "--input_file", "--packed_file"),
    "find_sources": ("data_gen.find_sources", "--packed_file"),
    "run_pretraining": ("run_pretraining", "--input_file", "--output_dir"),
    "run_squad": ("run_squad", "--train_file", "--init_checkpoint", "--output_dir"),
    "finetune_glue": (
        *("bert_packed.finetune_glue", "--task_name=CoLA"),
        *("--data_dir", "--init_checkpoint", "--output_dir"),
    ),
    "finetune_ner": (
        "bert_packed.finetune_ner",
        *("--train_file", "--predict_file", "--init_checkpoint", "--output_dir"),
    ),
    "audit": ("bert_packed.audit", "--init_checkpoint", "--input_file"),
    "export": ("bert_packed.export", "--init_checkpoint", "--output_dir"),
    "squad_eval": ("bert_packed.squad_eval", "--data_file", "--prediction_file"),
    "train_from_text": ("bert_packed.train_from_text", "--input_file", "--output_dir"),
}
NUM_DISTINCT = 2048  # packs; the others repeat them
LENGTH, DEPTH = 8, 2  # tokens of a sequence, sequences of a pack
START, AGAIN, UNKNOWN, CONTINUE = (
    *("start", "start again", "continue at half an epoch, files unknown", "continue at half an epoch"),
)
WAYS = {START: False, AGAIN: True, UNKNOWN: False, CONTINUE: True}  # to whether files are known


@dataclasses.dataclass(frozen=True)
class StartConfig(Settings):
    """commands     starts each command of the package in a process, with --help and with an input that does not
                 exist, and prints the seconds until it ends: imports above all
    first_batch  writes many small packs, and measures a training to its first batch: from the start, and
                 continuing at half an epoch, with and without what an earlier start found out about the files; in
                 a process that has imported everything, with no byte of the data in memory (on Linux)

    Medians of all repeats.
    """

    of: str = setting(COMMANDS_PART, "what to start", choices=PARTS)
    num_packs: int = setting(8_000_000, "packs, in all files", minimum=1, only_with=f"of={FIRST_BATCH}")
    num_files: int = setting(64, "files", minimum=1, only_with=f"of={FIRST_BATCH}")
    repeats: int = setting(3, "measurements of each, whose median counts", minimum=1)

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "num_files", "num_packs")


def main(config):
    """Measure, print and write."""
    if config.of == COMMANDS_PART:
        return show("start_up", config, {"commands": command_rows(config.repeats)})
    with tempfile.TemporaryDirectory(prefix="start_up_") as folder:
        size = write_packs(config, folder)
        rows = first_batch_rows(config, folder)
    note = f"{config.num_packs:,} packs in {config.num_files} files, {size / 2**20:,.0f} MiB"
    return show("start_up", config, {"first batch": rows}, [note])


def command_rows(repeats):
    """Start each command with its help and with a missing input: rows of a table."""
    ways = {"--help": True, "missing input": False}
    found = {(name, way): [] for name in COMMANDS for way in ways}
    for _ in range(repeats):
        for name, way in found:
            found[name, way].append(start(name, is_help=ways[way]))
    return [
        {"command": name, **{f"{way}, s": statistics.median(found[name, way]) for way in ways}}
        for name in COMMANDS
    ]


def start(name, is_help):
    """Start a command once; returns its seconds. `InputError` where it did not end as it must."""
    module, *flags = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, MISSING)
        arguments = ["--help"] if is_help else [flag if "=" in flag else f"{flag}={target}" for flag in flags]
        begin = time.perf_counter()
        ended = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
        seconds = time.perf_counter() - begin
    rule = "0" if is_help else f"{MISTAKE}, and name what is missing"
    if ended.returncode != (0 if is_help else MISTAKE) or not (is_help or target in ended.stderr):
        raise InputError(
            f"{name} must end with status {rule}. Received: {ended.returncode}, {ended.stderr.strip()[-200:]}"
        )
    return seconds


def write_packs(config, folder):
    """Write the files, and a manifest that vouches for them; returns their bytes."""
    packs, length = [(LENGTH,) * DEPTH] * NUM_DISTINCT, LENGTH * DEPTH
    arrays = random_packs(packs, spec_of(packs, length), VOCAB_SIZE, np.random.default_rng(0))
    records, per_file = serialize_examples(arrays), config.num_packs // config.num_files
    names = [f"packed-{i:05d}-of-{config.num_files:05d}.tfrecord" for i in range(config.num_files)]
    first, *others = (os.path.join(folder, name) for name in names)
    tfrecords.write_records(first, (records[number % NUM_DISTINCT] for number in range(per_file)))
    for path in others:  # one file again and again: their number and their bytes count
        shutil.copyfile(first, path)
    num_packs, sha256 = per_file * config.num_files, file_sha256(first)
    manifest = {
        "kind": "packed",
        "files": [{"name": name, "num_records": per_file, "sha256": sha256} for name in names],
        "histogram": {"lengths": [LENGTH], "counts": [DEPTH * num_packs]},
        "num_packs": num_packs,
        "num_sequences": DEPTH * num_packs,
    }
    write_json(os.path.join(folder, "manifest.json"), manifest)
    return config.num_files * os.path.getsize(first)


def first_batch_rows(config, folder):
    """Interleave the ways to start a training on the packs of a folder: rows of a table."""
    found = {way: [] for way in WAYS}
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for _ in range(config.repeats):
            for way in WAYS:
                found[way].append(pool.submit(first_batch, way, config, folder).result())
    rows = []
    for way, figures in found.items():
        known, first, num_read = map(list, zip(*figures, strict=True))
        rows.append(
            {
                "way": way,
                "files known": "yes" if WAYS[way] else "no",
                "seconds to know the data": statistics.median(known),
                "seconds to the first batch": statistics.median(first),
                "MiB read": None if None in num_read else statistics.median(num_read) / 2**20,
            }
        )
    return rows


def first_batch(way, config, folder):
    """Start a training once: seconds to know its data, seconds to have a batch, bytes read."""
    from bert_packed.core.runtime import import_quietly

    import_quietly("tensorflow")
    from bert_packed.data.input_pipeline import train_batches
    from bert_packed.runs.pretraining_config import PretrainingConfig
    from bert_packed.runs.pretraining_data import read_data
    from bert_packed.runs.run_directory import SCANS_FILE

    output = os.path.join(folder, "run")
    settings = PretrainingConfig(input_file=os.path.join(folder, "*.tfrecord"), output_dir=output)
    if not WAYS[way]:
        for store in (os.path.join(output, SCANS_FILE), os.path.join(folder, SCANS_FILE)):
            if os.path.exists(store):
                os.remove(store)
    forget(folder)  # else a start after another reads from memory
    step = config.num_packs // 2 // settings.train_batch_size if way in (UNKNOWN, CONTINUE) else 0
    before, begin = bytes_read(), time.perf_counter()
    data = read_data(settings)
    known = time.perf_counter() - begin
    sizes = settings.train_batch_size, settings.random_seed, settings.shuffle_buffer_size, step
    next(train_batches(data.train.index, data.train.spec, *sizes))
    first = time.perf_counter() - begin
    return known, first, None if before is None else bytes_read() - before


def forget(folder):
    """Have the system drop the files of a folder from memory, where it can."""
    for path in filter(os.path.isfile, (os.path.join(folder, name) for name in os.listdir(folder))):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bytes_read():
    """Bytes that this process has read since it began, from memory or disk; None where no system says."""
    try:
        with open("/proc/self/io") as file:
            return int(next(line for line in file if line.startswith("rchar")).split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(run(main, StartConfig))
