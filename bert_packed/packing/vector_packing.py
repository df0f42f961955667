"""Packs for sequences of several lengths, such as audio and text, each with its own capacity.

Greedy, on a histogram of classes: a pack begins with the largest class left, and takes the largest that still
fits until none does; the same pack is repeated as often as its classes last. "Large" is the largest share of
any capacity, then the sum of shares: what is hard to place goes first.
"""

from collections import Counter

import numpy as np

NAME = "vector-greedy"


def pack_vectors(sizes, counts, capacities, depth):
    """Pack classes: dict from strategy, an ascending tuple of class numbers, to its number of packs.

    `sizes`, `[c, g]`, are the g lengths of each class, none over its capacity, `[g]`; `counts`, `[c]`, its
    sequences; `depth` the most of them in a pack.
    """
    shares = sizes / capacities
    order = np.lexsort((-shares.sum(axis=1), -shares.max(axis=1)))
    sizes, left = sizes[order], np.array(counts, np.int64)[order]
    strategies = Counter()
    first = 0
    while True:
        while first < len(left) and not left[first]:
            first += 1
        if first == len(left):
            return {tuple(sorted(key)): int(count) for key, count in sorted(strategies.items())}
        members, room = [], np.array(capacities, np.int64)
        available = left.copy()
        place = first
        while True:
            members.append(place)
            available[place] -= 1
            room = room - sizes[place]
            if len(members) == depth:
                break
            fits = (available[place:] > 0) & np.all(sizes[place:] <= room, axis=1)
            if not fits.any():
                break
            place += int(np.argmax(fits))
        used, times = np.unique(members, return_counts=True)
        repeats = int((left[used] // times).min())
        left[used] -= repeats * times
        strategies[tuple(sorted(order[members].tolist()))] += repeats


def lower_bound(sizes, counts, capacities, depth):
    """Fewest packs that the totals allow."""
    totals = counts @ sizes
    return int(max(*(-(-totals // capacities)), -(-int(counts.sum()) // depth)))
