"""How large the records of a TFRecord file are and where they start, read from their headers alone.

A record of n bytes on the disk:

    length (8)  checksum (4)  record (n)  checksum (4)
"""

import array
import dataclasses
import hashlib
import itertools
import struct

import numpy as np

from data_gen.jobs import files

LENGTH_BYTES = 8
FRAME_BYTES = 16  # around each record
READ_AHEAD = 2**20  # bytes read at once; larger records are jumped over
MAX_RECORD_BYTES = 2**40  # a header that says more is damaged


@dataclasses.dataclass(frozen=True)
class FileScan:
    """What one reading of a TFRecord file tells.

    Attributes:
        sha256: Hexadecimal, of all its bytes.
        num_records: Records in it; None where the headers do not lead to its end, as in a damaged file.
        offsets: int64 `[num_records + 1]`: where every record starts, and the size of the file; `[0]` of a
            damaged file.
    """

    sha256: str
    num_records: int | None
    offsets: np.ndarray


def scan_file(path):
    """Read a TFRecord file once, for its checksum and for where its records are: `FileScan`.

    The checksums within the records are left to who reads them.
    """
    digest, offsets = hashlib.sha256(), array.array("q")  # a list of numbers takes five times the room
    held, held_place, place = b"", 0, 0  # what is held of the file, from where, and the next header's place
    with files.open_file(path) as file:
        while content := file.read(READ_AHEAD):
            digest.update(content)
            held += content
            end = held_place + len(held)
            while place + LENGTH_BYTES <= end:
                offsets.append(place)
                (size,) = struct.unpack_from("<Q", held, place - held_place)
                place += FRAME_BYTES + size
            held, held_place = held[max(0, place - held_place) :], min(place, end)
    if place != held_place or held:
        return FileScan(digest.hexdigest(), None, np.zeros(0, np.int64))
    num_records = len(offsets)
    # only now: a damaged header may name a place that no array of ours can hold
    offsets.append(place)
    return FileScan(digest.hexdigest(), num_records, np.frombuffer(offsets, np.int64))


def record_sizes(path):
    """Yield the bytes of every record of a file, int, as far as the headers can be followed.

    A damaged header ends it without an error: whoever reads the records finds the damage.
    """
    with files.open_file(path) as file:
        block, block_place, place = b"", 0, 0
        while True:
            start = place - block_place
            if start + LENGTH_BYTES > len(block):
                file.seek(place)
                block, block_place, start = file.read(READ_AHEAD), place, 0
                if len(block) < LENGTH_BYTES:
                    return
            size = int.from_bytes(block[start : start + LENGTH_BYTES], "little")
            if size > MAX_RECORD_BYTES:
                return
            yield size
            place += FRAME_BYTES + size


class BatchSizes:
    """How many records at a time may be read of one file, so that no batch is too large.

    The number is halved where the next batch needs it, and stays so: a reader then begins anew, which is
    not to happen often.

    Args:
        path: The file.
        most: Records of a batch.
        most_bytes: Bytes of a batch, its largest record not counted: a record of any size can be read.
    """

    def __init__(self, path, most, most_bytes):
        self.size = most
        self._most_bytes = most_bytes
        self._sizes = record_sizes(path)
        self._ahead = []

    def look_ahead(self):
        """Halve `size` as often as the next batch needs it; returns whether that was at all."""
        before = self.size
        self._ahead.extend(itertools.islice(self._sizes, max(0, self.size - len(self._ahead))))
        while self.size > 1 and self._next_bytes() > self._most_bytes:
            self.size //= 2
        return self.size < before

    def advance(self, num_records):
        """Tell that some records were read."""
        del self._ahead[:num_records]

    def _next_bytes(self):
        batch = self._ahead[: self.size]
        return sum(batch) - max(batch, default=0)
