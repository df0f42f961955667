"""Reading order of training packs, its division among processes, and reading by it.

The order is endless, shuffled, and computable from any position.

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

Legend: B packs per step, M packs per micro-batch, W processes.
"""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.records.shuffle import find_items, shuffle_places
from bert_packed.records.tfrecords import count_records, read_batches, scan_file

# A block has as many stretches. Packs of a stretch always share a block, so short stretches shuffle better,
# but each costs a seek on a disk and a request to an object store
NUM_STRETCHES = 64
IN_ORDER_PACKS = 2**10  # per block, where nothing is shuffled
READERS = 8  # spans that are read at once, to hide the latency of object stores
BORDERS, STRETCHES, PACKS = 1, 2, 3  # last part of the keys of random numbers


@dataclasses.dataclass(frozen=True)
class PackIndex:
    """Positions of packs in files."""

    files: list[str]
    starts: np.ndarray  # int64 [files + 1], packs before each file; the number of all packs last
    # int64 for each file, the byte at which each pack starts; the file's size last. If only every few packs
    # had an offset, a process that reads a pack in four would read most bytes twice
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

    A block has `shuffle_buffer_size` packs at most, which is 1 for the order on disk. Skipping the `first`
    packs costs nothing.
    """
    epoch, num_read = divmod(first, num_packs)
    while True:
        order = _Epoch(num_packs, seed, shuffle_buffer_size, epoch)
        for number in range(order.find_block(num_read), order.num_blocks):
            packs = order.block(number)
            yield packs[max(0, num_read - order.num_before(number)) :]
        epoch, num_read = epoch + 1, 0


def balance_steps(blocks, sizes, count_pairs, num_devices, micro_batch_size, num_packs, first=0):
    """Yield the packs of `read_order` in blocks of whole steps, in which devices have like numbers of pairs.

    Each step keeps its packs. They are dealt in rounds, those with most pairs first; in every round the
    device with the fewest pairs so far gets the pack with the most. Two devices, micro-batches of four:

        pairs as shuffled    2 9 1 3 4 8 3 4        device 0 has 23, device 1 has 11
        pairs as dealt       9 4 8 4 3 1 3 2        both have 17

    Args:
        blocks: Those of `read_order` after the `first` packs of all `num_packs`, where a step begins.
        sizes: Iterator of the number of packs of each step, a multiple of `micro_batch_size`.
        count_pairs: Function from pack numbers, int64 `[n]`, to pairs of tokens that attend, int64 `[n]`.
        num_devices: Number of devices, which divides `micro_batch_size`.
    """
    held, size = np.zeros(0, np.int64), next(sizes)
    for packs in blocks:
        held, steps = np.concatenate([held, packs]), []
        while len(held) >= size:
            step, held = held[:size], held[size:]
            # Fresh masks follow from the epoch of a place, so no pack goes to a place of another epoch
            if first // num_packs == (first + size - 1) // num_packs:
                step = step[_deal(count_pairs(step), num_devices, micro_batch_size)]
            steps.append(step)
            first, size = first + size, next(sizes)
        yield np.concatenate([held[:0], *steps])


def _deal(pairs, num_devices, micro_batch_size):
    rounds = np.argsort(-pairs, kind="stable").reshape(-1, num_devices)  # of equals the shuffle decides
    sums, dealt = np.zeros(num_devices, np.int64), np.empty_like(rounds)
    for number, packs in enumerate(rounds):
        devices = np.argsort(sums, kind="stable")
        dealt[number, devices] = packs
        sums[devices] += pairs[packs]
    # A device's packs of a micro-batch follow one another
    return dealt.reshape(-1, micro_batch_size // num_devices, num_devices).swapaxes(1, 2).ravel()


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


def read_packs(index, packs):
    """The records of packs, int64 `[n]` in any order: list of n (`bytes`, index of the file, record number).

    Raises `InputError`, naming the file, where a record is damaged or the file became shorter.
    """
    parts, order = _plan_reading(index, packs)
    found = [record for part in parts for record in part()]
    return [found[place] for place in order.tolist()]


def read_blocks(index, blocks):
    """Yield the records of blocks of packs as lists, each a part of what `read_packs` returns of a block.

    While a block is consumed, the next one is read in equally many parts. So no consumer waits for a whole
    block but the first, and memory holds two.
    """
    held = []
    for packs in blocks:
        if not len(packs):  # another process has them all
            continue
        parts, order = _plan_reading(index, packs)
        found, num_held = [], len(held)
        for number, part in enumerate(parts):
            yield held[number * num_held // len(parts) : (number + 1) * num_held // len(parts)]
            found += part()
        held = [found[place] for place in order.tolist()]
    yield held


def _plan_reading(index, packs):
    """Functions that read a few spans each, in the order on disk, and where there each pack is, `[n]`."""
    on_disk = np.sort(packs)
    spans = find_spans(index, on_disk)
    rows = list(zip(*(values.tolist() for values in vars(spans).values()), strict=True))
    starts = range(0, len(rows), READERS)
    parts = [functools.partial(_read_spans, index, rows[start : start + READERS]) for start in starts]
    return parts, np.searchsorted(on_disk, packs)


def _read_spans(index, rows):
    """The records of spans, rows of `Spans`, each read by its own thread."""
    read = functools.partial(_read_span, index.files)
    if len(rows) == 1:
        return read(rows[0])
    # The threads end with the spans: none outlives an iteration that nobody continues
    with ThreadPoolExecutor(len(rows), "read-span") as pool:
        return [record for records in pool.map(read, rows) for record in records]


def _read_span(files, row):
    file, offset, count, number, num_bytes = row
    found = [
        (record, file, place)
        for batch in read_batches(files[file], spans=[(offset, num_bytes, number)])
        for place, record in enumerate(batch.to_list(), batch.number)
    ]
    if len(found) < count:
        raise InputError(f"{files[file]} must stay as it is while it is read. Received: a shorter file.")
    return found


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


@dataclasses.dataclass(frozen=True)
class ProcessShard:
    """One process's part of every micro-batch; raises `InputError` unless W divides M.

    Steps of 8 packs in micro-batches of 4, by two processes:

        pack of the step    0  1  2  3  4  5  6  7
        micro-batch         0  0  0  0  1  1  1  1
        process             0  0  1  1  0  0  1  1
    """

    # Halves of the step, 0 1 2 3 and 4 5 6 7, would form other micro-batches than one process, and so other
    # float32 sums

    micro_batch_size: int  # M, packs that all processes compute at once
    process_index: int = 0
    num_processes: int = 1

    def __post_init__(self):
        assert 0 <= self.process_index < self.num_processes
        self._check_divides("micro_batch_size", self.micro_batch_size)

    def batch_size(self, train_batch_size):
        """B / W, this process's packs of a step of B; raises `InputError` unless M divides B."""
        if train_batch_size % self.micro_batch_size:
            raise InputError(
                "`micro_batch_size` must divide `train_batch_size`. Received: "
                f"micro_batch_size={self.micro_batch_size}, train_batch_size={train_batch_size}."
            )
        return train_batch_size // self.num_processes

    def of_evaluation(self, eval_batch_size):
        """`ProcessShard` for evaluation, with one micro-batch per batch; raises `InputError`."""
        self._check_divides("eval_batch_size", eval_batch_size)
        return dataclasses.replace(self, micro_batch_size=eval_batch_size)

    def holds(self, places):
        """True at places in the reading order whose packs are this process's, bool `[n]`."""
        # M divides B, so a micro-batch begins at every multiple of M
        own = self.micro_batch_size // self.num_processes
        return places % self.micro_batch_size // own == self.process_index

    def places(self, step, train_batch_size):
        """Positions in the reading order of this process's packs of a step: int64 `[B / W]`."""
        places = step * train_batch_size + np.arange(train_batch_size)
        return places[self.holds(places)]

    def of_blocks(self, blocks, first=0):
        """Yield this process's packs of blocks, int64 `[n]`, which follow the `first` packs of all steps."""
        for packs in blocks:
            yield packs[self.holds(first + np.arange(len(packs)))]
            first += len(packs)

    def _check_divides(self, name, value):
        if value % self.num_processes:
            raise InputError(
                f"the number of processes must divide `{name}`. Received: {self.num_processes} processes, "
                f"{name}={value}."
            )


WHOLE = ProcessShard(1)  # one process; any micro-batch size
