"""Comparison of two collections of digests too large for memory: sums of all, then the digests of the rest.

Each digest of 128 bits chooses one of 65,536 buckets. A first reading adds up, for each bucket and side, the
digests and their number:

    left {a b c}, right {c a a}     ->   sums a + b + c and c + a + a, 3 and 3: they differ
    left {a b c}, right {c a b}     ->   equal sums: the same digests, in whatever order

Sums of digests are equal by chance once in 2^128 (Clarke and others, "Incremental multiset hash functions",
2003, MSet-Add), so buckets of equal sums are done with. Where others are left, the digests are read again,
and only those in these buckets are held: as many buckets at a time as fit.
"""

import numpy as np

from bert_packed.records.sequences import rank_in_groups

NUM_BUCKETS = 2**16
MOST_HELD = 2**21  # digests of both sides at once: 40 bytes each, and as much again three times to sort them


class BucketSums:
    """Numbers and sums of the digests in each bucket of one side: 24 bytes a bucket, whatever its size."""

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
        """The buckets whose content differs from that of another side: ascending int array."""
        differs = (self.counts != other.counts) | np.any(self._sums != other._sums, axis=1)
        return np.flatnonzero(differs)


def find_buckets(digests):
    """The bucket of each digest: int64 `[n]`, from uint64 `[n, 2]`."""
    return (digests[:, 0] % np.uint64(NUM_BUCKETS)).astype(np.int64)


def find_unmatched(sums, readers):
    """Find what one side has and the other has not, or not as often.

    Args:
        sums: Two `BucketSums`, of all digests of each side.
        readers: For each side a function that reads it again: to an iterable of pairs of digests, uint64
            `[n, 2]`, and of where they are from, int array `[n, 3]`.

    Yields:
        For each group of buckets, the origins of either side that have no partner: two int arrays `[m, 3]`.
    """
    for group in group_buckets(sums[0].find_different(sums[1]), sums[0].counts + sums[1].counts):
        sides = [hold(read(), group) for read in readers]
        rows = unmatched(*(digests for digests, _ in sides))
        yield tuple(origins[some] for some, (_, origins) in zip(rows, sides, strict=True))


def group_buckets(buckets, counts):
    """Cut buckets into groups whose digests can be held together.

        counts [3 4 2 9] with MOST_HELD = 7   ->   buckets {0 1}, {2}, {3}

    `buckets` ascend, `counts` are the digests in every bucket, of both sides. Returns a list of int arrays.
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
    """Those of (digests, origins) in some buckets, in their order: two arrays, `[m, 2]` and `[m, 3]`."""
    is_wanted = np.zeros(NUM_BUCKETS, bool)
    is_wanted[buckets] = True
    held = [(np.zeros((0, 2), np.uint64), np.zeros((0, 3), np.int64))]
    for digests, origins in batches:
        wanted = is_wanted[find_buckets(digests)]
        held.append((digests[wanted], origins[wanted]))
    return tuple(np.concatenate(arrays) for arrays in zip(*held, strict=True))


def unmatched(left, right):
    """Which entries of two multisets have no partner in the other.

        left [a b a], right [a c]   ->   left [1 2], right [1]

    Both are digests, uint64 `[n, 2]`. Returns ascending indices into each.
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
