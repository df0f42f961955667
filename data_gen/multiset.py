"""Where two collections of sequences too large for memory differ: sums of digests, then digests of the rest.

Each sequence has a digest of 128 bits, which chooses one of 65,536 buckets. A first reading adds up, for each
bucket and side, the digests and their number:

    left {a b c}, right {c a a}     ->   sums a + b + c and c + a + a, 3 and 3: they differ
    left {a b c}, right {c a b}     ->   equal sums: the same sequences, in whatever order

Sums of digests are equal by chance once in 2^128 (Clarke and others, "Incremental multiset hash functions",
2003, MSet-Add). So buckets of equal sums hold the same sequences and are done with. Where others are left,
the files are read again, and only digests in these buckets are held: as many buckets at a time as fit.
"""

import dataclasses

import numpy as np

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


@dataclasses.dataclass(frozen=True)
class Held:
    """Sequences of one side whose digests are held.

    Attributes:
        digests: uint64 `[n, 2]`.
        origins: Int array `[n, 3]`: number of the file, record in it, tokens.
    """

    digests: np.ndarray
    origins: np.ndarray


def find_buckets(digests):
    """The bucket of each digest: int64 `[n]`, from uint64 `[n, 2]`."""
    return (digests[:, 0] % np.uint64(NUM_BUCKETS)).astype(np.int64)


def hold(batches, buckets):
    """Keep the sequences of some buckets.

    Args:
        batches: Iterable of (digests, origins), as in `Held`.
        buckets: Int array.

    Returns:
        `Held`, in the order of `batches`.
    """
    is_wanted = np.zeros(NUM_BUCKETS, bool)
    is_wanted[buckets] = True
    digests, origins = [np.zeros((0, 2), np.uint64)], [np.zeros((0, 3), np.int64)]
    for some, their_origins in batches:
        wanted = is_wanted[find_buckets(some)]
        digests.append(some[wanted])
        origins.append(their_origins[wanted])
    return Held(np.concatenate(digests), np.concatenate(origins))


def group_buckets(buckets, counts, most_held=None):
    """Cut buckets into groups whose digests can be held together.

        counts [3 4 2 9] with most_held=7   ->   buckets {0 1}, {2}, {3}

    Args:
        buckets: Ascending int array.
        counts: Int array `[NUM_BUCKETS]`: digests in each bucket, of both sides.
        most_held: Digests of a group that has several buckets; None for `MOST_HELD`.

    Returns:
        List of int arrays.
    """
    most_held = MOST_HELD if most_held is None else most_held
    groups, size = [], most_held
    for bucket in buckets.tolist():
        size += counts[bucket]
        if size > most_held or not groups:
            groups.append([])
            size = counts[bucket]
        groups[-1].append(bucket)
    return [np.array(group) for group in groups]
