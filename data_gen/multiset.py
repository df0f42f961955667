"""Comparison of two multisets of digests that exceed memory.

Each 128-bit digest belongs to one of 65,536 buckets. A first pass adds up digests and their number, for each
bucket and side:

    left {a b c}, right {c a a}     ->   sums a + b + c and c + a + a, 3 and 3: they differ
    left {a b c}, right {c a b}     ->   equal sums: the same digests, in any order

Sums are equal by chance once in 2^128 (Clarke et al., "Incremental multiset hash functions", 2003,
MSet-Add), so buckets with equal sums are equal. For the others, the digests are read again, for as many
buckets at a time as fit in memory.
"""

import numpy as np

from bert_packed.records.sequences import rank_in_groups

NUM_BUCKETS = 2**16
MOST_HELD = 2**21  # digests of both sides in memory: 40 bytes each, four times that while they are sorted


class BucketSums:
    """Number and sum of the digests in each bucket of one side, in 24 bytes per bucket."""

    def __init__(self):
        self.counts = np.zeros(NUM_BUCKETS, np.int64)
        self._sums = np.zeros((NUM_BUCKETS, 2), np.uint64)

    def add(self, digests):
        """Add digests, uint64 `[n, 2]`."""
        buckets = find_buckets(digests)
        self.counts += np.bincount(buckets, minlength=NUM_BUCKETS)
        for half in range(2):
            np.add.at(self._sums[:, half], buckets, digests[:, half])  # modulo 2^64

    def find_different(self, other):
        """Buckets whose content differs from the other side's: ascending int array."""
        differs = (self.counts != other.counts) | np.any(self._sums != other._sums, axis=1)
        return np.flatnonzero(differs)


def find_buckets(digests):
    """The bucket of each digest: int64 `[n]`, from uint64 `[n, 2]`."""
    return (digests[:, 0] % np.uint64(NUM_BUCKETS)).astype(np.int64)


def find_unmatched(sums, readers):
    """Yield, by group of buckets, the origins on either side without a partner: two int arrays `[m, 3]`.

    Args:
        sums: Two `BucketSums`, of all digests of each side.
        readers: For each side a function that reads it again: to an iterable of (digests, uint64 `[n, 2]`;
            their origins, int `[n, 3]`).
    """
    for group in group_buckets(sums[0].find_different(sums[1]), sums[0].counts + sums[1].counts):
        sides = [hold(read(), group) for read in readers]
        rows = unmatched(*(digests for digests, _ in sides))
        yield tuple(origins[some] for some, (_, origins) in zip(rows, sides, strict=True))


def group_buckets(buckets, counts):
    """Group buckets, at most `MOST_HELD` digests in a group of several: list of int arrays.

        counts [3 4 2 9] with MOST_HELD = 7   ->   buckets {0 1}, {2}, {3}

    `counts` are the digests of both sides in each bucket.
    """
    groups, size = [], MOST_HELD
    for bucket in buckets.tolist():
        size += counts[bucket]
        if size > MOST_HELD or not groups:
            groups.append([])
            size = counts[bucket]
        groups[-1].append(bucket)
    return [np.array(group) for group in groups]


def hold(batches, buckets):
    """Keep the (digests, origins) of some buckets, in order: two arrays, `[m, 2]` and `[m, 3]`."""
    is_wanted = np.zeros(NUM_BUCKETS, bool)
    is_wanted[buckets] = True
    held = [(np.zeros((0, 2), np.uint64), np.zeros((0, 3), np.int64))]
    for digests, origins in batches:
        wanted = is_wanted[find_buckets(digests)]
        held.append((digests[wanted], origins[wanted]))
    return tuple(np.concatenate(arrays) for arrays in zip(*held, strict=True))


def unmatched(left, right):
    """Ascending indices of entries without a partner in the other multiset; both are uint64 `[n, 2]`.

    left [a b a], right [a c]   ->   left [1 2], right [1]
    """
    both = np.concatenate([left, right])
    order = np.lexsort(both.T)
    is_new = np.any(both[order][1:] != both[order][:-1], axis=1)
    groups = np.zeros(len(both), np.int64)
    groups[order[1:]] = np.cumsum(is_new)
    sides = groups[: len(left)], groups[len(left) :]
    counts = [np.bincount(side, minlength=len(both)) for side in sides]
    return tuple(
        np.flatnonzero(rank_in_groups(side) >= others[side])
        for side, others in zip(sides, reversed(counts), strict=True)
    )
