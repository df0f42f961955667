"""Which pack each sequence goes to, found for any part of the data alone.

A plan says how often each strategy is used, a shuffle (`shuffle.py`) in which order the packs stand. All
slots for sequences of one length are numbered in the order of the packs, all sequences of that length in the
order of the input, and a second shuffle puts the one into the other:

    packs            (3 5) (3) (3 5) ...        plan {(3 5): 2, (3): 1}, shuffled
    slots of 3        0     1   2               sequences of length 3: the first gets slot 2, ...
    slots of 5          0         1

So the assignment depends on plan, order of the input, and seed, and on nothing else: not on shards, passes
or processes. "Length" is the plan's word; any whole number that tells kinds of sequences apart will do.
"""

import dataclasses

import numpy as np

from data_gen.sequences import range_indices, to_offsets
from data_gen.shuffle import shuffle_places

SHUFFLE_PACKS, SHUFFLE_SEQUENCES = 1, 2
PACKS_AT_ONCE = 2**20  # a few dozen megabytes


@dataclasses.dataclass(frozen=True)
class Packs:
    """Which sequences each pack holds, in columns.

        packs {4, 0}, {2}   ->   members [4 0 2], offsets [0 2 3]

    Attributes:
        members: int64 `[n]`, indices of sequences, pack after pack and slot after slot.
        offsets: int64 `[num_packs + 1]`, where each pack starts in `members`; n last.
    """

    members: np.ndarray
    offsets: np.ndarray

    def __len__(self):
        return len(self.offsets) - 1

    def part(self, start, stop):
        """The packs `start` to `stop`, the latter excluded, as `Packs`."""
        first, last = self.offsets[start], self.offsets[min(stop, len(self))]
        return Packs(self.members[first:last], self.offsets[start : stop + 1] - first)


class PackOrder:
    """The packs of a plan in their shuffled order.

    Args:
        strategies: Dict from strategy to count, as in `PackingPlan`.
        seed: Whole number.
    """

    def __init__(self, strategies, seed):
        depths = [len(strategy) for strategy in strategies]
        self._lengths = np.array([length for strategy in strategies for length in strategy], np.int64)
        self._offsets = to_offsets(depths)
        self._ends = np.cumsum(np.array(list(strategies.values()), np.int64))
        self._seed = seed

    @property
    def num_packs(self):
        return int(self._ends[-1]) if len(self._ends) else 0

    def slots(self, first, last):
        """The slots of the packs `first` to `last`, the latter excluded.

        Returns:
            int64 `[num_slots]`: the length that each slot is for, pack after pack, ascending within each;
            and int64 `[last - first]`: slots of each pack.
        """
        places = shuffle_places(np.arange(first, last), self.num_packs, (self._seed, SHUFFLE_PACKS))
        strategies = np.searchsorted(self._ends, places, side="right")
        depths = np.diff(self._offsets)[strategies]
        return self._lengths[range_indices(self._offsets[strategies], depths)], depths

    def count_slots(self, limits, num_lengths):
        """How many slots of each length stand before each of some packs.

        Args:
            limits: Int array `[m]`, ascending pack numbers.
            num_lengths: Lengths are below it.

        Returns:
            int64 `[m, num_lengths]`.
        """
        counts = np.zeros((len(limits), num_lengths), np.int64)
        before, total = 0, np.zeros(num_lengths, np.int64)
        for row, limit in enumerate(limits):
            for first in range(before, limit, PACKS_AT_ONCE):
                lengths, _ = self.slots(first, min(first + PACKS_AT_ONCE, limit))
                total += np.bincount(lengths, minlength=num_lengths)
            counts[row], before = total, limit
        return counts


def choose_slots(lengths, first_ranks, totals, seed):
    """The slot of each of some sequences that follow one another in the input.

    Args:
        lengths: Int array `[n]`.
        first_ranks: Int array `[num_lengths]`: sequences of each length that stand before these.
        totals: Int array `[num_lengths]`: sequences of each length in all.
        seed: Whole number.

    Returns:
        int64 `[n]`, the number of the slot among those for its length.
    """
    order = np.argsort(lengths, kind="stable")
    counts = np.bincount(lengths, minlength=len(totals))
    ranks = np.empty(len(lengths), np.int64)
    ranks[order] = range_indices(np.asarray(first_ranks)[counts > 0], counts[counts > 0])
    return shuffle_places(ranks, np.asarray(totals)[lengths], (seed, SHUFFLE_SEQUENCES, lengths))


def find_parts(lengths, slots, limits):
    """The part of the packs in which each slot lies.

    Args:
        lengths, slots: Int arrays `[n]`.
        limits: int64 `[num_parts + 1, num_lengths]`: slots before each part, from `PackOrder.count_slots`.

    Returns:
        int64 `[n]`.
    """
    # one search for all lengths: those of each length follow one another, far apart
    stride = int(limits.max(initial=0)) + 1
    ends = limits[1:] + stride * np.arange(limits.shape[1])
    num_parts = len(limits) - 1
    return np.searchsorted(ends.T.reshape(-1), slots + stride * lengths, side="right") - num_parts * lengths


def fill_packs(slot_lengths, depths, lengths, slots):
    """Put sequences into the slots of packs that follow one another.

        slot_lengths [3 5 3], depths [2 1], lengths [3 5 3], slots [9 4 8]   ->   packs {2, 1}, {0}

    Args:
        slot_lengths, depths: Of these packs, from `PackOrder.slots`.
        lengths, slots: Int arrays `[n]`, of all sequences that belong into them.

    Returns:
        `Packs` with each of 0..n-1 exactly once.

    Raises:
        ValueError: the sequences are not those that the slots are for.
    """
    by_length = np.lexsort((slots, lengths))
    slots_by_length = np.argsort(slot_lengths, kind="stable")
    if not np.array_equal(np.asarray(lengths)[by_length], slot_lengths[slots_by_length]):
        raise ValueError("`plan` must be one for the lengths of these sequences.")
    members = np.empty(len(lengths), np.int64)
    members[slots_by_length] = by_length
    return Packs(members, to_offsets(depths))


def assign_sequences(plan, lengths, seed):
    """Fill all packs of a plan at once, where everything fits into memory.

    Packs are shuffled, so that equal strategies do not stand side by side; sequences of one length are
    interchangeable and shuffled too. In a pack, sequences stand in ascending length.

        lengths [3 5 3], plan {(3, 5): 1, (3,): 1}   ->   packs {2}, {0, 1}

    Args:
        plan: `PackingPlan`.
        lengths: Integer array `[n]`, the length of every sequence.
        seed: Whole number; same seed, same packs.

    Returns:
        `Packs` with each of 0..n-1 exactly once.

    Raises:
        ValueError: the plan is not one for these lengths.
    """
    order = PackOrder(plan.strategies, seed)
    slot_lengths, depths = order.slots(0, order.num_packs)
    lengths = np.asarray(lengths, np.int64)
    totals = np.bincount(lengths)
    slots = choose_slots(lengths, np.zeros_like(totals), totals, seed)
    return fill_packs(slot_lengths, depths, lengths, slots)
