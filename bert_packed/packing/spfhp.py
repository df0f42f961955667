"""Shortest-pack-first histogram-packing: lengths in descending order, each into the emptiest pack that fits.

Worst-fit decreasing on the histogram (Efficient Sequence Packing, Section 3.1; Packing: Towards 2x NLP BERT
Acceleration, Listing 4). With S = 8 and one sequence each of length 5, 4, 3, 2:

    5    ->  5
    4    ->  5 | 4         5 leaves 3, so 4 opens a pack
    3    ->  5 | 4 3       4 leaves 4, the emptiest
    2    ->  5 2 | 4 3
"""

from bert_packed.packing.histogram import check_arguments
from bert_packed.packing.plan import make_plan


def pack_spfhp(histogram, max_seq_length, max_sequences_per_pack):
    """Pack shortest-pack-first.

    The packs are those of Listing 4, count for count: among packs with equal space the one touched last is
    filled first, and it matters, because such packs differ in depth. The listing searches the space
    downwards one by one, we look it up in the bits of a whole number.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        max_sequences_per_pack: Depth, a whole number from 1, or "max".

    Returns:
        A `PackingPlan`.

    Raises:
        ValueError: an argument breaks its rule.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    open_packs = OpenPacks(max_seq_length, depth)
    for length, num_left in descending(histogram):
        # A pack that was just filled may take the same length again, but only on the way down: going back
        # up would always find the packs that this very length has opened and never leave them.
        space = open_packs.largest(max_seq_length)
        while num_left and space >= length:
            num_packs, pack = open_packs.pop(space)
            count = min(num_packs, num_left)
            if num_packs > count:
                open_packs.push(space, num_packs - count, pack)
            open_packs.push(space - length, count, (*pack, length))
            num_left -= count
            space = open_packs.largest(space)
        if num_left:
            open_packs.push(max_seq_length - length, num_left, (length,))
    return make_plan("spfhp", max_seq_length, max_sequences_per_pack, open_packs.all_packs())


def descending(histogram):
    """`(length, count)` of the lengths that occur, longest first."""
    return [
        (length, count)
        for length, count in zip(range(len(histogram), 0, -1), histogram[::-1].tolist(), strict=True)
        if count
    ]


class OpenPacks:
    """Equal packs with their count, in one stack per number of free tokens.

    Which stacks hold something is also kept as the bits of one whole number, so that the emptiest and the
    fullest pack that fits are found by bit arithmetic and not by trying every free space.
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

    def pop(self, space):
        """Take the `(count, pack)` last pushed with this space."""
        stack = self._stacks[space]
        last = stack.pop()
        if not stack:
            self._bits ^= 1 << space
        return last

    def largest(self, limit):
        """The largest space, at most `limit`, of any open pack; -1 for none."""
        return (self._bits & ((2 << limit) - 1)).bit_length() - 1

    def smallest(self, limit):
        """The smallest space, at least `limit`, of any open pack; -1 for none."""
        above = self._bits >> limit
        return limit + (above & -above).bit_length() - 1 if above else -1

    def all_packs(self):
        """Every pack, closed or open, as `(lengths, count)`; equal packs may come more than once."""
        return self._closed + [(pack, count) for stack in self._stacks for count, pack in stack]
