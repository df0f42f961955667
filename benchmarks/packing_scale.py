"""Reads of `pack` at many runs, counted in miniature, and what large corpora would take, estimated.

python -m benchmarks.packing_scale --json=packing_scale.json
"""

import contextlib
import dataclasses
import itertools
import math
import os
import sys
import tempfile
from unittest import mock

from benchmarks.runner import Settings, show
from benchmarks.step_memory import MemoryWatch
from benchmarks.synthetic_data import write_sequences
from bert_packed.core import storage
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting
from bert_packed.records import tfrecords
from data_gen import pack_steps
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

TINY_LENGTH = 16  # tokens in a pack, of which one sequence takes 12 or more
CALCULATED = (10_000, 100_000, 1_000_000)  # runs that take too long to read
# Tokens, by the corpora's own counts
CORPORA = {
    "Wikipedia": 4.2e9,  # 16,279,552 sequences of the papers' histogram
    "C4": 156e9,  # English, Dodge et al. 2021
    "FineWeb-Edu": 1.3e12,  # its card, in GPT-2's tokens
    "ten billion sequences": None,
}
# Packs, and the longest of the sequences that are measured for them, which are documents for the second
LENGTHS = {512: 512, 8192: 2048}
HOUR = 3600


@dataclasses.dataclass(frozen=True)
class ScaleConfig(Settings):
    """Packs tiny runs of one sequence on one level, where every part reads a piece of every run, and on two,
    and counts the pieces and bytes that are read. Then measures `pack` with one process and runs of up to
    128 MiB, merged once, and estimates from these rates what larger corpora would take.
    """

    runs: str = setting("100,300,1000", "numbers of tiny runs, with commas")
    num_sequences: int = setting(200_000, "of up to 512 tokens that rates are measured with", minimum=64)


def main(config):
    """Count, measure, print and write."""
    with tempfile.TemporaryDirectory(prefix="packing_scale_") as folder:
        reads = [
            count_reads(int(number), levels, folder) for number in config.runs.split(",") for levels in (1, 2)
        ]
        rates = [measure_rates(config, length, folder) for length in LENGTHS]
    bytes_a_piece = 1e6 * reads[-1]["MB read"] / reads[-1]["pieces, counted"]
    for number, levels in itertools.product(CALCULATED, (1, 2)):
        pieces = count_pieces(number, number, levels)
        reads.append(_row_of_reads(number, levels, None, pieces, bytes_a_piece * pieces))
    estimates = [estimate(name, rate) for name in CORPORA for rate in rates]
    tables = {"reads": reads, "rates": rates, "estimates": estimates}
    show("packing_scale", config, tables, ["Core-hours of corpora are estimates by these rates."])


@dataclasses.dataclass
class Counts:
    """What is read of sorted runs, and written to them."""

    pieces: int = 0
    read: int = 0
    written: int = 0


class CountedFile:
    """A file whose bytes are counted."""

    def __init__(self, file, counts):
        self._file, self._counts = file, counts

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    def seek(self, place):
        self._file.seek(place)

    def read(self, size):
        content = self._file.read(size)
        self._counts.read += len(content)
        return content

    def write(self, content):
        self._counts.written += len(content)
        self._file.write(content)


@contextlib.contextmanager
def counting(fan_in, run_bytes, batch):
    """Pack with other sizes in the block, which gets the `Counts`."""
    counts, open_file = Counts(), storage.open_file

    def open_counted(path, mode="rb", buffering=-1):
        file = open_file(path, mode, buffering)
        if not os.path.basename(path).startswith("sorted-"):
            return file
        counts.pieces += mode == "rb"
        return CountedFile(file, counts)

    sizes = {"FAN_IN": fan_in, "RUN_BYTES": run_bytes, "MAX_RUN_BYTES": run_bytes}
    with (
        mock.patch.multiple(pack_steps, **sizes),
        mock.patch.object(tfrecords, "READ_BATCH", batch),
        mock.patch.object(storage, "open_file", open_counted),
    ):
        yield counts


def count_reads(num_runs, num_levels, folder):
    """Pack some tiny runs on some levels: a row of a table."""
    name = os.path.join(folder, f"tiny-{num_runs}-{num_levels}")
    paths = write_sequences(name, num_runs, TINY_LENGTH, num_files=1)
    fan_in = math.ceil(num_runs ** (1 / num_levels))
    # A flush of each tiny file takes longer than all else
    with counting(fan_in, 1, 1) as counts, mock.patch.object(storage, "flush_to_disk"):
        _, manifest = _pack(",".join(paths), TINY_LENGTH, f"{name}-out")
    calculated = count_pieces(num_runs, manifest["num_packs"], num_levels)
    return _row_of_reads(num_runs, num_levels, counts.pieces, calculated, counts.read)


def count_pieces(num_runs, num_parts, num_levels):
    """Number of pieces that packing reads, of the files that its steps name."""
    work = pack_steps.PackWork(None, "", num_runs, num_parts, num_levels)
    merged = 0
    for level in range(1, num_levels):
        numbers, spans = work.places(level)
        merged += len(spans) * sum(len(work.sorted_paths(level - 1, number, 0)) for number in numbers)
    return merged + 2 * num_parts * len(work.sorted_paths(num_levels - 1, 0, 0))  # measured, then written


def _row_of_reads(num_runs, num_levels, counted, calculated, num_bytes):
    return {
        "runs and parts": num_runs,
        "levels": num_levels,
        "pieces, counted": counted,
        "pieces, calculated": calculated,
        "of a run": calculated / num_runs,
        "MB read": num_bytes / 1e6,
    }


def measure_rates(config, max_seq_length, folder):
    """Pack full runs with one process, merged once: a row of a table."""
    longest = LENGTHS[max_seq_length]
    name = os.path.join(folder, f"full-{max_seq_length}")
    num_sequences = config.num_sequences * 512 // longest
    paths = write_sequences(name, num_sequences, longest, num_files=1)
    run_bytes = min(512 * config.num_sequences, pack_steps.MAX_RUN_BYTES)  # three or more
    batch = min(tfrecords.READ_BATCH, num_sequences // 8)
    with MemoryWatch() as watch, counting(2, run_bytes, batch) as counts:
        phases, manifest = _pack(",".join(paths), max_seq_length, f"{name}-out")
    num_tokens = manifest["num_packs"] * max_seq_length * manifest["efficiency"]
    num_levels = sum(phase.startswith("merge") for phase in phases) + 1
    packed = sum(os.path.getsize(f"{name}-out/{entry['name']}") for entry in manifest["files"])
    return {
        "tokens in a pack": max_seq_length,
        "tokens in a sequence": num_tokens / manifest["num_sequences"],
        "tokens/s": num_tokens / _seconds(phases, ""),
        "tokens/s of a merge": num_tokens * (num_levels - 1) / max(_seconds(phases, "merge"), 1e-9),
        "bytes a token, runs": counts.written / num_levels / num_tokens,
        "bytes a token, packs": packed / num_tokens,
        "MiB, process": (watch.largest_growth or 0) / 2**20,
    }


def estimate(name, rate):
    """What a corpus would take at measured rates: a row of a table."""
    tokens = CORPORA[name] or 1e10 * rate["tokens in a sequence"]
    runs = math.ceil(tokens * rate["bytes a token, runs"] / pack_steps.MAX_RUN_BYTES)
    levels = pack_steps.choose_num_levels(runs)
    # The rate is of a job with one merge
    seconds = tokens / rate["tokens/s"] + (levels - 2) * tokens / rate["tokens/s of a merge"]
    return {
        "corpus": name,
        "tokens in a pack": rate["tokens in a pack"],
        "sequences": tokens / rate["tokens in a sequence"],
        "runs": runs,
        "levels": levels,
        "core-hours": seconds / HOUR,
        "of these, merging": (levels - 1) * tokens / rate["tokens/s of a merge"] / HOUR,
        "GB of runs": tokens * rate["bytes a token, runs"] / 1e9,
        "GB of packs": tokens * rate["bytes a token, packs"] / 1e9,
        "MiB, process": rate["MiB, process"],
    }


def _pack(paths, max_seq_length, output):
    phases = {}
    config = PackConfig(input_file=paths, output_dir=output, max_seq_length=max_seq_length, num_workers=1)
    return phases, pack(config, phases)


def _seconds(phases, *starts):
    return sum(seconds for phase, seconds in phases.items() if phase.startswith(starts))


if __name__ == "__main__":
    sys.exit(run(main, ScaleConfig))
