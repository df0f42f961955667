"""Whether packs hold exactly the sequences of their inputs: a comparison of multisets of digests."""

import dataclasses
import hashlib
import os

import numpy as np
from tqdm import tqdm

from data_gen.output import read_manifest
from data_gen.overlong import fit_lengths
from data_gen.read_packed import LayoutError, read_packed
from data_gen.read_unpacked import read_unpacked
from data_gen.record_formats import FORMATS, find_common_format
from data_gen.records import read_pack_spec
from data_gen.sequences import range_indices, to_offsets
from data_gen.settings import InputError

DIGEST_BYTES = 16  # chance of one collision among 10^9 sequences: 10^-21
NUM_SHOWN = 5  # differences in words, of each kind


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare_files`.

    Attributes:
        num_input_sequences: Sequences of the inputs, those dropped by `overlong` not counted.
        num_packed_sequences: Sequences found in the packs.
        num_missing: Sequences of the inputs that are not in the packs.
        num_unexpected: Sequences in the packs that are not in the inputs, or too often.
        differences: The first of them in words; with `malformed`, what is wrong with the layout.
        malformed: Whether the packs break the layout; then the counts are of what was read before.
    """

    num_input_sequences: int
    num_packed_sequences: int
    num_missing: int
    num_unexpected: int
    differences: tuple[str, ...]
    malformed: bool = False

    @property
    def is_equal(self):
        return not self.differences


@dataclasses.dataclass(frozen=True)
class _Side:
    """The sequences of one side: digests uint64 `[n, 2]`, and where each comes from."""

    digests: np.ndarray
    lengths: np.ndarray
    record_numbers: np.ndarray
    paths: np.ndarray

    def describe(self, index):
        return f"{self.paths[index]}, record {self.record_numbers[index]} ({self.lengths[index]} tokens)"


def compare_files(input_files, packed_files, overlong):
    """Compare the sequences of unpacked and packed files.

    Two sequences are the same where tokens, A/B, prediction positions and labels, and the next-sentence
    label all are.

    Args:
        input_files, packed_files: Lists of paths.
        overlong: What packing did with inputs longer than the packs: "error", "truncate" or "drop".

    Returns:
        `Comparison`.

    Raises:
        InputError: a file cannot be read as what it should be.
    """
    spec = read_pack_spec(packed_files, kinds=FORMATS[find_common_format(packed_files)].lengths)

    def fit(part):
        # Under "error" packing would have refused them: here they count as missing.
        return part if overlong == "error" else fit_lengths(part, spec.max_seq_length, overlong)[0]

    inputs = _read_side(input_files, lambda path: map(fit, read_unpacked(path)), "reading inputs")
    try:
        packs = _read_side(packed_files, read_packed, "reading packs")
    except LayoutError as error:
        return Comparison(len(inputs.digests), 0, 0, 0, (str(error),), malformed=True)
    missing, unexpected = unmatched(inputs.digests, packs.digests)
    differences = [
        *(f"in the inputs, not in the packs: {inputs.describe(i)}" for i in missing[:NUM_SHOWN]),
        *(f"in the packs, not in the inputs: {packs.describe(i)}" for i in unexpected[:NUM_SHOWN]),
    ]
    return Comparison(
        len(inputs.digests), len(packs.digests), len(missing), len(unexpected), tuple(differences)
    )


def find_overlong(packed_files):
    """What packing did with overlong sequences, from the manifests beside the packs; "error" without one.

    Raises:
        InputError: directories disagree.
    """
    found = {}
    for directory in sorted({os.path.dirname(path) or "." for path in packed_files}):
        manifest = read_manifest(directory) or {}
        found[manifest.get("settings", {}).get("overlong", "error")] = directory
    if len(found) > 1:
        raise InputError(f"packs must be made with one --overlong. Received: {found}.")
    return next(iter(found))


def unmatched(left, right):
    """Which entries of two multisets have no partner in the other.

        left [a b a], right [a c]   ->   left [1 2], right [1]

    Args:
        left, right: uint64 `[n, 2]` and `[m, 2]`, digests.

    Returns:
        Two int64 arrays: ascending indices into `left` and into `right`.
    """
    both = np.concatenate([left, right])
    order = np.lexsort((both[:, 1], both[:, 0]))
    is_new = np.ones(len(both), bool)
    is_new[1:] = np.any(both[order][1:] != both[order][:-1], axis=1)
    groups = np.empty(len(both), np.int64)
    groups[order] = np.cumsum(is_new) - 1
    left_groups, right_groups = groups[: len(left)], groups[len(left) :]
    left_counts = np.bincount(left_groups, minlength=is_new.sum())
    right_counts = np.bincount(right_groups, minlength=is_new.sum())
    return (
        np.flatnonzero(_ranks(left_groups, left_counts) >= right_counts[left_groups]),
        np.flatnonzero(_ranks(right_groups, right_counts) >= left_counts[right_groups]),
    )


def digest_sequences(sequences):
    """A digest of all that is to be conserved of each sequence: uint64 `[n, 2]`."""
    lengths, num_predictions = sequences.lengths, sequences.num_predictions
    # One row of numbers per sequence; the two counts in front make its parts unambiguous:
    #     length, predictions, next-sentence label, tokens, A/B, prediction positions, prediction labels
    offsets = to_offsets(3 + 2 * lengths + 2 * num_predictions)
    numbers = np.empty(offsets[-1], "<i4")
    place = offsets[:-1]
    for values in (lengths, num_predictions, sequences.next_sentence_labels):
        numbers[place] = values
        place = place + 1
    for values, sizes in (
        (sequences.tokens, lengths),
        (sequences.token_type_ids, lengths),
        (sequences.prediction_positions, num_predictions),
        (sequences.prediction_ids, num_predictions),
    ):
        numbers[range_indices(place, sizes)] = values
        place = place + sizes
    content = numbers.tobytes()
    ends = (4 * offsets[1:]).tolist()
    digests, start = [], 0
    for end in ends:
        digests.append(hashlib.blake2b(content[start:end], digest_size=DIGEST_BYTES).digest())
        start = end
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def _read_side(files, read, title):
    columns = []
    with tqdm(desc=title, unit=" sequences", disable=None) as progress:
        for path in files:
            for part in read(path):
                columns.append(
                    (
                        digest_sequences(part),
                        part.lengths,
                        part.record_numbers,
                        np.full(len(part), path, object),
                    )
                )
                progress.update(len(part))
    return _Side(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _ranks(groups, counts):
    """How many entries of its group stand before each entry: groups [1 0 1 1] -> [0 0 1 2]."""
    ranks = np.empty(len(groups), np.int64)
    ranks[np.argsort(groups, kind="stable")] = range_indices(np.zeros(len(counts)), counts)
    return ranks
