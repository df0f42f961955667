"""How the records of a TFRecord file come in batches: many in one buffer, their checksums compared at once.

`frames.py` has the picture of what stands around a record.
"""

import dataclasses
import functools

import numpy as np

from bert_packed.core import files
from bert_packed.core.settings import InputError
from bert_packed.records.checksums import masked_checksum, masked_checksums
from bert_packed.records.frame_contents import CHECKSUM, HEADER, describe_damage
from bert_packed.records.frames import FRAME_BYTES, LENGTH_BYTES

READ_AHEAD = 2**22  # bytes of a file, read at once


@dataclasses.dataclass(frozen=True)
class Records:
    """n records in one buffer.

    Attributes:
        content: `bytes` that hold them, with anything between.
        starts, ends: int64 `[n]`: where each begins, and where it ends.
    """

    content: bytes
    starts: np.ndarray
    ends: np.ndarray

    def __len__(self):
        return len(self.starts)

    @functools.cached_property
    def num_bytes(self):
        """Bytes that they take in a file."""
        return int((self.ends - self.starts).sum()) + FRAME_BYTES * len(self)

    def to_list(self):
        """List of n `bytes`."""
        limits = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [self.content[start:end] for start, end in limits]


def join_records(serialized):
    """`Records` from an iterable of `bytes`."""
    serialized = list(serialized)
    ends = np.cumsum([len(record) for record in serialized], dtype=np.int64)
    return Records(b"".join(serialized), ends - [len(record) for record in serialized], ends)


def read_batches(path, most, most_bytes):
    """Read the records of one file in batches.

    Args:
        path: TFRecord file.
        most: Records of a batch.
        most_bytes: Bytes of a batch, its largest record not counted, so that any record can be read.

    Yields:
        `Records`, in the order of the file.

    Raises:
        InputError: a record is truncated or corrupt; what stands before it has been yielded.
        OSError: the file cannot be opened or read; the message names it.
    """
    size, _ = files.size_and_time(path)
    num_read = 0
    with files.open_file(path) as file:
        window = _Window(file, size)
        while True:
            with files.naming_file(path):
                records, is_whole = window.next_records(most, most_bytes)
            num_good = _count_good(records)
            if num_good < len(records):
                is_whole = False
                records = Records(records.content, records.starts[:num_good], records.ends[:num_good])
            num_read += num_good
            if num_good:
                yield records
            if not is_whole:
                raise InputError(describe_damage(path, num_read))
            if not num_good:
                return


def frame(serialized):
    """The bytes of some records in a file, each in its frame: list of `bytes` to `bytes`."""
    records = join_records(serialized)
    heads = np.zeros(len(serialized), [("length", "<u8"), ("checksum", "<u4")])
    heads["length"] = records.ends - records.starts
    places = np.arange(len(serialized)) * HEADER.size
    heads["checksum"] = masked_checksums(heads.tobytes(), places, places + LENGTH_BYTES)
    tails = masked_checksums(records.content, records.starts, records.ends).astype("<u4").tobytes()
    heads = heads.tobytes()
    pieces = [b""] * (3 * len(serialized))
    pieces[::3] = [heads[place : place + HEADER.size] for place in places.tolist()]
    pieces[1::3] = serialized
    pieces[2::3] = [tails[place : place + CHECKSUM.size] for place in range(0, len(tails), CHECKSUM.size)]
    return b"".join(pieces)


class _Window:
    """What is held of a file that is read from its beginning to its end."""

    def __init__(self, file, size):
        self._file, self._left = file, size
        self._held, self._place = b"", 0

    def next_records(self, most, most_bytes):
        """The next records, their checksums not compared: `Records`, and whether what follows is whole."""
        starts, ends = [], []
        place = largest = total = 0  # counted from self._place, which moves when more is read
        is_whole = True
        while len(starts) < most:
            if not self._holds(place + HEADER.size):
                is_whole = self._num_held() + self._left == place  # else it ends within a header
                break
            header = self._held[self._place + place : self._place + place + HEADER.size]
            size, checksum = HEADER.unpack(header)
            grown = max(largest, size)
            if starts and total + size - grown > most_bytes:
                break
            end = place + FRAME_BYTES + size
            if self._num_held() < end:
                # before anything is read for its sake: a damaged length may be anything
                is_whole = masked_checksum(header[:LENGTH_BYTES]) == checksum and self._holds(end)
                if not is_whole:
                    break
            starts.append(place + HEADER.size)
            ends.append(place + HEADER.size + size)
            place, largest, total = end, grown, total + size
        starts, ends = (np.array(places, np.int64) + self._place for places in (starts, ends))
        self._place += place
        return Records(self._held, starts, ends), is_whole

    def _num_held(self):
        return len(self._held) - self._place

    def _holds(self, size):
        """Whether so many bytes follow, read if need be."""
        missing = size - self._num_held()
        if missing <= 0:
            return True
        if missing > self._left:
            return False
        more = self._file.read(min(max(missing, READ_AHEAD), self._left))
        self._left -= len(more)
        self._held = self._held[self._place :] + more
        self._place = 0
        return len(more) >= missing


def _count_good(records):
    """How many records, from the first, have the checksums that stand around them."""
    if not len(records):
        return 0
    content = np.frombuffer(records.content, np.uint8)
    found = [
        masked_checksums(records.content, records.starts - HEADER.size, records.starts - CHECKSUM.size),
        masked_checksums(records.content, records.starts, records.ends),
    ]
    places = [records.starts - CHECKSUM.size, records.ends]
    wanted = [content[place[:, None] + np.arange(CHECKSUM.size)].view("<u4")[:, 0] for place in places]
    is_good = (found[0] == wanted[0]) & (found[1] == wanted[1])
    return len(records) if is_good.all() else int(np.argmin(is_good))
