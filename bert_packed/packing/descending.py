"""Packing by descending length: SPFHP, LPFHP, first- and best-fit decreasing, all on the histogram.

Longest first, each sequence goes into an open pack that has room, or else into a new one. Equal packs move
together, so the cost does not depend on the number of sequences.

    spfhp    the emptiest pack: Efficient Sequence Packing, Section 3.1; Towards 2x, Listing 4
    lpfhp    the fullest, as many equal lengths at once as fit: Towards 2x, Section G and Listing 8
    ffd      the pack opened first
    bfd      the fullest, of equals the one opened first

With S = 8, lengths 5 4 3 2   ->   spfhp 5 2 | 4 3,   the others 5 3 | 4 2

`packs_of_three`, in none of the papers, is for small depths online.
"""

import numpy as np

from bert_packed.packing.histogram import check_arguments
from bert_packed.packing.plan import make_plan


def pack_spfhp(histogram, max_seq_length, max_sequences_per_pack):
    """Pack shortest-pack-first, count for count as Listing 4; see `algorithms` for arguments and result."""
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    open_packs = _OpenPacks(max_seq_length, depth)
    for length, num_left in _descending(counts):
        # A pack that was just filled may take the same length again, but only on the way down: going back
        # up would always find the packs that this very length has opened and never leave them.
        space = open_packs.largest(max_seq_length)
        while num_left and space >= length:
            num_left -= open_packs.fill(space, length, num_left, repeat=1)
            space = open_packs.largest(space)
        if num_left:
            open_packs.push(max_seq_length - length, num_left, (length,))
    return make_plan("spfhp", max_seq_length, max_sequences_per_pack, open_packs.all_packs())


def pack_lpfhp(histogram, max_seq_length, max_sequences_per_pack):
    """Pack longest-pack-first, count for count as Listing 8; see `algorithms` for arguments and result."""
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    return make_plan("lpfhp", max_seq_length, max_sequences_per_pack, longest_pack_first(counts, depth))


def longest_pack_first(histogram, depth):
    """The packs of LPFHP, of checked arguments: list of `(lengths, count)`, where equal packs may repeat."""
    max_seq_length = len(histogram)
    open_packs = _OpenPacks(max_seq_length, depth)
    for length, num_left in _descending(histogram):
        while num_left and (space := open_packs.smallest(length)) >= 0:
            num_left -= open_packs.fill(space, length, num_left, repeat=space // length)
        repeat = min(max_seq_length // length, depth)
        count, rest = divmod(num_left, repeat)
        # A quirk of the listing: the rest opens one more pack, even where it would fit into another
        for copies, times in ((repeat, count), (rest, 1)):
            if copies and times:
                open_packs.push(max_seq_length - copies * length, times, (length,) * copies)
    return open_packs.all_packs()


def packs_of_three(histogram):
    """Pack the longest sequence left with the two others, or the one, that fill its pack best.

    The most equal pair of equal sums is taken. Where nearly every pack must hold three, LPFHP gives long
    sequences the one other that fits exactly, and the short ones that it leaves fill packs in number only:

        S = 8, lengths 4 4 3 2 2 1     packs of three 4 2 2 | 4 3 1     LPFHP of depth 3: 4 4 | 3 2 2 | 1
    """
    left, packs = np.array(histogram), []
    for longest in range(len(left), 0, -1):
        while left[longest - 1]:
            left[longest - 1] -= 1
            others = _best_pair(left, len(left) - longest)
            for length in others:
                left[length - 1] -= 1
            packs.append(((longest, *others), 1))
    return packs


def _best_pair(left, room):
    """Two lengths of those that are `left`, or one, with the largest sum up to `room`; () where none fits."""
    lengths = np.flatnonzero(left[:room]) + 1
    if not len(lengths):
        return ()
    partners = np.searchsorted(lengths, room - lengths, side="right") - 1  # the largest beside each; -1: none
    needs_two = partners == np.arange(len(lengths))  # of a length beside itself
    partners -= needs_two & (left[lengths - 1] < 2)
    others = np.where(partners >= 0, lengths[partners], 0)
    best = np.flatnonzero(lengths + others == np.max(lengths + others))
    most_equal = best[np.argmin(np.abs(lengths[best] - others[best]))]
    return tuple(int(length) for length in (lengths[most_equal], others[most_equal]) if length)


def pack_ffd(histogram, max_seq_length, max_sequences_per_pack):
    """Pack first-fit decreasing; see `algorithms` for arguments and result."""
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    return make_plan("ffd", max_seq_length, max_sequences_per_pack, first_fit_decreasing(counts, depth))


def first_fit_decreasing(histogram, depth):
    """The packs of FFD, of checked arguments: list of `(lengths, count)`, where equal packs may repeat."""
    return _fit(histogram, depth, lambda group: 0)


def pack_bfd(histogram, max_seq_length, max_sequences_per_pack):
    """Pack best-fit decreasing; see `algorithms` for arguments and result."""
    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    packs = _fit(counts, depth, lambda group: group[0])
    return make_plan("bfd", max_seq_length, max_sequences_per_pack, packs)


def _descending(histogram):
    """`(length, count)` of the lengths that occur, longest first."""
    pairs = zip(range(len(histogram), 0, -1), histogram[::-1].tolist(), strict=True)
    return [(length, count) for length, count in pairs if count]


class _OpenPacks:
    """Equal packs with their count, in one stack per number of free tokens.

    The bits of a whole number say which stacks hold something, so that a pack is found without a search.
    """

    def __init__(self, max_seq_length, depth):
        self._depth = depth
        self._stacks = [[] for _ in range(max_seq_length + 1)]
        self._bits = 0
        self._closed = []

    def push(self, space, count, pack):
        """Add `count` packs with `space` free tokens; those full in tokens or in sequences are closed."""
        if space == 0 or len(pack) == self._depth:
            self._closed.append((pack, count))
        else:
            self._stacks[space].append((count, pack))
            self._bits |= 1 << space

    def fill(self, space, length, num_left, repeat):
        """Put sequences, up to `repeat` in a pack, into equal packs with `space` free; returns how many."""
        # The pack touched last comes first of equal spaces, as in the listings: such packs differ in depth
        num_packs, pack = self._stacks[space].pop()
        if not self._stacks[space]:
            self._bits ^= 1 << space
        repeat = min(repeat, self._depth - len(pack), num_left)
        count = min(num_packs, num_left // repeat)
        if num_packs > count:
            self.push(space, num_packs - count, pack)
        self.push(space - repeat * length, count, pack + (length,) * repeat)
        return count * repeat

    def largest(self, limit):
        """The largest space, at most `limit`, of any open pack; -1 for none."""
        return (self._bits & ((2 << limit) - 1)).bit_length() - 1

    def smallest(self, limit):
        """The smallest space, at least `limit`, of any open pack; -1 for none."""
        above = self._bits >> limit
        return limit + (above & -above).bit_length() - 1 if above else -1

    def all_packs(self):
        return self._closed + [(pack, count) for stack in self._stacks for count, pack in stack]


def _fit(histogram, depth, preference):
    """Pack by groups `(space, count, pack)`: the lowest `preference(group)` first, of equals the earlier."""
    max_seq_length, closed, groups = len(histogram), [], []
    for length, num_left in _descending(histogram):
        fitting = [index for index, group in enumerate(groups) if group[0] >= length]
        fitting.sort(key=lambda index: preference(groups[index]))
        replaced = {}
        for index in fitting:
            if not num_left:
                break
            replaced[index] = filled = _fill(groups[index], length, num_left, depth)
            num_left -= sum((len(pack) - len(groups[index][2])) * count for _, count, pack in filled)
        # A pack that was filled once holds no more of this length, so packs sorted out before stay right.
        new = _fill((max_seq_length, num_left, ()), length, num_left, depth) if num_left else []
        merged = []
        for index, group in enumerate(groups):
            merged.extend(replaced.get(index, (group,)))
        merged.extend(group for group in new if group[2])
        groups = []
        for space, count, pack in merged:
            if space == 0 or len(pack) == depth:
                closed.append((pack, count))
            else:
                groups.append((space, count, pack))
    return closed + [(pack, count) for _, count, pack in groups]


def _fill(group, length, num_left, depth):
    """Fill packs of a group one after the other: some to the brim, at most one partly, the rest untouched."""
    space, count, pack = group
    repeat = min(space // length, depth - len(pack))
    num_full = min(count, num_left // repeat)
    rest = num_left - num_full * repeat if num_full < count else 0
    parts = [(repeat, num_full), (rest, 1 if rest else 0), (0, count - num_full - (1 if rest else 0))]
    return [
        (space - copies * length, packs, pack + (length,) * copies) for copies, packs in parts if packs > 0
    ]
