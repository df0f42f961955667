"""Rows of equal length without padding between sequences, and their cuts into packs.

A row is as long as many packs; its sequences are concatenated:

    lengths          5 5 5 3 2 2     2 rows
    row 0            5 5 2           each length is divided evenly; the rest goes, longest first, to the row
    row 1            5 3 2           that is shortest so far
    places           shuffled        in each row, by the seed

Row and place of a sequence depend on histogram, input order and seed, as in `assignment.py`.
"""

import dataclasses
from functools import cached_property

import numpy as np

from bert_packed.records.sequences import to_offsets
from bert_packed.records.shuffle import find_items, shuffle_places

SHUFFLE_ROWS = 3  # in keys of shuffles, where `assignment.py` has 1 and 2


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Number of sequences of each length in each row."""

    lengths: np.ndarray  # int64 [L], those that occur, ascending
    counts: np.ndarray  # int64 [L], sequences of each length
    has_extra: np.ndarray  # bool [L, R]: the row has one more than counts // R

    @property
    def num_rows(self):
        return self.has_extra.shape[1]

    @property
    def row_tokens(self):
        """Tokens of each row: int64 `[R]`."""
        return self.lengths @ (self.counts // self.num_rows) + self.lengths @ self.has_extra

    @cached_property
    def row_counts(self):
        """Sequences of each row: int64 `[R]`."""
        return (self.counts // self.num_rows).sum() + self.has_extra.sum(axis=0)

    @cached_property
    def starts(self):
        """Number of shorter sequences in the row: int64 `[L, R]`."""
        each = (self.counts // self.num_rows)[:, None] + self.has_extra
        return np.cumsum(each, axis=0) - each


def plan_rows(lengths, counts, num_rows):
    """Distribute sequences over R rows whose tokens differ by at most the longest sequence: `RowPlan`.

    `lengths` ascend; `counts`, the sequences of each, add up to at least R.
    """
    lengths, counts = np.asarray(lengths, np.int64), np.asarray(counts, np.int64)
    has_extra = np.zeros((len(lengths), num_rows), bool)
    more_tokens = np.zeros(num_rows, np.int64)
    for index in np.flatnonzero(counts % num_rows)[::-1]:
        shortest = np.argsort(more_tokens, kind="stable")[: counts[index] % num_rows]
        has_extra[index, shortest] = True
        more_tokens[shortest] += lengths[index]
    return RowPlan(lengths, counts, has_extra)


def find_rows(plan, lengths, slots, seed):
    """Rows of sequences with slots from `choose_slots`, and places in their rows: two int64 `[n]`."""
    kinds = np.searchsorted(plan.lengths, lengths)
    rounds, rows = np.divmod(slots, plan.num_rows)
    # The last round of a length reaches only some rows
    is_extra = rounds == plan.counts[kinds] // plan.num_rows
    extra_rows, first_extras = np.nonzero(plan.has_extra)[1], to_offsets(plan.has_extra.sum(axis=1))
    rows[is_extra] = extra_rows[first_extras[kinds[is_extra]] + rows[is_extra]]
    items = plan.starts[kinds, rows] + rounds
    return rows, shuffle_places(items, plan.row_counts[rows], (seed, SHUFFLE_ROWS, rows))


def lengths_in_row(plan, row, first, last, seed):
    """Lengths of the sequences at places `first` to `last` of a row, the latter excluded: int64."""
    key = (seed, SHUFFLE_ROWS, row)
    items = find_items(np.arange(first, last), int(plan.row_counts[row]), key)
    return plan.lengths[np.searchsorted(plan.starts[:, row], items, side="right") - 1]


def cut_sequences(starts, lengths, max_seq_length):
    """Cut sequences where packs end: three int64 arrays, part by part.

        starts [0 3], lengths [3 6], packs of 4   ->   owners  [0 1 1 1]     sequence of the part
                                                       firsts  [0 0 1 5]     its first token of the sequence
                                                       lengths [3 1 4 1]

    `starts` are the positions, in tokens, of sequences in their row, int `[n]`.
    """
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    first_packs, last_packs = starts // max_seq_length, (starts + lengths - 1) // max_seq_length
    num_parts = last_packs - first_packs + 1
    owners = np.repeat(np.arange(len(starts)), num_parts)
    packs = np.arange(len(owners)) - to_offsets(num_parts)[owners] + first_packs[owners]
    begins = np.maximum(packs * max_seq_length, starts[owners])
    ends = np.minimum((packs + 1) * max_seq_length, (starts + lengths)[owners])
    return owners, begins - starts[owners], ends - begins
