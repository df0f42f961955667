"""What the steps of packing do, each in bounded memory and by any process: read, sort, measure, write.

    input files ──► runs ──► sorted runs ──► parts ──► shards
               read     sort             measure, write

`data_gen.jobs` says what these words mean. Sorting cuts each run, which is columns on the disk
(`run_files.py`), into the sequences of each part, so that writing a part reads one group of every run.
"""

import dataclasses
import os

import numpy as np

from bert_packed.assembly.assignment import PackOrder, choose_slots, fill_packs
from bert_packed.assembly.pack_data import PackData
from bert_packed.core import files, progress
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.inputs import check_promises, unchanged
from bert_packed.records.provenance import open_provenance
from bert_packed.records.sequences import Column, Sequences, concatenate, take
from data_gen.run_files import read_array, read_run, write_array, write_run

# Of a run and of a part, as columns; two or three times that while they are joined and cut. Every part reads
# a piece of every run, so that their number counts squared: they grow with the input, up to what fits easily.
RUN_BYTES, MAX_RUN_BYTES = 2**25, 2**27
NUM_RUNS = 2**10  # about so many, as long as their size allows
PACKS_AT_ONCE = 512  # gathered and encoded together: 512 packs of S=512 take about 10 MB
ASSEMBLED_BYTES = 2**21  # likewise, of the columns that go into them: four times that as arrays of int64
SLOTS = {"slots": Column("<i8")}  # what sorting adds to the columns


@dataclasses.dataclass(frozen=True)
class ReadWork:
    """Read one input file into runs.

    Attributes:
        data: What the records are.
        stamp, file_index: The file, as `stamp_files` found it, and its number among the inputs.
        promised: What it must be, as `read_input_manifests` returns it.
        folder: Where the runs go.
        run_bytes: Of a run, from `choose_run_bytes`.
    """

    data: PackData
    stamp: list
    file_index: int
    promised: dict
    folder: str
    run_bytes: int


@dataclasses.dataclass(frozen=True)
class SortWork:
    """Sort one run by part.

    Attributes:
        data: As in `ReadWork`.
        run, sorted_run: Paths: from, to.
        ranks: Path of an int array `[3, m]`: the lengths in the run, and how many sequences of each there are
            before the run, and in all.
        strategies: Of the plan, with counts.
        part_ends: Path of an int array `[num_parts]`: the first pack after each part.
        seed: Of the assignment.
    """

    data: PackData
    run: str
    sorted_run: str
    ranks: str
    strategies: dict
    part_ends: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A part: packs that are assembled together.

    Attributes:
        index: Its number in the sorted runs.
        first, last: Its packs, the latter excluded.
    """

    index: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class PackWork:
    """What measuring and writing need to know.

    Attributes:
        data: As in `ReadWork`.
        strategies: Of the plan, with counts.
        folder: Where the sorted runs are.
        num_runs: Their number.
        seed: Of the assignment.
    """

    data: PackData
    strategies: dict
    folder: str
    num_runs: int
    seed: int

    @property
    def sorted_runs(self):
        """Their paths: made here, because Apache Beam sends every part its own copy of this object."""
        return [sorted_run_path(self.folder, number) for number in range(self.num_runs)]


@dataclasses.dataclass(frozen=True)
class ShardWork:
    """Write one shard.

    Attributes:
        pack_work: What to pack.
        parts: Tuple of `Part`, in order.
        path: Where to.
        spec: Shapes of the packed record.
        provenance: Path of the index of its sequences; "" for none.
    """

    pack_work: PackWork
    parts: tuple[Part, ...]
    path: str
    spec: object
    provenance: str


def choose_run_bytes(num_bytes):
    """Bytes of a run and of a part for an input of `num_bytes`: of nothing else, so that any run agrees."""
    return min(max(num_bytes // NUM_RUNS, RUN_BYTES), MAX_RUN_BYTES)


def sorted_run_path(folder, number):
    """Where a run is once it is sorted."""
    return os.path.join(folder, f"sorted-{number:06d}.run")


def read_file(work):
    """Read an input file into runs.

    Returns:
        Dict with the entry of the manifest, `path`, `num_records`, `sha256`; `num_overlong`, dict; and
        `runs`, list of [path, number of sequences]. Beside each run is its histogram, see `histogram_path`.

    Raises:
        InputError: a record cannot be used, or the file changes meanwhile.
    """
    path = work.stamp[0]
    with unchanged([work.stamp]):
        num_records, num_overlong, runs = _read_runs(work, path)
        checksum = files.file_sha256(path)  # with the block's promise: of what was read
    check_promises(work.promised, path, num_records, checksum)
    entry = {"path": path, "num_records": num_records, "sha256": checksum}
    return {"entry": entry, "num_overlong": num_overlong, "runs": runs}


def _read_runs(work, path):
    """Write the runs of a file: number of its records, dict of those overlong, and list as in `read_file`."""
    runs, held, num_bytes, num_records, num_overlong = [], [], 0, 0, {}

    def flush():
        if not held:
            return
        columns = concatenate(held)
        held.clear()
        columns = columns.replace(file_indices=np.full(len(columns), work.file_index, np.int32))
        lengths = work.data.lengths(columns)
        run = os.path.join(work.folder, f"run-{work.file_index:05d}-{len(runs):05d}.run")
        write_run(run, columns, [len(lengths)])
        write_array(histogram_path(run), np.stack(np.unique(lengths, return_counts=True)))
        runs.append([run, len(lengths)])

    for columns, num_read, overlong in work.data.read(path):
        num_records += num_read
        for name, count in overlong.items():
            num_overlong[name] = num_overlong.get(name, 0) + count
        if not len(columns):
            continue
        held.append(columns)
        num_bytes += sum(values.nbytes for values in columns.columns.values())
        if num_bytes >= work.run_bytes:
            flush()
            num_bytes = 0
    flush()
    return num_records, num_overlong, runs


def sort_run(work):
    """Give each sequence of a run its slot, and write the run in the order of the parts."""
    columns = read_run(work.run, work.data.layout)
    lengths = work.data.lengths(columns)
    known, *numbers = read_array(work.ranks)
    first_ranks, totals = np.zeros((2, work.data.num_lengths), np.int64)
    first_ranks[known], totals[known] = numbers
    slots = choose_slots(lengths, first_ranks, totals, work.seed)
    packs = PackOrder(work.strategies, work.seed).find_packs(lengths, slots)
    part_ends = read_array(work.part_ends)
    parts = np.searchsorted(part_ends, packs, side="right")
    columns = Sequences(work.data.layout | SLOTS, {**columns.columns, "slots": slots})
    columns = take(columns, np.argsort(parts, kind="stable"))
    write_run(work.sorted_run, columns, np.bincount(parts, minlength=len(part_ends)))


def histogram_path(run):
    """Where the histogram of a run is: int array `[2, m]`, lengths and how many sequences have each."""
    return f"{run}.histogram.npy"


def measure_part(work_and_part):
    """The fullest pack of a part, by what `data.measure` measures: int."""
    work, part = work_and_part
    columns, packs = _read_part(work, part, work.data.measured_columns)
    return work.data.measure(columns, packs)


def write_shard(work):
    """Assemble the packs of a shard and write them.

    Returns:
        The manifest's entry of the file: dict `name`, `num_records`, `sha256`.
    """
    size = ASSEMBLED_BYTES // work.pack_work.data.pack_bytes(work.spec.max_sequences_per_pack)
    size = min(max(size, 1), PACKS_AT_ONCE)

    def serialize(provenance):
        for part in work.parts:
            columns, packs = _read_part(work.pack_work, part)
            if provenance is not None:
                files_of, numbers = columns["file_indices"], columns["record_numbers"]
                provenance.add(np.diff(packs.offsets), files_of[packs.members], numbers[packs.members])
            for start in range(0, len(packs), size):
                some = packs.between(start, min(start + size, len(packs)))
                arrays = work.pack_work.data.assemble(columns, some, work.spec)
                yield from serialize_examples(arrays)
                progress.advance(len(some))

    if not work.provenance:
        return tfrecords.write_file(work.path, serialize(None)).to_json()
    with open_provenance(work.provenance) as provenance:
        entry = tfrecords.write_file(work.path, serialize(provenance))
        provenance.add_checksum(entry.sha256)
    return entry.to_json()


def _read_part(work, part, names=None):
    """The sequences of a part, from all runs: dict of columns; and its `Packs`."""
    layout = work.data.layout | SLOTS
    wanted = None if names is None else {"slots", *names}
    columns = concatenate([read_run(path, layout, part.index, wanted) for path in work.sorted_runs])
    wanted_slots = PackOrder(work.strategies, work.seed).slots(part.first, part.last)
    return columns, fill_packs(*wanted_slots, work.data.lengths(columns), columns["slots"])
