"""Assignments of sequences to packs, by a plan or by rows, computable for any part of the data alone.

`PlannedPacks` puts whole sequences into the packs of a plan (`assembly/assignment.py`). `CutRows`
concatenates sequences into rows and cuts these where packs end. Row r's t-th pack is number t * R + r of all
packs. So R packs per step give each row its next pack, whose first sequence may continue the last sequence of
the row's previous pack.
"""

import dataclasses
import itertools
import os

import numpy as np

from bert_packed.assembly import assignment
from bert_packed.assembly.record_kinds import CausalKind, RecordKind
from bert_packed.core import progress, storage
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    FIRST_POSITIONS,
    Column,
    Sequences,
    make_sequences,
    sum_ranges,
    to_offsets,
)
from data_gen.jobs.steps import read_array, write_array

SLOTS = {"slots": Column("<i8")}
# Parts of sequences have these columns: the row of each, and its start in the row, in tokens
PIECES = CAUSAL_LAYOUT | FIRST_POSITIONS | {"rows": Column("<i4"), "row_starts": Column("<i8")}
PLACES_AT_ONCE = 2**16  # places of a row per read or write
PLACES_APART = 2**9  # further ones are read alone: each run would otherwise read the starts of all sequences


@dataclasses.dataclass(frozen=True)
class PlannedPacks:
    """Whole sequences in the packs of a plan."""

    kind: RecordKind
    strategies: dict  # those of the plan, with counts
    seed: int

    @property
    def layout(self):
        return self.kind.layout | SLOTS

    @property
    def key_columns(self):
        """The columns that `find_packs` and `RecordKind.measure` need."""
        return {*SLOTS, *self.kind.measured_columns}

    def place(self, sequences, slots):
        """`Sequences` to pack, from some with slots of `choose_slots`."""
        return Sequences(self.layout, {**sequences.columns, "slots": slots})

    def number_packs(self, sequences):
        """The packs that sequences of `place` belong to: int64 `[n]`."""
        order = assignment.PackOrder(self.strategies, self.seed)
        return order.find_packs(self.kind.lengths(sequences), sequences["slots"])

    def find_packs(self, sequences, first, last):
        """`Packs` number `first` to `last`, the latter excluded, of the sequences that belong to them."""
        wanted = assignment.PackOrder(self.strategies, self.seed).slots(first, last)
        return assignment.fill_packs(*wanted, self.kind.lengths(sequences), sequences["slots"])


@dataclasses.dataclass(frozen=True)
class CutRows:
    """Pieces of sequences in rows without padding, with the methods of `PlannedPacks`."""

    kind: CausalKind  # that of split sequences
    num_rows: int
    seed: int
    folder: str  # holds the plan, and the starts of all sequences in their rows

    layout = PIECES
    key_columns = frozenset({"rows", "row_starts"})

    def save_plan(self, plan):
        # The plan is written once, instead of sent with the argument of each step
        write_array(self._path("rows.npy"), np.stack([plan.lengths, plan.counts]))
        write_array(self._path("extras.npy"), plan.has_extra)

    def load_plan(self):
        return assignment.RowPlan(*read_array(self._path("rows.npy")), read_array(self._path("extras.npy")))

    def starts_path(self, row):
        """File of the starts, in tokens, of a row's sequences: int64, without a header."""
        return self._path(f"row-{row:06d}.int64")

    def place(self, sequences, slots):
        length, plan = self.kind.max_seq_length, self.load_plan()
        rows, places = assignment.find_rows(plan, sequences["lengths"], slots, self.seed)
        starts = self._read_starts(rows, places)
        owners, firsts, sizes = assignment.cut_sequences(starts, sequences["lengths"], length)
        # the pieces of a sequence are consecutive, so that columns of tokens need not change
        return make_sequences(
            PIECES,
            "",
            lengths=sizes,
            first_positions=firsts,
            rows=rows[owners],
            row_starts=starts[owners] + firsts,
            num_bytes=sum_ranges(sequences["label_bytes"], sizes),
            **{name: sequences[name][owners] for name in ("file_indices", "record_numbers")},
            **{name: sequences[name] for name in ("tokens", "labels", "label_mask")},
        )

    def find_packs(self, pieces, first, last):
        packs = self.number_packs(pieces) - first
        order = np.lexsort((pieces["row_starts"], packs))
        return assignment.Packs(order, to_offsets(np.bincount(packs, minlength=last - first)))

    def number_packs(self, pieces):
        return pieces["row_starts"] // self.kind.max_seq_length * self.num_rows + pieces["rows"]

    def _read_starts(self, rows, places):
        """Starts of sequences in their rows: int64 `[n]`, from the files of `lay_row`."""
        starts = np.empty(len(places), np.int64)
        for row in np.unique(rows):
            order = np.flatnonzero(rows == row)
            order = order[np.argsort(places[order])]
            ascending = places[order]
            is_first = np.diff(ascending // PLACES_AT_ONCE, prepend=-1) > 0
            is_first |= np.diff(ascending, prepend=0) > PLACES_APART
            limits = np.append(np.flatnonzero(is_first), len(order))
            with storage.open_file(self.starts_path(row)) as file:
                for first, last in itertools.pairwise(limits):
                    wanted = ascending[first:last]
                    file.seek(8 * int(wanted[0]))
                    held = np.frombuffer(file.read(8 * int(wanted[-1] + 1 - wanted[0])), "<i8")
                    starts[order[first:last]] = held[wanted - wanted[0]]
        return starts

    def _path(self, name):
        return os.path.join(self.folder, name)


def lay_row(work):
    """Write the start of each sequence of a row, given as (`CutRows`, row number), in the order of places."""
    rows, row = work
    plan = rows.load_plan()
    num_sequences, end = int(plan.row_counts[row]), 0
    with storage.write_whole(rows.starts_path(row)) as partial, storage.open_file(partial, "wb") as file:
        for first in range(0, num_sequences, PLACES_AT_ONCE):
            last = min(first + PLACES_AT_ONCE, num_sequences)
            offsets = end + to_offsets(assignment.lengths_in_row(plan, row, first, last, rows.seed))
            file.write(offsets[:-1].astype("<i8").tobytes())
            end = int(offsets[-1])
            progress.advance(last - first)


def write_run(path, sequences, group_sizes):
    """Write `Sequences` in groups, whose sizes are int `[G]`, to a file that appears when complete."""
    starts = {"": to_offsets(group_sizes)}  # first entries of groups, by the column that counts entries
    for name, column in sequences.layout.items():
        if column.sizes:
            starts[column.sizes] = sequences.offsets(name)[starts[""]]
    table = np.stack([starts[name] for name in sorted(starts)], axis=1).astype("<i8")
    with storage.write_whole(path) as partial, storage.open_file(partial, "wb") as file:
        file.write(np.array([len(group_sizes), *table[-1]], "<i8").tobytes())
        file.write(table.tobytes())
        for name, column in sequences.layout.items():
            file.write(np.ascontiguousarray(sequences[name], column.dtype).tobytes())


def read_run(path, layout, group=None, names=None):
    """Read `Sequences` of a run, from one group or all; `names` need the columns that size them."""
    # Other columns are skipped, so that measuring reads no tokens
    wanted = {name: column for name, column in layout.items() if names is None or name in names}
    counting = sorted({column.sizes for column in layout.values()})
    columns, row_bytes = {}, 8 * len(counting)
    with storage.open_file(path) as file:
        num_groups, *totals = np.frombuffer(file.read(8 + row_bytes), "<i8").tolist()
        place, firsts, lasts = 8 + row_bytes, [0] * len(totals), totals
        if group is not None:
            file.seek(place + row_bytes * group)
            firsts, lasts = np.frombuffer(file.read(2 * row_bytes), "<i8").reshape(2, -1).tolist()
        place += row_bytes * (num_groups + 1)
        for name, column in layout.items():
            index = counting.index(column.sizes)
            entry_bytes = np.dtype(column.dtype).itemsize * column.width
            if name in wanted:
                file.seek(place + firsts[index] * entry_bytes)
                content = file.read((lasts[index] - firsts[index]) * entry_bytes)
                columns[name] = np.frombuffer(content, column.dtype)
            place += totals[index] * entry_bytes
    return Sequences(wanted, columns)
