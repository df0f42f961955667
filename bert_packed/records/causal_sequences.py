"""Many sequences for causal language modelling in columns, as `sequences.py` has BERT's.

A document of 4 tokens that goes on, and one of 3:

    tokens       [0 7 4 8 0 5 0]
    labels       [7 4 8 9 5 0 0]     the token that follows in the document; 0 where none
    label_mask   [1 1 1 1 1 1 0]     1 where something is predicted
    label_bytes  [4 3 3 4 3 0 0]     UTF-8 bytes of the text that the label stands for
    offsets      [0 4 7]             sequence i is tokens[offsets[i]:offsets[i + 1]]
    num_bytes    [14 3]              those of all its labels
"""

import dataclasses

import numpy as np

from bert_packed.records.sequences import range_indices, to_offsets


@dataclasses.dataclass(frozen=True)
class CausalSequences:
    """n sequences with T tokens in all, in columns.

    Attributes:
        tokens: int32 `[T]`, no padding.
        labels: int32 `[T]`.
        label_mask: int8 `[T]`.
        label_bytes: int32 `[T]`; None where the records do not have it.
        offsets: int64 `[n + 1]`.
        num_bytes: int64 `[n]`.
        first_positions: int64 `[n]`, the position of the first token: 0, but for a part of a sequence that
            is cut across packs.
        file_indices: int32 `[n]`, index into `files`.
        record_numbers: int64 `[n]`, record within the file, from 1.
        files: Tuple of paths.
    """

    tokens: np.ndarray
    labels: np.ndarray
    label_mask: np.ndarray
    label_bytes: np.ndarray | None
    offsets: np.ndarray
    num_bytes: np.ndarray
    first_positions: np.ndarray
    file_indices: np.ndarray
    record_numbers: np.ndarray
    files: tuple[str, ...]

    def __len__(self):
        return len(self.num_bytes)

    @property
    def lengths(self):
        """Tokens of each sequence: int64 `[n]`."""
        return np.diff(self.offsets)

    def origin(self, index):
        """Where a sequence comes from, in words."""
        return f"{self.files[self.file_indices[index]]}, record {self.record_numbers[index]}"


def make_causal_sequences(
    tokens, labels, label_mask, label_bytes, lengths, num_bytes, record_numbers, path, first_positions=None
):
    """Build `CausalSequences` of one file from columns of any integer type, with lengths for offsets."""
    return CausalSequences(
        tokens=np.asarray(tokens, np.int32),
        labels=np.asarray(labels, np.int32),
        label_mask=np.asarray(label_mask, np.int8),
        label_bytes=None if label_bytes is None else np.asarray(label_bytes, np.int32),
        offsets=to_offsets(lengths),
        num_bytes=np.asarray(num_bytes, np.int64),
        first_positions=np.zeros(len(lengths), np.int64) if first_positions is None else first_positions,
        file_indices=np.zeros(len(lengths), np.int32),
        record_numbers=np.asarray(record_numbers, np.int64),
        files=(path,),
    )


def take_causal(sequences, indices):
    """The sequences at `indices`, int array `[m]`, in that order: `CausalSequences`."""
    lengths = sequences.lengths[indices]
    tokens = range_indices(sequences.offsets[indices], lengths)
    return dataclasses.replace(
        sequences,
        tokens=sequences.tokens[tokens],
        labels=sequences.labels[tokens],
        label_mask=sequences.label_mask[tokens],
        label_bytes=None if sequences.label_bytes is None else sequences.label_bytes[tokens],
        offsets=to_offsets(lengths),
        num_bytes=sequences.num_bytes[indices],
        first_positions=sequences.first_positions[indices],
        file_indices=sequences.file_indices[indices],
        record_numbers=sequences.record_numbers[indices],
    )
