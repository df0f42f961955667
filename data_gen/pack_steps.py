"""Steps of packing, each in bounded memory and in any process: read, sort, merge, measure, write.

    input files ──► runs ──► sorted runs ──► parts ──► shards
               read     sort    merge    measure, write

`data_gen/jobs/__init__.py` defines these terms. Sorting groups each run by part, so that writing a part reads
one group of each run. Of more than `FAN_IN` runs these reads would cost more than anything else, since they
grow with the square of the data. So sorting has levels then, as many as L: with 9 runs (0..8), 9 parts (a..i)
and L = 2, both are taken three at once.

    level 0    run 0: abc def ghi    run 1: abc def ghi    ...    a file a run, grouped by ranges of parts
    level 1    runs 0-2: a b c    d e f    g h i    ...           a file for three runs and a range of parts
    parts      a reads three groups, of runs 0-2, 3-5 and 6-8, instead of nine
"""

import collections
import dataclasses
import itertools
import math
import os

import numpy as np

from bert_packed.assembly.assignment import choose_slots
from bert_packed.assembly.record_kinds import RecordKind
from bert_packed.core import progress, storage
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.inputs import check_promises, unchanged
from bert_packed.records.provenance import PACK_COLUMNS, write_traced
from bert_packed.records.sequences import concatenate, entry_bytes, take
from data_gen.assignments import CutRows, PlannedPacks, read_run, write_run
from data_gen.jobs.steps import read_array, write_array

# A run, and a part, has this size as columns; it takes two or three times that while it is joined and cut.
# Each part reads a piece of each run, so reads grow with the square of their number: runs grow with the
# input, up to a limit, and are merged beyond `FAN_IN`
RUN_BYTES, MAX_RUN_BYTES = 2**25, 2**27
NUM_RUNS = 2**10  # approximately, within the limits of their size
FAN_IN = 2**12  # runs: pieces of more are below 32 KiB, which take longer to find than to read
PACKS_AT_ONCE = 512  # assembled and encoded together: 512 packs of S=512 take about 10 MB
ASSEMBLED_BYTES = 2**21  # likewise, of the columns that go into them; as int64 arrays four times that


@dataclasses.dataclass(frozen=True)
class ReadWork:
    """Argument of `read_file`."""

    kind: RecordKind
    stamp: list  # that of the file, from `stamp_files`
    file_index: int  # its number among the inputs
    promised: dict  # what `read_input_manifests` found about it
    folder: str  # receives the runs
    run_bytes: int  # result of `choose_run_bytes`


@dataclasses.dataclass(frozen=True)
class PackWork:
    """Common argument of the steps after reading."""

    # It is sent with each step, so it must not grow with the number of runs
    assignment: PlannedPacks | CutRows
    folder: str
    num_runs: int
    num_parts: int
    num_levels: int  # result of `choose_num_levels`

    @property
    def fan_in(self):
        """Number of files whose groups are read together."""
        return math.ceil(self.num_runs ** (1 / self.num_levels))

    @property
    def fan_out(self):
        """Number of groups of a file."""
        return math.ceil(self.num_parts ** (1 / self.num_levels))

    def places(self, level):
        """Numbers of the files of a level, and for each the numbers of its ranges of parts."""
        num_files = -(-self.num_runs // self.fan_in**level)
        return range(num_files), range(-(-self.num_parts // self.fan_out ** (self.num_levels - level)))

    def sorted_path(self, level, number, span):
        return os.path.join(self.folder, f"sorted-{level}-{number:06d}-{span:06d}.run")

    def sorted_paths(self, level, number, span):
        """Paths of the files of a level, in the order of the input, that are merged into file `number`."""
        numbers = self.places(level)[0][number * self.fan_in : (number + 1) * self.fan_in]
        return [self.sorted_path(level, one, span) for one in numbers]

    def read_group(self, level, number, index, names=None):
        """`Sequences` of a group, counted over all ranges, from files that are merged into `number`."""
        span, group = divmod(index, self.fan_out)
        paths = self.sorted_paths(level, number, span)
        return concatenate([read_run(path, self.assignment.layout, group, names) for path in paths])

    def write_groups(self, level, number, span, sequences):
        """Write `Sequences` of a range of parts in groups, a range of the next level or a part each."""
        packs, ends = self.assignment.number_packs(sequences), read_array(self.part_ends_path)
        parts = np.searchsorted(ends, packs, side="right")
        groups = parts // self.fan_out ** (self.num_levels - 1 - level) - span * self.fan_out
        # stable, so that the order of the input remains
        in_order = take(sequences, np.argsort(groups, kind="stable"))
        group_sizes = np.bincount(groups, minlength=self.fan_out)
        write_run(self.sorted_path(level, number, span), in_order, group_sizes)

    def ranks_path(self, number):
        """File of an int array `[3, m]`: lengths in a run; sequences of each before the run, and in total."""
        return os.path.join(self.folder, f"ranks-{number:06d}.npy")

    @property
    def part_ends_path(self):
        """File of an int array `[number of parts]`: the first pack after each part."""
        return os.path.join(self.folder, "part-ends.npy")

    def read_part(self, part, names=None):
        """`Sequences` of a part from all runs, with all columns or those in `names`, and its `Packs`."""
        sequences = self.read_group(self.num_levels - 1, 0, part.index, names)
        return sequences, self.assignment.find_packs(sequences, part.first, part.last)


@dataclasses.dataclass(frozen=True)
class Part:
    """Packs `first` to `last`, the latter excluded, which are assembled together."""

    index: int  # number of its group in the sorted runs
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class ShardWork:
    """Argument of `write_shard`."""

    pack_work: PackWork
    parts: tuple[Part, ...]  # in order
    path: str
    spec: object  # result of `RecordKind.make_spec`
    provenance: str  # path of its provenance index; "" for none


def choose_run_bytes(num_bytes):
    # The size depends on nothing else, so that a resumed run chooses the same
    return min(max(num_bytes // NUM_RUNS, RUN_BYTES), MAX_RUN_BYTES)


def choose_num_levels(num_runs):
    return next(levels for levels in itertools.count(1) if FAN_IN**levels >= num_runs)


def pack_bytes(kind, depth):
    """Approximate size in bytes of the columns of a full pack of `depth` sequences."""
    entries = (entry_bytes(kind.layout, sizes) * most for sizes, most in kind.capacities.items())
    return sum(entries) + math.ceil(depth * entry_bytes(kind.layout))


def histogram_path(run):
    """File of a run's histogram: int array `[2, m]`, lengths and their counts."""
    return f"{run}.histogram.npy"


def read_file(work):
    """Read an input file into runs, [path, number of sequences], each with its histogram beside it."""
    path = work.stamp[0]
    with unchanged([work.stamp]):
        num_records, num_overlong, runs = _read_runs(work, path)
        checksum = storage.file_sha256(path)  # it is that of the content read, since the file is unchanged
    check_promises(work.promised, path, num_records, checksum)
    entry = {"path": path, "num_records": num_records, "sha256": checksum}
    return {"entry": entry, "num_overlong": num_overlong, "runs": runs}


def _read_runs(work, path):
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
    """Assign slots to the sequences of a run, and write them, or their pieces, in groups."""
    work, number, run = work_number_and_run
    assignment = work.assignment
    sequences = read_run(run, assignment.kind.layout)
    lengths = assignment.kind.lengths(sequences)
    known, *numbers = read_array(work.ranks_path(number))
    first_ranks, totals = np.zeros((2, int(known.max()) + 1), np.int64)
    first_ranks[known], totals[known] = numbers
    slots = choose_slots(lengths, first_ranks, totals, assignment.seed)
    work.write_groups(0, number, 0, assignment.place(sequences, slots))


def merge_runs(work_and_place):
    """Join a group of several files of the level below, and write it in groups."""
    work, level, number, span = work_and_place
    work.write_groups(level, number, span, work.read_group(level - 1, number, span))


def measure_part(work_and_part):
    """Measure a part: maximum of sequences per pack, number of sequences, and `kind.measure`."""
    work, part = work_and_part
    sequences, packs = work.read_part(part, work.assignment.key_columns)
    measured = work.assignment.kind.measure(sequences, packs)
    return [int(packs.depths.max(initial=0)), len(packs.members), measured]


def write_shard(work):
    """Assemble and write the packs of a shard; returns the manifest's entry of the file, a dict."""
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
