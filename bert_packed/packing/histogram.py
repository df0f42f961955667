"""Length histograms: count, check, load and save.

A histogram is an int64 array `[S]` whose entry `i` counts the sequences of length `i + 1`:

    lengths 3, 1, 3, 4 with S = 5   ->   [1 0 2 1 0]
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from bert_packed.packing.arguments import as_array, check_choice, check_whole, is_whole, shown

KNOWN_FOLDER = Path(__file__).parent / "histograms"  # each file says where it comes from
MAX_COUNT = 2**53  # up to here a count read from JSON as a float is the whole number that was meant
MAX_LENGTH = 2**20  # of sequences and packs; a longer one is a slip, which must not ask for all memory


def count_lengths(lengths, max_seq_length):
    """Count lengths, which are checked as by `check_lengths`: int64 `[S]`."""
    lengths = check_lengths(lengths, max_seq_length)
    return np.bincount(lengths, minlength=max_seq_length + 1)[1:].astype(np.int64)


def check_lengths(lengths, max_seq_length):
    """Check that lengths are whole numbers `[n]` in 1..S, and return them as int64; raises `ValueError`."""
    lengths = as_array(lengths, "`lengths`", "have one dimension", kinds=None, shape=(None,))
    _check_whole_numbers(lengths, "every length must be a whole number")
    if lengths.size and (lengths.min() < 1 or lengths.max() > max_seq_length):
        wrong = lengths.max() if lengths.max() > max_seq_length else lengths.min()
        raise ValueError(f"every length must be in 1..max_seq_length={max_seq_length}. Received: {wrong}.")
    return lengths.astype(np.int64)


def _check_whole_numbers(array, rule):
    if array.dtype.kind in "iu":  # integers, of which there may be millions, need no look at each
        return
    for number in array.tolist():
        if not is_whole(number, floats=True):
            raise ValueError(f"{rule}. Received: {shown(number)}.")


def check_histogram(histogram, max_seq_length=None):
    """Check that an array is a histogram `[S]` of counts in 0..2**53, whole floats too: int64 `[S]`."""
    counts = as_array(histogram, "`histogram`", "have one dimension", kinds=None, shape=(None,))
    if max_seq_length is not None and len(counts) != max_seq_length:
        raise ValueError(
            f"`histogram` must have max_seq_length={max_seq_length} entries, one per length. "
            f"Received: {len(counts)}."
        )
    _check_whole_numbers(counts, "`histogram` must hold whole numbers")
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
    """Check what every algorithm is given; returns the histogram as int64 `[S]`, and `check_limits`."""
    depth = check_limits(max_seq_length, max_sequences_per_pack)
    return check_histogram(histogram, max_seq_length), depth


def check_limits(max_seq_length, max_sequences_per_pack):
    """Check S and the depth, and return the depth, in 1..S; "max" is S."""
    check_whole("max_seq_length", max_seq_length, 1, MAX_LENGTH)
    if isinstance(max_sequences_per_pack, str) and max_sequences_per_pack == "max":
        return int(max_seq_length)
    if not is_whole(max_sequences_per_pack) or max_sequences_per_pack < 1:
        raise ValueError(
            '`max_sequences_per_pack` must be a whole number of at least 1, or "max". '
            f"Received: {shown(max_sequences_per_pack)}."
        )
    return min(int(max_sequences_per_pack), int(max_seq_length))


def load_histogram(path, max_seq_length=None):
    """Read a histogram, int64 `[S]`, from JSON with `lengths` and `counts`; a `ValueError` names the file.

    Lengths over `max_seq_length` are counted at `max_seq_length`, as truncated sequences; None truncates
    nothing and takes the longest length for S.
    """
    try:
        return _parse_histogram(Path(path).read_bytes(), max_seq_length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def fold(histogram, max_seq_length):
    """Count lengths over S at S, as truncated sequences: [1 2 3 4] with S = 3 -> [1 2 7]."""
    counts = histogram.tolist()  # Python's whole numbers, which do not overflow
    folded = counts[: max_seq_length - 1] + [0] * (max_seq_length - 1 - len(counts))
    return check_histogram([*folded, sum(counts[max_seq_length - 1 :])])


def known_histogram_names():
    """The histograms that come with the package: those of the papers, measured GLUE tasks, long articles."""
    return sorted(path.stem for path in KNOWN_FOLDER.glob("*.json"))


def load_known_histogram(name, max_seq_length=None):
    """Load a histogram that comes with the package, as `load_histogram` does; raises `ValueError`."""
    check_choice("name", name, known_histogram_names())
    return load_histogram(KNOWN_FOLDER / f"{name}.json", max_seq_length)


def to_json(histogram):
    """`{"lengths": [...], "counts": [...]}` of the lengths that occur."""
    present = np.flatnonzero(histogram)
    return {"lengths": (present + 1).tolist(), "counts": np.asarray(histogram)[present].tolist()}


def _parse_histogram(text, max_seq_length):
    try:
        content = json.loads(text)
        lengths, counts = content["lengths"], content["counts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"must be JSON with `lengths` and `counts`. Received: {error!r}.") from error
    for name, numbers in (("lengths", lengths), ("counts", counts)):
        if not isinstance(numbers, list):
            raise ValueError(f"`{name}` must be a list of numbers. Received: {numbers!r}.")
    if len(lengths) != len(counts):
        raise ValueError(
            f"`lengths` and `counts` must be equally long. Received: {len(lengths)}, {len(counts)}."
        )
    total = Counter()
    for length, count in zip(lengths, check_histogram(counts).tolist(), strict=True):
        if count:  # a length of 0 that never occurs does no harm
            if not is_whole(length, floats=True) or not 1 <= length <= MAX_LENGTH:
                raise ValueError(
                    f"every length must be a whole number from 1 to {MAX_LENGTH:,}. Received: {length!r}."
                )
            total[int(length)] += count
    histogram = check_histogram([total[length] for length in range(1, max(total, default=0) + 1)])
    return histogram if max_seq_length is None else fold(histogram, max_seq_length)
