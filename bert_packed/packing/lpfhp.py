"""Longest-pack-first histogram-packing: lengths in descending order, each into the fullest pack that fits.

Best-fit decreasing on the histogram, but a length that fits into one pack several times is placed several
times at once (Packing: Towards 2x NLP BERT Acceleration, Section G and Listing 8). With S = 8:

    lengths 5, 4, 4, 3   ->   5 3 | 4 4
"""

from bert_packed.packing.histogram import check_arguments
from bert_packed.packing.plan import make_plan
from bert_packed.packing.spfhp import OpenPacks, descending


def pack_lpfhp(histogram, max_seq_length, max_sequences_per_pack):
    """Pack longest-pack-first.

    The packs are those of Listing 8, count for count, its quirk included: what is left after a length has
    opened packs of several copies opens one more pack, even where it would fit into another.

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
    packs = longest_pack_first(histogram, max_seq_length, depth)
    return make_plan("lpfhp", max_seq_length, max_sequences_per_pack, packs)


def longest_pack_first(histogram, max_seq_length, depth):
    """The packs, of checked arguments: list of `(lengths, count)`; equal packs may come more than once."""
    open_packs = OpenPacks(max_seq_length, depth)
    for length, num_left in descending(histogram):
        while num_left and (space := open_packs.smallest(length)) >= 0:
            num_packs, pack = open_packs.pop(space)
            repeat = min(space // length, depth - len(pack), num_left)
            count = min(num_packs, num_left // repeat)
            if num_packs > count:
                open_packs.push(space, num_packs - count, pack)
            open_packs.push(space - repeat * length, count, pack + (length,) * repeat)
            num_left -= count * repeat
        repeat = min(max_seq_length // length, depth)
        count, rest = divmod(num_left, repeat)
        for copies, times in ((repeat, count), (rest, 1)):
            if copies and times:
                open_packs.push(max_seq_length - copies * length, times, (length,) * copies)
    return open_packs.all_packs()
