"""Checksums of many records at once are those of each alone, which `test_frame_contents.py` holds."""

import numpy as np
import pytest

from bert_packed.records.checksums import masked_checksum, masked_checksums

SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 70000]


@pytest.mark.parametrize("order", ["ascending", "descending", "alone"])
def test_each_piece_has_its_own_checksum(order):
    rng = np.random.default_rng(0)
    gap = 3  # bytes of the buffer that belong to no piece
    sizes = np.array(SIZES if order != "descending" else SIZES[::-1])
    ends = np.cumsum(sizes + gap)
    content = rng.integers(0, 256, ends[-1] + gap, np.uint8).tobytes()
    starts = ends - sizes
    expected = [masked_checksum(content[start:end]) for start, end in zip(starts, ends, strict=True)]
    if order == "alone":
        pairs = zip(starts, ends, strict=True)
        found = [masked_checksums(content, np.array([s]), np.array([e]))[0] for s, e in pairs]
    else:
        found = masked_checksums(content, starts, ends).tolist()
    assert found == expected
    assert len(set(expected)) == len(SIZES)


def test_no_piece_has_no_checksum():
    nothing = np.zeros(0, np.int64)
    assert masked_checksums(b"abc", nothing, nothing).tolist() == []
