"""How large the records of a TFRecord file are and where they start, read from their headers alone.

A record of n bytes on the disk:

    length (8)  checksum (4)  record (n)  checksum (4)
"""

import array
import dataclasses
import hashlib
import struct

import numpy as np

from bert_packed.core import files

LENGTH_BYTES = 8
FRAME_BYTES = 16  # around each record
READ_AHEAD = 2**20  # bytes read at once; larger records are jumped over


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
