"""Reading order of training packs: endless, shuffled, and computable from any position.

An epoch cuts the packs on disk into *stretches*, from a random start, and shuffles these. A *block* is the
stretches that fit in the shuffle buffer; its packs are shuffled. With 12 packs, a buffer of 4 and stretches
of 2:

    on the disk         0  1  2  3  4  5  6  7  8  9 10 11
    stretches          ..]  [1  2] [3  4] [5  6] [7  8] [9 10] [11 0]
    blocks             {9 10 3 4}  {1 2 7 8}  {11 0 5 6}
    order              4 10 9 3    2 7 8 1    6 11 5 0

So any two packs may share a batch, disk reads are sequential within stretches, and memory holds one block.
Shuffles are functions of the position (`shuffle.py`) and not stored: a resumed run computes only the block in
which it stopped.
"""

import dataclasses

import numpy as np

from bert_packed.records.shuffle import find_items, shuffle_places
from bert_packed.records.tfrecords import count_records, scan_file

# Per block. Packs of a stretch always share a block, so short stretches shuffle better, but each costs a seek
# on a disk and a request to an object store
NUM_STRETCHES = 64
IN_ORDER_PACKS = 2**10  # per block, where nothing is shuffled
BORDERS, STRETCHES, PACKS = 1, 2, 3  # last part of the keys of random numbers


@dataclasses.dataclass(frozen=True)
class PackIndex:
    """Positions of packs in files."""

    files: list[str]
    starts: np.ndarray  # int64 [files + 1], packs before each file; the number of all packs last
    # Of each file int64, the byte at which each pack starts; the file's size last. With offsets of every few
    # packs, a process that reads a pack in four would read most bytes twice
    offsets: list[np.ndarray]

    @property
    def num_packs(self):
        return int(self.starts[-1])


@dataclasses.dataclass(frozen=True)
class Spans:
    """Runs of consecutive packs of a file; int64 `[n]` each."""

    files: np.ndarray  # into `PackIndex.files`
    offsets: np.ndarray  # byte at which the run starts
    counts: np.ndarray  # packs
    numbers: np.ndarray  # record number of the first pack, from 1
    num_bytes: np.ndarray


def index_files(paths, scans=None):
    """`PackIndex` of TFRecord files, from `scans` of `tfrecords.scan_file` or by reading each file once.

    Raises `InputError`, naming the record, if a file is damaged.
    """
    scans = [scan_file(path) for path in paths] if scans is None else scans
    for path, scan in zip(paths, scans, strict=True):
        if scan.num_records is None:
            count_records(path)  # raises, naming the damaged record
    starts = np.cumsum([0, *(scan.num_records for scan in scans)])
    return PackIndex([str(path) for path in paths], starts, [scan.offsets for scan in scans])


def read_order(num_packs, seed, shuffle_buffer_size, first=0):
    """Yield blocks of pack numbers, from 0, of endless epochs; each epoch has every pack once.

    Args:
        num_packs: At least 1.
        shuffle_buffer_size: Maximum number of packs per block; 1 for the order on disk.
        first: Number of packs to skip, at no cost.
    """
    epoch, num_read = divmod(first, num_packs)
    while True:
        order = _Epoch(num_packs, seed, shuffle_buffer_size, epoch)
        for number in range(order.find_block(num_read), order.num_blocks):
            packs = order.block(number)
            yield packs[max(0, num_read - order.num_before(number)) :]
        epoch, num_read = epoch + 1, 0


def find_spans(index, packs):
    """`Spans` of packs, ascending int64 `[n]`."""
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
    """Blocks of one epoch; arguments as in `read_order`."""

    def __init__(self, num_packs, seed, shuffle_buffer_size, epoch):
        self._num_packs = num_packs
        self._is_shuffled = shuffle_buffer_size > 1
        # The buffer may be larger than the data, to shuffle all packs together
        most = min(shuffle_buffer_size if self._is_shuffled else IN_ORDER_PACKS, num_packs)
        self._length = max(1, most // NUM_STRETCHES)
        self._per_block = most // self._length
        self._num_stretches = -(-num_packs // self._length)
        self._key = (seed, epoch)
        self.num_blocks = -(-self._num_stretches // self._per_block)
        # The last stretch may be shorter than the others, by `_missing` packs; its position in the order
        self._missing = self._num_stretches * self._length - num_packs
        self._short_place, self._first = self._num_stretches - 1, 0
        if self._is_shuffled:
            last = np.array([self._num_stretches - 1])
            self._short_place = int(shuffle_places(last, self._num_stretches, (*self._key, STRETCHES))[0])
            self._first = int(shuffle_places(np.array([0]), num_packs, (*self._key, BORDERS))[0])

    def num_before(self, number):
        stretches = min(number * self._per_block, self._num_stretches)
        return stretches * self._length - (self._missing if self._short_place < stretches else 0)

    def find_block(self, num_read):
        """Number of the block that holds the pack after the first `num_read` of this epoch."""
        number = num_read // (self._per_block * self._length)
        return number + (self.num_before(number + 1) <= num_read)

    def block(self, number):
        places = np.arange(number * self._per_block, min((number + 1) * self._per_block, self._num_stretches))
        if not self._is_shuffled:
            first, last = places[0] * self._length, (places[-1] + 1) * self._length
            return np.arange(first, min(last, self._num_packs))
        stretches = find_items(places, self._num_stretches, (*self._key, STRETCHES))
        packs = (stretches[:, None] * self._length + np.arange(self._length)).reshape(-1)
        packs = (packs[packs < self._num_packs] + self._first) % self._num_packs
        key = (*self._key, PACKS, number)
        return packs[shuffle_places(np.arange(len(packs)), len(packs), key)]
