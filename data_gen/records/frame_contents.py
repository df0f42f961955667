"""What stands in the frames of a TFRecord file, checked by the checksums around it, without TensorFlow.

`frames.py` has the picture of a frame.
"""

import functools
import itertools
import struct

import numpy as np

from data_gen.cli.settings import InputError
from data_gen.jobs import files
from data_gen.records.frames import FRAME_BYTES

HEADER = struct.Struct("<QI")  # length and its checksum
CHECKSUM = struct.Struct("<I")
READ_RECORDS = 1024  # at once, where a whole file is read
CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, lowest bit first
TABLE_ROWS = 1024  # of 1 KiB each; longer contents go through the table in pieces


def read_frames(path, offset, count, number=1):
    """Read records that follow one another in a file.

    Args:
        path: TFRecord file.
        offset: Byte at which the first of them starts.
        count: How many, at most: at the end of the file there may be fewer.
        number: The first one's in the file, from 1, for messages.

    Returns:
        List of `bytes`.

    Raises:
        InputError: a record is truncated or corrupt.
        OSError: the file cannot be opened or read.
    """
    records = []
    with files.open_file(path) as file:
        file.seek(offset)
        while len(records) < count:
            header = file.read(HEADER.size)
            if not header:
                break
            record = _read_content(file, header)
            if record is None:
                raise InputError(describe_damage(path, number - 1 + len(records)))
            records.append(record)
    return records


def check_frames(path):
    """Raise `InputError` that names the first damaged record of a file, if it has one."""
    offset = number = 0
    while records := read_frames(path, offset, READ_RECORDS, number + 1):
        offset += sum(map(len, records)) + FRAME_BYTES * len(records)
        number += len(records)


def describe_damage(path, num_good):
    """The message for a file that cannot be read further than its first `num_good` records."""
    if num_good == 0:
        return f"{path} is not a TFRecord file, or its record 1 is truncated or corrupt."
    return f"{path}, record {num_good + 1}: the record is truncated or corrupt."


def masked_checksum(content):
    """The checksum of some `bytes` as a TFRecord file has it: CRC-32C, turned and shifted, int."""
    checksum = _checksum(content)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_content(file, header):
    """What follows a header, or None where it, its length or their checksums are not whole."""
    if len(header) < HEADER.size:
        return None
    length, checksum = HEADER.unpack(header)
    if masked_checksum(header[:8]) != checksum:
        return None  # and the length may be anything: nothing is read of it
    content, end = file.read(length), file.read(CHECKSUM.size)
    is_whole = len(content) == length and len(end) == CHECKSUM.size
    return content if is_whole and CHECKSUM.unpack(end)[0] == masked_checksum(content) else None


def _checksum(content):
    """CRC-32C of `bytes`: int.

    The checksum is linear: each byte contributes a number that depends on it and on how many follow, and
    these numbers are looked up all at once. A loop over bytes would take Python a hundred times as long.
    """
    values = np.frombuffer(content, np.uint8)
    state = 0xFFFFFFFF
    for start in range(0, len(values), TABLE_ROWS):
        piece = values[start : start + TABLE_ROWS].copy()
        # What is known so far acts like four bytes more, in place of the next ones
        reach = min(4, len(piece))
        piece[:reach] ^= np.frombuffer(CHECKSUM.pack(state), np.uint8)[:reach]
        table = _table()[TABLE_ROWS - len(piece) :]
        state = state >> 8 * reach if reach < 4 else 0
        state ^= int(np.bitwise_xor.reduce(table[np.arange(len(piece)), piece]))
    return state ^ 0xFFFFFFFF


@functools.cache
def _table():
    """uint32 `[TABLE_ROWS, 256]`: what each byte contributes that ..., 1, 0 others follow."""
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = row >> 1 ^ np.where(row & 1, np.uint32(CASTAGNOLI), np.uint32(0))
    first, rows = row, [row]
    for _ in itertools.repeat(None, TABLE_ROWS - 1):
        row = first[row & 255] ^ row >> 8
        rows.append(row)
    return np.stack(rows[::-1])
