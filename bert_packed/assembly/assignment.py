"""Packs as indices of sequences, and the assignment of sequences to the packs of a plan, or to rows.

Two shuffles (`shuffle.py`) decide: of the packs, and of the sequences of each length over the slots of that
length. Slots are numbered strategy by strategy, before the packs are shuffled:

    packs of the plan     (3 5) (3 5) (3)        plan {(3 5): 2, (3): 1}
    slots of 3             0     1     2         sequences of length 3: the first gets slot 2, ...
    slots of 5               0     1
    places in the output   2     0     1         shuffled

Both shuffles are invertible at single positions. So the pack of a slot, and the slots of a pack, depend on
plan, input order and seed, not on shards or processes, and no table grows with the data. A "length" may be
any integer that separates kinds of sequences.

A row is as long as many packs. Its sequences are concatenated, without padding, and cut where packs end:

    lengths          5 5 5 3 2 2     2 rows
    row 0            5 5 2           each length is divided evenly; the rest goes, longest first, to the row
    row 1            5 3 2           that is shortest so far
    places           shuffled        in each row, by the seed
"""

import dataclasses
from functools import cached_property

import numpy as np

from bert_packed import schema
from bert_packed.records.sequences import range_indices, rank_in_groups, sum_ranges, to_offsets
from bert_packed.records.shuffle import find_items, shuffle_places

SHUFFLE_PACKS, SHUFFLE_SEQUENCES, SHUFFLE_ROWS = 1, 2, 3  # in keys of shuffles


@dataclasses.dataclass(frozen=True)
class Packs:
    """Indices of the sequences of each pack.

    packs {4, 0}, {2}   ->   members [4 0 2], offsets [0 2 3], owners [0 0 1], slots [0 1 0]
    """

    members: np.ndarray  # int64 [n], indices of sequences, pack by pack and slot by slot
    offsets: np.ndarray  # int64 [num_packs + 1], the start of each pack in `members`; n last

    def __len__(self):
        return len(self.offsets) - 1

    @property
    def depths(self):
        return np.diff(self.offsets)

    @property
    def owners(self):
        return np.repeat(np.arange(len(self)), self.depths)

    @property
    def slots(self):
        return range_indices(0, self.depths)

    def totals(self, sizes):
        """Sums over each pack of `sizes`, int by sequence: int64 `[num_packs]`."""
        return sum_ranges(sizes[self.members], self.depths)

    def between(self, start, stop):
        """The `Packs` from `start` to `stop`, the latter excluded."""
        first, last = self.offsets[start], self.offsets[min(stop, len(self))]
        return Packs(self.members[first:last], self.offsets[start : stop + 1] - first)


def find_places(sequences, packs, name, size):
    """Positions of the entries of a ragged column, in the column and in packs.

        packs {1, 0}, lengths [2 3], size 6   ->   source [2 3 4 0 1], target [0 1 2 3 4], starts [0 3]

    Returns three int64 arrays, member by member: the index of each entry in the column, its index in an array
    `[n * size]`, and the start of each member in its pack. Raises `ValueError` for a pack with more entries
    than `size`.
    """
    sizes = sequences[sequences.layout[name].sizes][packs.members]
    offsets = to_offsets(sizes)
    starts = offsets[:-1] - np.repeat(offsets[packs.offsets[:-1]], packs.depths)
    needed = int((starts + sizes).max(initial=0))
    if needed > size:  # else entries would run into the next pack's row
        raise ValueError(f"packs must fit `spec`. Received: {needed} {name} in a pack with room for {size}.")
    source = range_indices(sequences.offsets(name)[packs.members], sizes)
    return source, range_indices(packs.owners * size + starts, sizes), starts


def empty_arrays(names, packs, spec, whole_type=np.int64):
    """Zeros for features of n `Packs`: dict from name to `[n, S]`, `[n, P]` or `[n, K]`.

    Integers have the dtype `whole_type`. Raises `ValueError` for a pack with more sequences than slots.
    """
    depth = int(packs.depths.max(initial=0))
    if depth > spec.max_sequences_per_pack:
        raise ValueError(f"packs must fit `spec`. Received: {depth} sequences in a pack, {spec}.")
    types = {name: np.float32 if name in schema.FLOAT_FEATURES else whole_type for name in names}
    return {name: np.zeros((len(packs), *spec.shape(name)), kind) for name, kind in types.items()}


def put(arrays, name, indices, values):
    """Write values to an array at indices as if it had one dimension."""
    arrays[name].reshape(-1)[indices] = values


def fill_rows(values, num_rows):
    """Append rows of zeros until there are `num_rows`."""
    if len(values) == num_rows:
        return values
    return np.pad(values, [(0, num_rows - len(values))] + [(0, 0)] * (values.ndim - 1))


class PackOrder:
    """The packs of a plan, a dict from strategy to count, in their shuffled order."""

    def __init__(self, strategies, seed):
        depths = [len(strategy) for strategy in strategies]
        self._lengths = np.array([length for strategy in strategies for length in strategy], np.int64)
        self._offsets = to_offsets(depths)
        counts = np.array(list(strategies.values()), np.int64)
        self._ends = np.cumsum(counts)
        self.num_packs = int(counts.sum())
        self._starts = self._ends - counts
        self._seed = seed
        # An entry for each strategy and each of its lengths, ascending by length, then by strategy. A length
        # may occur several times in a strategy; its slots are then numbered pack by pack
        pairs = self._lengths * len(depths) + np.repeat(np.arange(len(depths)), depths)
        pairs, self._entries, self._times = np.unique(pairs, return_inverse=True, return_counts=True)
        self._ranks = rank_in_groups(self._entries)  # among equal lengths of a strategy
        self._entry_lengths, self._entry_strategies = np.divmod(pairs, max(1, len(depths)))
        self._entry_ends = np.cumsum(self._times * counts[self._entry_strategies])
        self._entry_starts = self._entry_ends - self._times * counts[self._entry_strategies]
        first_entries = np.searchsorted(self._entry_lengths, self._entry_lengths)
        self._number_starts = self._entry_starts - self._entry_starts[first_entries]

    def slots(self, first, last):
        """Slots of the packs `first` to `last`, the latter excluded.

        Three int64 arrays: the length of each slot, ascending in a pack; its number among the slots of that
        length; and the number of slots of each pack.
        """
        places, strategies = self.find_strategies(np.arange(first, last))
        depths = np.diff(self._offsets)[strategies]
        chosen = range_indices(self._offsets[strategies], depths)
        entries = self._entries[chosen]
        repeats = np.repeat(places - self._starts[strategies], depths)
        numbers = self._number_starts[entries] + repeats * self._times[entries] + self._ranks[chosen]
        return self._lengths[chosen], numbers, depths

    def count_pairs(self, packs, max_seq_length):
        """Pairs of tokens that attention computes in packs, int `[n]`: int64 `[n]`.

        Packs of 6 tokens, (3 2) and (5):   3² + 2² + 1² = 14 and 5² + 1² = 26, with the padding's
        """
        depths, squares = np.diff(self._offsets), self._lengths**2
        padding = max_seq_length - sum_ranges(self._lengths, depths)
        return (sum_ranges(squares, depths) + padding**2)[self.find_strategies(packs)[1]]

    def find_packs(self, lengths, slots):
        """Packs, int64 `[n]`, of slots given by their lengths and numbers, int `[n]` each."""
        first_entries = np.searchsorted(self._entry_lengths, lengths)
        numbers = np.asarray(slots) + self._entry_starts[first_entries]
        entries = np.searchsorted(self._entry_ends, numbers, side="right")
        repeats = (numbers - self._entry_starts[entries]) // self._times[entries]
        places = self._starts[self._entry_strategies[entries]] + repeats
        return find_items(places, self.num_packs, (self._seed, SHUFFLE_PACKS))

    def find_strategies(self, packs):
        """Packs before the shuffle, and their strategies: two int64 `[n]`."""
        places = shuffle_places(packs, self.num_packs, (self._seed, SHUFFLE_PACKS))
        return places, np.searchsorted(self._ends, places, side="right")


def choose_slots(lengths, first_ranks, totals, seed):
    """Slots of consecutive sequences of the input: int64 `[n]`, each a number among those of its length.

    `first_ranks` and `totals` count the sequences of each length before these, and in the whole input.
    """
    ranks = np.asarray(first_ranks)[lengths] + rank_in_groups(lengths)
    return shuffle_places(ranks, np.asarray(totals)[lengths], (seed, SHUFFLE_SEQUENCES, lengths))


def fill_packs(slot_lengths, slot_numbers, depths, lengths, slots):
    """Put sequences into the slots of consecutive packs: `Packs` with each of 0..n-1 exactly once.

        slot_lengths [3 5 3], slot_numbers [9 4 8], depths [2 1]
        lengths      [3 5 3], slots        [8 4 9]                  ->   packs {2, 1}, {0}

    The first three are from `PackOrder.slots`; the others, int `[n]`, are those of the sequences of these
    packs. Raises `ValueError` where the sequences do not match the slots.
    """
    # The two are equal once sorted, unless some sequences were lost or read twice
    by_length = np.lexsort((slots, lengths))
    slots_by_length = np.lexsort((slot_numbers, slot_lengths))
    for mine, wanted in ((lengths, slot_lengths), (slots, slot_numbers)):
        if not np.array_equal(np.asarray(mine)[by_length], wanted[slots_by_length]):
            raise ValueError("`plan` must be one for the lengths of these sequences.")
    members = np.empty(len(lengths), np.int64)
    members[slots_by_length] = by_length
    return Packs(members, to_offsets(depths))


def assign_sequences(plan, lengths, seed):
    """Fill all packs of a `PackingPlan` in memory: `Packs` with each of 0..n-1 exactly once.

        lengths [3 5 3], plan {(3, 5): 1, (3,): 1}   ->   packs {2}, {0, 1}

    The seed shuffles packs, and sequences of equal length; in a pack, lengths ascend. Raises `ValueError`
    where the plan is for other lengths.
    """
    order = PackOrder(plan.strategies, seed)
    lengths = np.asarray(lengths, np.int64)
    totals = np.bincount(lengths)
    slots = choose_slots(lengths, np.zeros_like(totals), totals, seed)
    return fill_packs(*order.slots(0, order.num_packs), lengths, slots)


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
