"""Packs as indices of sequences, and the positions of their entries in arrays with one row per pack."""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.records.sequences import range_indices, sum_ranges, to_offsets


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
        return range_indices(np.zeros(len(self)), self.depths)

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

    Args:
        sequences: `Sequences`.
        packs: n `Packs` of them.
        name: Column with any number of entries per sequence.
        size: Capacity of a pack; raises `ValueError` for a pack with more entries.

    Returns:
        Three int64 arrays, member by member: the index of each entry in the column, its index in an array
        `[n * size]`, and the start of each member in its pack.
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
