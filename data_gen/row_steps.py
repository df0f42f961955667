"""What the steps of laying sequences into rows do, each in bounded memory and by any process.

    runs ──► parts of sequences, by part of the output ──► shards
         cut                                          write

Runs are those of `pack_steps.py`. A pack holds parts of sequences, a "part" of the output (`data_gen.jobs`)
packs; here the first is called a piece, so that the two are told apart.
"""

import dataclasses
import itertools
import os

import numpy as np

from bert_packed.assembly.assignment import choose_slots
from bert_packed.assembly.causal_data import lay_out
from bert_packed.assembly.row_data import PARTS, RowData, arrays_of_parts
from bert_packed.assembly.rows import RowPlan, cut_sequences, find_rows, lengths_in_row
from bert_packed.core import files, progress
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.provenance import open_provenance
from bert_packed.records.sequences import (
    concatenate,
    make_sequences,
    rank_in_groups,
    sum_ranges,
    take,
    to_offsets,
)
from bert_packed.schema import PackSpec
from data_gen.pack_steps import (
    ASSEMBLED_BYTES,
    PACKS_AT_ONCE,
    Part,
    sorted_run_path,
)
from data_gen.run_files import read_array, read_run, write_array, write_run

PLACES_AT_ONCE = 2**16  # of a row


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a run of the command, and where what describes them is.

    Attributes:
        folder: Work folder.
        num_rows: R.
        max_seq_length: S.
        seed: Of the order.
    """

    folder: str
    num_rows: int
    max_seq_length: int
    seed: int

    def save_plan(self, plan):
        """Write a `RowPlan` for the steps."""
        write_array(self._path("rows"), np.stack([plan.lengths, plan.counts]))
        write_array(self._path("extras"), plan.has_extra)

    def load_plan(self):
        """What `save_plan` wrote."""
        return RowPlan(*read_array(self._path("rows")), read_array(self._path("extras")))

    def starts_path(self, row):
        """Where the place in tokens of each of a row's sequences is: int64, without a header."""
        return os.path.join(self.folder, f"row-{row:06d}.int64")

    def _path(self, name):
        return os.path.join(self.folder, f"{name}.npy")


@dataclasses.dataclass(frozen=True)
class CutWork:
    """Cut the sequences of one run.

    Attributes:
        data: `RowData`.
        rows: `Rows`.
        run, sorted_run: Paths: from, to.
        ranks: As in `pack_steps.SortWork`.
        part_ends: Path of an int array `[num_parts]`: the first step after each part.
    """

    data: RowData
    rows: Rows
    run: str
    sorted_run: str
    ranks: str
    part_ends: str


@dataclasses.dataclass(frozen=True)
class RowShard:
    """Write one shard.

    Attributes:
        rows: `Rows`.
        num_runs: Runs that were cut.
        parts: Tuple of `Part`, in order, which count steps: R packs each.
        path: Where to.
        spec: `PackSpec`.
        provenance: Path of the index of the pieces; "" for none.
    """

    rows: Rows
    num_runs: int
    parts: tuple[Part, ...]
    path: str
    spec: PackSpec
    provenance: str


def lay_row(work):
    """Note where each sequence of a row, (`Rows`, its number), starts, in the order of the places."""
    rows, row = work
    plan = rows.load_plan()
    num_sequences, end = int(plan.row_counts[row]), 0
    with files.write_whole(rows.starts_path(row)) as partial, files.open_file(partial, "wb") as file:
        for first in range(0, num_sequences, PLACES_AT_ONCE):
            last = min(first + PLACES_AT_ONCE, num_sequences)
            offsets = end + to_offsets(lengths_in_row(plan, row, first, last, rows.seed))
            file.write(offsets[:-1].astype("<i8").tobytes())
            end = int(offsets[-1])
            progress.advance(last - first)


def cut_run(work):
    """Find the place of each sequence of a run, cut it into pieces, and write them in the parts' order."""
    columns = read_run(work.run, work.data.layout)
    lengths = columns["lengths"]
    known, *numbers = read_array(work.ranks)
    first_ranks, totals = np.zeros((2, int(known.max()) + 1), np.int64)
    first_ranks[known], totals[known] = numbers
    rows = work.rows
    slots = choose_slots(lengths, first_ranks, totals, rows.seed)
    row_of, places = find_rows(rows.load_plan(), lengths, slots, rows.seed)
    starts = _read_starts(rows, row_of, places)
    owners, firsts, sizes = cut_sequences(starts, lengths, rows.max_seq_length)
    # the pieces of a sequence follow one another, so that its tokens stay where they are
    pieces = make_sequences(
        PARTS,
        "",
        lengths=sizes,
        first_positions=firsts,
        rows=row_of[owners],
        row_starts=starts[owners] + firsts,
        num_bytes=sum_ranges(columns["label_bytes"], sizes),
        **{name: columns[name][owners] for name in ("file_indices", "record_numbers")},
        **{name: columns[name] for name in ("tokens", "labels", "label_mask")},
    )
    part_ends = read_array(work.part_ends)
    parts = np.searchsorted(part_ends, pieces["row_starts"] // rows.max_seq_length, side="right")
    pieces = take(pieces, np.argsort(parts, kind="stable"))
    write_run(work.sorted_run, pieces, np.bincount(parts, minlength=len(part_ends)))


def measure_row_part(work):
    """Of a part, (`Rows`, number of runs, `Part`): the most pieces in a pack, and all pieces."""
    rows, num_runs, part = work
    columns = _read_part(rows, num_runs, part, ("rows", "row_starts"))
    packs = _find_packs(columns, rows, part)
    return [int(np.bincount(packs).max(initial=0)), len(packs)]


def write_row_shard(work):
    """Assemble the packs of a shard and write them: the manifest's entry of the file."""
    rows, size = work.rows, work.spec.max_seq_length * 9
    size = min(max(ASSEMBLED_BYTES // size, 1), PACKS_AT_ONCE)

    def serialize(provenance):
        for part in work.parts:
            columns = _read_part(rows, work.num_runs, part)
            packs = _find_packs(columns, rows, part)
            order = np.lexsort((columns["row_starts"], packs))
            packs = packs[order]
            num_packs = (part.last - part.first) * rows.num_rows
            if provenance is not None:
                depths = np.bincount(packs, minlength=num_packs)
                provenance.add(depths, columns["file_indices"][order], columns["record_numbers"][order])
            limits = np.searchsorted(packs, np.arange(0, num_packs + size, size))
            for number, (first, last) in enumerate(itertools.pairwise(limits)):
                some, start = order[first:last], number * size
                count = min(size, num_packs - start)
                owners = packs[first:last] - start
                yield from serialize_examples(_assemble(columns, some, owners, count, work.spec))
                progress.advance(count)

    if not work.provenance:
        return tfrecords.write_file(work.path, serialize(None)).to_json()
    with open_provenance(work.provenance) as provenance:
        entry = tfrecords.write_file(work.path, serialize(provenance))
        provenance.add_checksum(entry.sha256)
    return entry.to_json()


def _assemble(columns, order, owners, num_packs, spec):
    """Packs from pieces in order: dict of arrays `[num_packs, ...]`; `owners` ascend."""
    return lay_out(
        spec,
        num_packs,
        owners=owners,
        slots=rank_in_groups(owners) if len(owners) else owners,
        starts=columns["row_starts"][order] % spec.max_seq_length,
        lengths=columns["lengths"][order],
        first_positions=columns["first_positions"][order],
        num_bytes=columns["num_bytes"][order],
        **arrays_of_parts(columns, order),
    )


def _read_part(rows, num_runs, part, names=None):
    """The pieces of a part, from all runs: dict of columns."""
    paths = [sorted_run_path(rows.folder, number) for number in range(num_runs)]
    return concatenate([read_run(path, PARTS, part.index, names) for path in paths])


def _find_packs(columns, rows, part):
    """The pack of each piece, from the first of the part: row r's t-th pack is number t * R + r."""
    steps = columns["row_starts"] // rows.max_seq_length - part.first
    return steps * rows.num_rows + columns["rows"]


def _read_starts(rows, row_of, places):
    """Where sequences start in their rows: int64 `[n]`, from what `lay_row` wrote."""
    starts = np.empty(len(places), np.int64)
    order = np.lexsort((places, row_of))
    chunks = row_of[order] * (2**40) + places[order] // PLACES_AT_ONCE
    limits = np.append(np.flatnonzero(np.diff(chunks, prepend=-1)), len(order))
    path, file = None, None
    try:
        for first, last in itertools.pairwise(limits):
            some = order[first:last]
            if path != rows.starts_path(row_of[some[0]]):
                path = rows.starts_path(row_of[some[0]])
                if file is not None:
                    file.close()
                file = files.open_file(path)
            chunk = places[some[0]] // PLACES_AT_ONCE * PLACES_AT_ONCE
            file.seek(8 * int(chunk))
            held = np.frombuffer(file.read(8 * PLACES_AT_ONCE), "<i8")
            starts[some] = held[places[some] - chunk]
    finally:
        if file is not None:
            file.close()
    return starts
