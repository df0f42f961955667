"""In which order training reads packs: endless, shuffled, and found for any place alone.

An epoch cuts the packs, as they follow one another on the disk, into *stretches* from a border that it draws,
and draws an order of these. A *block* is as many stretches, from wherever they are, as the shuffle buffer
holds packs; its packs are shuffled. With 12 packs, a buffer of 4 and stretches of 2:

    on the disk         0  1  2  3  4  5  6  7  8  9 10 11
    stretches          ..]  [1  2] [3  4] [5  6] [7  8] [9 10] [11 0]
    blocks             {9 10 3 4}  {1 2 7 8}  {11 0 5 6}
    order              4 10 9 3    2 7 8 1    6 11 5 0

So any two packs may meet, the disk is read in stretches, and of an epoch no more than a block is held. Order
and borders are shuffles that nobody stores (`shuffle.py`): a run that continues computes the block that it
stopped in.
"""

import dataclasses

import numpy as np

from bert_packed.records.shuffle import find_items, shuffle_places
from bert_packed.records.tfrecords import count_records, scan_file

# Of a block. Packs of one stretch share a block whatever the others do, so stretches are short; each costs a
# disk a movement and an object store a request.
NUM_STRETCHES = 64
IN_ORDER_PACKS = 2**10  # of a block, where nothing is shuffled
BORDERS, STRETCHES, PACKS = 1, 2, 3  # what is drawn


@dataclasses.dataclass(frozen=True)
class PackIndex:
    """Where packs are.

    Attributes:
        files: List of paths.
        starts: int64 `[files + 1]`, packs before each file; their number in all last.
        offsets: List of int64 arrays: of each file, where in it every pack starts, in bytes, and its size
            last. A place for every few packs would take less room, but who reads a pack in four would then
            read most bytes of the file, and many of them twice.
    """

    files: list[str]
    starts: np.ndarray
    offsets: list[np.ndarray]

    @property
    def num_packs(self):
        return int(self.starts[-1])


@dataclasses.dataclass(frozen=True)
class Spans:
    """Packs that follow one another in one file, many times: what a reader opens, seeks and reads.

    Attributes:
        files: int64 `[n]`, into `PackIndex.files`.
        offsets: int64 `[n]`, byte at which the first starts.
        counts: int64 `[n]`, packs.
        numbers: int64 `[n]`, of the first in its file, from 1.
        num_bytes: int64 `[n]`, of all of them.
    """

    files: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray
    numbers: np.ndarray
    num_bytes: np.ndarray


def index_files(paths, scans=None):
    """Find where packs are, by reading each file once.

    Args:
        paths: List of TFRecord files.
        scans: What `tfrecords.scan_file` found of them, where it is known.

    Returns:
        `PackIndex`.

    Raises:
        InputError: a file is damaged; it names the record.
    """
    scans = [scan_file(path) for path in paths] if scans is None else scans
    for path, scan in zip(paths, scans, strict=True):
        if scan.num_records is None:
            count_records(path)  # which finds the place
    starts = np.cumsum([0, *(scan.num_records for scan in scans)])
    return PackIndex([str(path) for path in paths], starts, [scan.offsets for scan in scans])


def read_order(num_packs, seed, shuffle_buffer_size, first=0):
    """The packs of endless epochs, block after block.

    Args:
        num_packs: N, at least 1.
        seed: Whole number.
        shuffle_buffer_size: Most packs of a block; 1 for the order on the disk.
        first: Packs to leave out, as if they had been read before; no time passes with them.

    Yields:
        int64 `[at most shuffle_buffer_size]`: numbers of packs, from 0. N that follow one another from the
        start of an epoch are each pack once.
    """
    epoch, num_read = divmod(first, num_packs)
    while True:
        order = _Epoch(num_packs, seed, shuffle_buffer_size, epoch)
        for number in range(order.find_block(num_read), order.num_blocks):
            packs = order.block(number)
            yield packs[max(0, num_read - order.num_before(number)) :]
        epoch, num_read = epoch + 1, 0


def find_spans(index, packs):
    """Where some packs are read, in the order of the disk.

    Args:
        index: `PackIndex`.
        packs: Ascending int64 `[n]`.

    Returns:
        `Spans`.
    """
    files = np.searchsorted(index.starts, packs, side="right") - 1
    goes_on = (np.diff(packs) == 1) & (np.diff(files) == 0)
    begins = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    counts = np.diff(begins, append=len(packs))
    files = files[begins]
    records = packs[begins] - index.starts[files]
    pairs = zip(files, records, records + counts, strict=True)
    places = np.array([index.offsets[file][[first, end]] for file, first, end in pairs])
    return Spans(files, places[:, 0], counts, records + 1, places[:, 1] - places[:, 0])


class _Epoch:
    """One epoch's blocks: see `read_order` for the arguments."""

    def __init__(self, num_packs, seed, shuffle_buffer_size, epoch):
        self._num_packs = num_packs
        self._is_shuffled = shuffle_buffer_size > 1
        # No more than there are: who wants all packs shuffled together asks for a very large buffer
        most = min(shuffle_buffer_size if self._is_shuffled else IN_ORDER_PACKS, num_packs)
        self._length = max(1, most // NUM_STRETCHES)
        self._per_block = most // self._length
        self._num_stretches = -(-num_packs // self._length)
        self._key = (seed, epoch)
        self.num_blocks = -(-self._num_stretches // self._per_block)
        # The last stretch may be shorter than the others: how much, and where it comes in the order
        self._missing = self._num_stretches * self._length - num_packs
        self._short_place, self._first = self._num_stretches - 1, 0
        if self._is_shuffled:
            last = np.array([self._num_stretches - 1])
            self._short_place = int(shuffle_places(last, self._num_stretches, (*self._key, STRETCHES))[0])
            self._first = int(shuffle_places(np.array([0]), num_packs, (*self._key, BORDERS))[0])

    def num_before(self, number):
        """Packs in the blocks before one."""
        stretches = min(number * self._per_block, self._num_stretches)
        return stretches * self._length - (self._missing if self._short_place < stretches else 0)

    def find_block(self, num_read):
        """The block in which the pack stands that follows `num_read` others of this epoch."""
        number = num_read // (self._per_block * self._length)
        return number + (self.num_before(number + 1) <= num_read)

    def block(self, number):
        """The packs of a block, in their order."""
        places = np.arange(number * self._per_block, min((number + 1) * self._per_block, self._num_stretches))
        if not self._is_shuffled:
            first, last = places[0] * self._length, (places[-1] + 1) * self._length
            return np.arange(first, min(last, self._num_packs))
        stretches = find_items(places, self._num_stretches, (*self._key, STRETCHES))
        packs = (stretches[:, None] * self._length + np.arange(self._length)).reshape(-1)
        packs = (packs[packs < self._num_packs] + self._first) % self._num_packs
        key = (*self._key, PACKS, number)
        return packs[shuffle_places(np.arange(len(packs)), len(packs), key)]
