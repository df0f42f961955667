"""How many sequences there are of each length: count, load and save.

A histogram is an int64 array `[S]` whose entry `i` counts the sequences of length `i + 1`:

    lengths 3, 1, 3, 4 with S = 5   ->   [1 0 2 1 0]
"""

import json
from pathlib import Path

import numpy as np

KNOWN_FOLDER = Path(__file__).parent / "histograms"  # each file says where it comes from
MAX_COUNT = 2**53  # up to here a count read from JSON as a float is the whole number that was meant


def count_lengths(lengths, max_seq_length):
    """Count sequences of each length.

    Args:
        lengths: Integer array `[n]`, each in 1..max_seq_length.
        max_seq_length: S.

    Returns:
        int64 `[S]`.

    Raises:
        ValueError: a length is outside 1..S.
    """
    lengths = np.asarray(lengths)
    if lengths.size and (lengths.min() < 1 or lengths.max() > max_seq_length):
        wrong = lengths.max() if lengths.max() > max_seq_length else lengths.min()
        raise ValueError(f"every length must be in 1..max_seq_length={max_seq_length}. Received: {wrong}.")
    return np.bincount(lengths.astype(np.int64), minlength=max_seq_length + 1)[1:].astype(np.int64)


def check_histogram(histogram, max_seq_length=None):
    """Check that an array is a histogram, and return it as int64 `[S]`.

    Raises:
        ValueError: it is not one-dimensional, not of whole numbers, negative, above 2**53 somewhere, or not
            of length S.
    """
    counts = np.asarray(histogram)
    if counts.ndim != 1:
        raise ValueError(f"`histogram` must have one dimension. Received shape: {counts.shape}.")
    if max_seq_length is not None and len(counts) != max_seq_length:
        raise ValueError(
            f"`histogram` must have max_seq_length={max_seq_length} entries, one per length. "
            f"Received: {len(counts)}."
        )
    wrong = [count for count in counts.tolist() if not _is_whole(count)]
    if wrong:
        raise ValueError(f"`histogram` must hold whole numbers. Received: {wrong[0]!r}.")
    if counts.size and counts.min() < 0:
        raise ValueError(
            "`histogram` must not be negative. "
            f"Received: {counts.min()} sequences of length {int(np.argmin(counts)) + 1}."
        )
    if counts.size and counts.max() > MAX_COUNT:
        raise ValueError(
            f"`histogram` must not count more than 2**53 sequences of a length. "
            f"Received: {counts.max()} of length {int(np.argmax(counts)) + 1}."
        )
    return counts.astype(np.int64)


def check_arguments(histogram, max_seq_length, max_sequences_per_pack):
    """Check what every algorithm is given.

    Returns:
        The histogram as int64 `[S]` and the depth as a whole number: "max" becomes S, which no pack exceeds.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    if not isinstance(max_seq_length, int | np.integer) or max_seq_length < 1:
        raise ValueError(f"`max_seq_length` must be a whole number from 1. Received: {max_seq_length!r}.")
    depth = max_seq_length if max_sequences_per_pack == "max" else max_sequences_per_pack
    if isinstance(depth, bool) or not isinstance(depth, int | np.integer) or depth < 1:
        raise ValueError(
            '`max_sequences_per_pack` must be a whole number of at least 1, or "max". '
            f"Received: {max_sequences_per_pack!r}."
        )
    return check_histogram(histogram, max_seq_length), min(int(depth), int(max_seq_length))


def load_histogram(path, max_seq_length=None):
    """Read a histogram from JSON with `lengths` and `counts`.

    Lengths over `max_seq_length` are counted at `max_seq_length`, as truncated sequences; None truncates
    nothing and takes the longest length for S.

    Returns:
        int64 `[S]`.

    Raises:
        ValueError: the file is not such JSON, or its numbers are no histogram.
    """
    try:
        with open(path) as file:
            content = json.load(file)
        lengths, counts = content["lengths"], content["counts"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be JSON with `lengths` and `counts`. Received: {error!r}.") from error
    if len(lengths) != len(counts):
        raise ValueError(
            f"{path}: `lengths` and `counts` must be equally long. Received: {len(lengths)}, {len(counts)}."
        )
    pairs = [
        (length, count)
        for length, count in zip(lengths, check_histogram(counts).tolist(), strict=True)
        if count
    ]
    for length, _ in pairs:
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"{path}: every length must be a whole number from 1. Received: {length!r}.")
    if max_seq_length is None:
        max_seq_length = max((length for length, _ in pairs), default=0)
    histogram = np.zeros(max_seq_length, np.int64)
    for length, count in pairs:
        histogram[min(length, max_seq_length) - 1] += count
    return histogram


def known_histogram_names():
    """The histograms that come with the package: those of the papers, measured GLUE tasks, long articles."""
    return sorted(path.stem for path in KNOWN_FOLDER.glob("*.json"))


def load_known_histogram(name, max_seq_length=None):
    """Load a histogram that comes with the package, as `load_histogram` does.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in known_histogram_names():
        raise ValueError(f"`name` must be one of {', '.join(known_histogram_names())}. Received: {name!r}.")
    return load_histogram(KNOWN_FOLDER / f"{name}.json", max_seq_length)


def to_json(histogram):
    """`{"lengths": [...], "counts": [...]}` of the lengths that occur."""
    present = np.flatnonzero(histogram)
    return {"lengths": (present + 1).tolist(), "counts": np.asarray(histogram)[present].tolist()}


def _is_whole(count):
    if isinstance(count, bool):
        return False
    return isinstance(count, int) or (isinstance(count, float) and count.is_integer())
