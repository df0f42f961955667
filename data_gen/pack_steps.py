"""Steps of packing, each in bounded memory and by any process: read, sort, measure, write.

    input files ──► runs ──► sorted runs ──► parts ──► shards
               read     sort             measure, write

`data_gen.jobs` says what these words mean. Sorting cuts each run (`run_files.py`) into the sequences of each
part, so that writing a part reads one group of every run.
"""

import collections
import dataclasses
import math
import os

import numpy as np

from bert_packed.assembly.assignment import choose_slots
from bert_packed.assembly.record_kind import RecordKind
from bert_packed.core import progress, storage
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.inputs import check_promises, unchanged
from bert_packed.records.provenance import PACK_COLUMNS, write_traced
from bert_packed.records.sequences import concatenate, entry_bytes, take
from data_gen.assignments import CutRows, PlannedPacks
from data_gen.run_files import read_array, read_run, write_array, write_run

# Of a run and of a part, as columns; two or three times that while they are joined and cut. Every part reads
# a piece of every run, so that their number counts squared: they grow with the input, up to what fits easily.
RUN_BYTES, MAX_RUN_BYTES = 2**25, 2**27
NUM_RUNS = 2**10  # about, as long as their size allows
PACKS_AT_ONCE = 512  # gathered and encoded together: 512 packs of S=512 take about 10 MB
ASSEMBLED_BYTES = 2**21  # likewise, of the columns that go into them: four times that as arrays of int64


@dataclasses.dataclass(frozen=True)
class ReadWork:
    """Read one input file into runs."""

    kind: RecordKind
    stamp: list  # of the file, from `stamp_files`
    file_index: int  # among the inputs
    promised: dict  # of the file, from `read_input_manifests`
    folder: str  # of the runs
    run_bytes: int  # from `choose_run_bytes`


@dataclasses.dataclass(frozen=True)
class PackWork:
    """Sequences to be packed: sent with each step, so that it must not grow with the number of runs."""

    assignment: PlannedPacks | CutRows
    folder: str
    num_runs: int

    def sorted_run_path(self, number):
        """Where a run is once it is sorted."""
        return os.path.join(self.folder, f"sorted-{number:06d}.run")

    def ranks_path(self, number):
        """Int array `[3, m]`: the lengths in a run, and sequences of each before the run, and in all."""
        return os.path.join(self.folder, f"ranks-{number:06d}.npy")

    @property
    def part_ends_path(self):
        """Int array `[number of parts]`: the first pack after each part."""
        return os.path.join(self.folder, "part-ends.npy")

    def read_part(self, part, names=None):
        """The sequences of a part, from all runs, or some of their columns: `Sequences`, and its `Packs`."""
        layout, paths = self.assignment.layout, map(self.sorted_run_path, range(self.num_runs))
        sequences = concatenate([read_run(path, layout, part.index, names) for path in paths])
        return sequences, self.assignment.find_packs(sequences, part.first, part.last)


@dataclasses.dataclass(frozen=True)
class Part:
    """Packs that are assembled together, from `first` to `last`, the latter excluded."""

    index: int  # of the group in the sorted runs
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class ShardWork:
    """Write one shard."""

    pack_work: PackWork
    parts: tuple[Part, ...]  # in order
    path: str
    spec: object  # from `RecordKind.make_spec`
    provenance: str  # path of the index of its sequences; "" for none


def choose_run_bytes(num_bytes):
    """Bytes of a run and of a part for an input of `num_bytes`: of nothing else, so that any run agrees."""
    return min(max(num_bytes // NUM_RUNS, RUN_BYTES), MAX_RUN_BYTES)


def pack_bytes(kind, depth):
    """About how many bytes the columns of a full pack take, which holds `depth` sequences."""
    entries = (entry_bytes(kind.layout, sizes) * most for sizes, most in kind.capacities.items())
    return sum(entries) + math.ceil(depth * entry_bytes(kind.layout))


def histogram_path(run):
    """Where the histogram of a run is: int array `[2, m]`, lengths and how many sequences have each."""
    return f"{run}.histogram.npy"


def read_file(work):
    """Read an input file into runs, each with its histogram beside it, see `histogram_path`.

    Returns a dict with the `entry` of the manifest, `num_overlong`, dict, and `runs`, list of [path, number
    of sequences]. `InputError` where a record cannot be used, or the file changes meanwhile.
    """
    path = work.stamp[0]
    with unchanged([work.stamp]):
        num_records, num_overlong, runs = _read_runs(work, path)
        checksum = storage.file_sha256(path)  # with the block's promise: of what was read
    check_promises(work.promised, path, num_records, checksum)
    entry = {"path": path, "num_records": num_records, "sha256": checksum}
    return {"entry": entry, "num_overlong": num_overlong, "runs": runs}


def _read_runs(work, path):
    """Write the runs of a file: number of its records, dict of those overlong, and list as in `read_file`."""
    runs, held, num_bytes, num_records, num_overlong = [], [], 0, 0, collections.Counter()

    def flush():
        if not held:
            return
        sequences = concatenate(held)
        held.clear()
        sequences = sequences.replace(file_indices=np.full(len(sequences), work.file_index, np.int32))
        run = os.path.join(work.folder, f"run-{work.file_index:05d}-{len(runs):05d}.run")
        write_run(run, sequences, [len(sequences)])
        lengths = work.kind.lengths(sequences)
        write_array(histogram_path(run), np.stack(np.unique(lengths, return_counts=True)))
        runs.append([run, len(sequences)])

    for sequences, overlong, num_read in work.kind.read(path):
        num_records += num_read
        num_overlong.update(overlong)
        if not len(sequences):
            continue
        held.append(sequences)
        num_bytes += sum(values.nbytes for values in sequences.columns.values())
        if num_bytes >= work.run_bytes:
            flush()
            num_bytes = 0
    flush()
    return num_records, dict(num_overlong), runs


def sort_run(work_number_and_run):
    """Give each sequence of a run its slot, and write what is packed of it in the order of the parts."""
    work, number, run = work_number_and_run
    assignment = work.assignment
    sequences = read_run(run, assignment.kind.layout)
    lengths = assignment.kind.lengths(sequences)
    known, *numbers = read_array(work.ranks_path(number))
    first_ranks, totals = np.zeros((2, int(known.max()) + 1), np.int64)
    first_ranks[known], totals[known] = numbers
    slots = choose_slots(lengths, first_ranks, totals, assignment.seed)
    pieces, packs = assignment.place(sequences, slots)
    part_ends = read_array(work.part_ends_path)
    parts = np.searchsorted(part_ends, packs, side="right")
    pieces = take(pieces, np.argsort(parts, kind="stable"))
    write_run(work.sorted_run_path(number), pieces, np.bincount(parts, minlength=len(part_ends)))


def measure_part(work_and_part):
    """Of the packs of a part: most sequences in one, sequences in all, and the largest `kind.measure`."""
    work, part = work_and_part
    sequences, packs = work.read_part(part, work.assignment.key_columns)
    measured = work.assignment.kind.measure(sequences, packs)
    return [int(packs.depths.max(initial=0)), len(packs.members), measured]


def write_shard(work):
    """Assemble the packs of a shard and write them: the manifest's entry of the file, a dict."""
    kind = work.pack_work.assignment.kind
    size = ASSEMBLED_BYTES // pack_bytes(kind, work.spec.max_sequences_per_pack)
    size = min(max(size, 1), PACKS_AT_ONCE)

    def serialize(index):
        for part in work.parts:
            sequences, packs = work.pack_work.read_part(part)
            if index is not None:
                origins = (sequences[name][packs.members] for name in ("file_indices", "record_numbers"))
                index.add_packs(packs.depths, *origins)
            for start in range(0, len(packs), size):
                some = packs.between(start, min(start + size, len(packs)))
                yield from serialize_examples(kind.assemble(sequences, some, work.spec))
                progress.advance(len(some))

    return write_traced(work.path, work.provenance, PACK_COLUMNS, serialize).to_json()
