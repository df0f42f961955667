"""What stands in the frames of a TFRecord file, checked by the checksums around it, without TensorFlow.

`frames.py` has the picture of a frame.
"""

import struct

from bert_packed.core import files
from bert_packed.core.settings import InputError
from bert_packed.records.checksums import masked_checksum
from bert_packed.records.frames import FRAME_BYTES

HEADER = struct.Struct("<QI")  # length and its checksum
CHECKSUM = struct.Struct("<I")
READ_RECORDS = 1024  # at once, where a whole file is read


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
