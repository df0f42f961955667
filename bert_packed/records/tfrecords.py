"""TFRecord files: read in batches with every checksum compared, scanned for where records are, and written.

A record of n bytes in a file, numbers little-endian. Record numbers count from 1, in messages too:

    length (8)  checksum of the length (4)  record (n)  checksum of the record (4)
"""

import dataclasses
import functools
import hashlib
import os
import struct

import google_crc32c
import numpy as np

from bert_packed.core import storage
from bert_packed.core.settings import InputError

LENGTH = struct.Struct("<Q")
HEADER = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
FRAME_BYTES = HEADER.size + CHECKSUM.size  # around each record

READ_BATCH = 1024  # records; a batch of S=512 decodes to about 20 MB
READ_BYTES = 2**22  # of a file at once, unless one record has more, and the most of a batch
SCAN_BYTES = 2**20  # at once, in a core's cache
WRITE_BATCH = 512  # records that get their checksums together
WRITE_BYTES = 2**22  # and the most bytes of them, the last one not counted


@dataclasses.dataclass(frozen=True)
class Records:
    """Records of a file in one buffer."""

    content: bytes  # that hold them, with anything between
    starts: np.ndarray  # int64 [n]
    ends: np.ndarray  # int64 [n]
    path: str = ""  # of the file
    number: int = 1  # of the first one in the file

    def __len__(self):
        return len(self.starts)

    @property
    def numbers(self):
        """Number of each in the file: int64 `[n]`."""
        return np.arange(self.number, self.number + len(self))

    @functools.cached_property
    def num_bytes(self):
        """Bytes that they take in a file."""
        return int((self.ends - self.starts).sum()) + FRAME_BYTES * len(self)

    def to_list(self):
        limits = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [self.content[start:end] for start, end in limits]


@dataclasses.dataclass(frozen=True)
class FileScan:
    """The checksum of a file, and where its records are."""

    sha256: str  # hexadecimal
    num_records: int | None  # None where the headers do not lead to the end of the file, which is damaged
    offsets: np.ndarray  # int64 [num_records + 1], starts of records and size of the file; [0] if damaged


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A finished file as a manifest lists it: its name without the folder, and its hexadecimal SHA-256."""

    name: str
    num_records: int
    sha256: str

    def to_json(self):
        return dataclasses.asdict(self)


def read_batches(path, max_bytes=READ_BYTES, spans=None):
    """Read the records of a file, or parts of it, in batches of `Records`; what is before damage is yielded.

    A batch has at most `max_bytes`, unless it is one record. `spans` are parts: for each the byte at which
    its first record starts, its bytes, and the number of that record, from 1.
    """
    path = os.fspath(path)
    size, _ = storage.size_and_time(path)
    if size == 0:
        raise InputError(f"every TFRecord file must hold a record. Received: {path}, which is empty.")
    # A buffer would read thousands of bytes behind each span, which others read
    with storage.open_file(path, buffering=0) as file:
        for offset, num_bytes, number in [(0, size, 1)] if spans is None else spans:
            file.seek(offset)
            left = min(num_bytes, size - offset)
            for content, places in _frames(path, file.read, left, max_bytes, number):
                places = np.array(places, np.int64)
                starts, ends = places[:-1] + HEADER.size, places[1:] - CHECKSUM.size
                num_good = _count_good(content, starts, ends)
                for first in range(0, num_good, READ_BATCH):
                    some = slice(first, min(first + READ_BATCH, num_good))
                    yield Records(content, starts[some], ends[some], path, number + first)
                number += num_good
                if num_good < len(starts):
                    raise _damage(path, number)


def first_record(path):
    """The first record of a file: `bytes`; raises as `read_batches`."""
    return next(read_batches(path, max_bytes=1)).to_list()[0]


def count_records(path):
    return sum(len(batch) for batch in read_batches(path))


def scan_file(path):
    """Read a file once, for its checksum and where its records are, but not for theirs: `FileScan`."""
    digest, offsets, before = hashlib.sha256(), [np.zeros(1, np.int64)], 0
    size, _ = storage.size_and_time(path)
    with storage.open_file(path) as file:

        def read(num_bytes):
            content = file.read(num_bytes)
            digest.update(content)
            return content

        try:
            for _, places in _frames(path, read, size, SCAN_BYTES, 1):
                offsets.append(np.array(places[1:], np.int64) + before)
                before += places[-1]
        except InputError:
            while read(SCAN_BYTES):  # the checksum is of the whole file
                pass
            return FileScan(digest.hexdigest(), None, np.zeros(0, np.int64))
    offsets = np.concatenate(offsets)
    return FileScan(digest.hexdigest(), len(offsets) - 1, offsets)


def write_records(path, serialized):
    """Write an iterable of `bytes` as a TFRecord file: `FileEntry`; an `OSError` names the file."""
    path = os.fspath(path)
    num_records, digest = 0, hashlib.sha256()
    with storage.naming_file(path), storage.open_file(path, "wb") as file:
        for batch in _write_batches(serialized):
            content = frame_records(batch)
            file.write(content)
            digest.update(content)
            num_records += len(batch)
    return FileEntry(os.path.basename(path), num_records, digest.hexdigest())


def write_file(path, serialized):
    """`write_records` to a file that appears under its name only when complete."""
    with storage.write_whole(path) as partial:
        entry = write_records(partial, serialized)
    return dataclasses.replace(entry, name=os.path.basename(path))


def join_records(serialized, path="", number=1):
    """`Records` from a list of `bytes`."""
    sizes = np.array([len(record) for record in serialized], np.int64)
    ends = np.cumsum(sizes)
    return Records(b"".join(serialized), ends - sizes, ends, path, number)


def masked_checksums(content, starts, ends):
    """Checksums of pieces of `bytes` as TFRecord files have them, uint32 `[n]`: CRC-32C, rotated, shifted."""
    value = google_crc32c.value
    pieces = zip(starts.tolist(), ends.tolist(), strict=True)
    found = np.fromiter((value(content[start:end]) for start, end in pieces), np.uint32, len(starts))
    return (found >> np.uint32(15) | found << np.uint32(17)) + np.uint32(0xA282EAD8)


def _frames(path, read, left, most, number):
    """Cut `left` bytes of a file into pieces of at most `most`, or one frame; no checksum is compared."""
    # it yields bytes, and a list of where in them each frame begins and the last one ends
    held, wanted = b"", HEADER.size
    while left > 0:
        with storage.naming_file(path):
            more = read(min(max(wanted, most) - len(held), left))
        left -= len(more)
        held += more
        places, place, size = [0], 0, len(held)
        while place + HEADER.size <= size:
            place += FRAME_BYTES + LENGTH.unpack_from(held, place)[0]
            if place > size:
                break
            places.append(place)
        if len(places) > 1:
            yield held, places
            number += len(places) - 1
            held = held[places[-1] :]
        wanted = HEADER.size
        if len(held) >= HEADER.size:
            length, checksum = HEADER.unpack_from(held)
            wanted = FRAME_BYTES + length
            # the check comes before a read of that length: a damaged length may be anything
            if masked_checksums(held, np.array([0]), np.array([LENGTH.size]))[0] != checksum:
                raise _damage(path, number)
        if not more or (held and wanted - len(held) > left):
            raise _damage(path, number)


def _count_good(content, starts, ends):
    """Number of records, from the first on, whose checksums are right."""
    heads = starts - HEADER.size
    starts, ends = np.concatenate([heads, starts]), np.concatenate([heads + LENGTH.size, ends])
    wanted = np.frombuffer(content, np.uint8)[ends[:, None] + np.arange(CHECKSUM.size)].view("<u4")[:, 0]
    is_good = (masked_checksums(content, starts, ends) == wanted).reshape(2, -1).all(axis=0)
    return len(is_good) if is_good.all() else int(np.argmin(is_good))


def _damage(path, number):
    """The error of a file that cannot be read further than before record `number`."""
    if number == 1:
        return InputError(
            f"{path} is not a TFRecord file, or its record 1 is truncated or corrupt; of text, "
            "`bert-packed create` makes records."
        )
    return InputError(f"{path}, record {number}: the record is truncated or corrupt.")


def _write_batches(serialized):
    """Lists of `bytes` that are written together."""
    batch, num_bytes = [], 0
    for record in serialized:
        batch.append(record)
        num_bytes += len(record)
        if len(batch) == WRITE_BATCH or num_bytes >= WRITE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def frame_records(serialized):
    """A list of records, `bytes`, as the bytes of a file."""
    records = join_records(serialized)
    heads = np.zeros(len(serialized), [("length", "<u8"), ("checksum", "<u4")])
    heads["length"] = records.ends - records.starts
    places = np.arange(len(serialized)) * HEADER.size
    heads["checksum"] = masked_checksums(heads.tobytes(), places, places + LENGTH.size)
    tails = masked_checksums(records.content, records.starts, records.ends).astype("<u4").tobytes()
    heads = heads.tobytes()
    pieces = [b""] * (3 * len(serialized))
    pieces[::3] = [heads[place : place + HEADER.size] for place in places.tolist()]
    pieces[1::3] = serialized
    pieces[2::3] = [tails[place : place + CHECKSUM.size] for place in range(0, len(tails), CHECKSUM.size)]
    return b"".join(pieces)
