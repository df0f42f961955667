"""The checksums of TFRecord files: CRC-32C, turned and shifted, of one record or of many."""

import google_crc32c
import numpy as np


def masked_checksum(content):
    """The checksum of some `bytes` as a TFRecord file has it: int."""
    checksum = google_crc32c.value(content)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def masked_checksums(content, starts, ends):
    """The checksums of some pieces of `bytes`, each as of `masked_checksum`.

    Args:
        content: `bytes`.
        starts, ends: Int arrays `[n]`: where each piece begins, and where it ends.

    Returns:
        uint32 `[n]`.
    """
    value = google_crc32c.value
    pieces = zip(starts.tolist(), ends.tolist(), strict=True)
    found = np.fromiter((value(content[start:end]) for start, end in pieces), np.uint32, len(starts))
    return (found >> np.uint32(15) | found << np.uint32(17)) + np.uint32(0xA282EAD8)
