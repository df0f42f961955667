"""The checksums of TFRecord files for many records at once: CRC-32C, which Python's libraries do not have.

A checksum is linear: that of A followed by B is that of A, moved over as many bytes as B has, xor that of B.
So all records are cut into lines of `LINE_BYTES`, whose checksums advance side by side, and those of a
record's lines are joined two by two. `frame_contents.masked_checksum` is the way for a single record.
"""

import functools

import numpy as np

from data_gen.records.frame_contents import CASTAGNOLI
from data_gen.records.frames import LENGTH_BYTES

LINE_BYTES = 64
WORD_BYTES = 2  # looked up at once, in a table of 256 KiB, which a core's cache holds
INITIAL = 0xFFFFFFFF
INITIAL_BYTES = 4


def masked_checksums(content, starts, ends):
    """The checksums of some pieces of a buffer as a TFRecord file has them, turned and shifted.

    Args:
        content: `bytes` or another buffer.
        starts, ends: Int arrays `[n]`: where each piece begins, and where it ends.

    Returns:
        uint32 `[n]`.
    """
    sizes = np.asarray(ends) - starts
    if len(sizes) and (sizes == LENGTH_BYTES).all():
        return _turn(_advance_alike(content, starts))
    found = np.zeros(len(sizes), np.uint32)
    # pieces of like size together: a table of lines is as wide as the longest of its pieces
    widths = np.ceil(np.log2(np.maximum(-(-sizes // LINE_BYTES), 1))).astype(np.int64)
    for width in np.unique(widths):
        chosen = np.flatnonzero(widths == width)
        found[chosen] = _checksums(content, starts[chosen], ends[chosen], int(width))
    return _turn(found)


def _turn(checksums):
    """Checksums before the last inversion, as a file has them."""
    checksums = checksums ^ np.uint32(INITIAL)
    return (checksums >> np.uint32(15) | checksums << np.uint32(17)) + np.uint32(0xA282EAD8)


def _advance_alike(content, starts):
    """`_checksums` of the lengths in front of records, which need no lines."""
    found = np.frombuffer(content, np.uint8)[starts[:, None] + np.arange(LENGTH_BYTES)]
    found[:, :INITIAL_BYTES] ^= 0xFF
    return _advance(found.view("<u2"))


def _checksums(content, starts, ends, width):
    """Checksums, before the last inversion, of pieces of at most 2**width lines: uint32 `[n]`."""
    sizes = ends - starts
    num_lines = np.maximum(-(-sizes // LINE_BYTES), 1)
    # Zeros in front change nothing, as long as the initial value acts where the piece begins
    gaps = num_lines * LINE_BYTES - sizes
    zeros, view = bytes(LINE_BYTES), memoryview(content)
    pieces = [zeros] * (2 * len(sizes))
    pieces[::2] = [zeros[:gap] for gap in gaps.tolist()]
    pieces[1::2] = [view[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    lines = np.frombuffer(bytearray().join([*pieces, zeros]), np.uint8)
    line_starts = np.cumsum(num_lines) - num_lines
    firsts = line_starts * LINE_BYTES + gaps
    is_short = sizes < INITIAL_BYTES
    lines[firsts[~is_short, None] + np.arange(INITIAL_BYTES)] ^= 0xFF
    states = _advance(lines[:-LINE_BYTES].view("<u2").reshape(-1, LINE_BYTES // WORD_BYTES))
    last_lines = line_starts + num_lines - 1
    for place in np.flatnonzero(is_short).tolist():  # the initial value reaches beyond these
        state = INITIAL
        for byte in bytes(view[starts[place] : ends[place]]):
            state = int(_byte_table()[(state ^ byte) & 0xFF]) ^ state >> 8
        states[last_lines[place]] = state
    table = np.zeros((len(sizes), 2**width), np.uint32)
    table[np.arange(2**width) >= 2**width - num_lines[:, None]] = states  # each row ends where its piece does
    for level in range(width):
        table = _move(table[:, ::2], level) ^ table[:, 1::2]
    return table[:, 0]


def _advance(words):
    """Checksums of lines, uint16 `[n, m]`, from the value 0 and without the last inversion: uint32 `[n]`."""
    table = _word_table()
    states = np.zeros(len(words), np.uint32)
    for column in np.ascontiguousarray(words.T):
        # clip, because NumPy otherwise compares every index with the size of the table, which all are below
        found = table.take(states.astype(np.uint16) ^ column, mode="clip")
        states = found ^ states >> np.uint32(16)
    return states


def _move(states, level):
    """Checksums, uint32, as they are after 2**level lines of zeros."""
    tables = _move_tables(level)
    moved = tables[0][states & np.uint32(0xFF)]
    for place in (1, 2, 3):
        moved ^= tables[place][states >> np.uint32(8 * place) & np.uint32(0xFF)]
    return moved


@functools.cache
def _move_tables(level):
    """What each byte of a checksum becomes after 2**level lines of zeros: uint32 `[4, 256]`."""
    singles = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if level:
        return _move(_move(singles, level - 1), level - 1)
    states = singles.reshape(-1)
    for _ in range(LINE_BYTES):
        states = _byte_table()[states & np.uint32(0xFF)] ^ states >> np.uint32(8)
    return states.reshape(4, 256)


@functools.cache
def _byte_table():
    """The checksum of every byte from the value 0: uint32 `[256]`."""
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = row >> np.uint32(1) ^ np.where(row & 1, np.uint32(CASTAGNOLI), np.uint32(0))
    return row


@functools.cache
def _word_table():
    """The checksum of every two bytes, the lower one first, from the value 0: uint32 `[65536]`."""
    states = np.arange(2**16, dtype=np.uint32)
    for _ in range(WORD_BYTES):
        states = _byte_table()[states & np.uint32(0xFF)] ^ states >> np.uint32(8)
    return states
