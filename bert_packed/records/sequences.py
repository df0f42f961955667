"""Many sequences in columns: the form in which they are read, counted, gathered and compared.

Two sequences of lengths 4 and 3, the first with one prediction, the second with two:

    tokens                [2 7 4 3 2 4 4]
    token_type_ids        [0 0 1 1 0 0 0]
    offsets               [0 4 7]            sequence i is tokens[offsets[i]:offsets[i + 1]]
    prediction_positions  [2 1 2]            within the sequence, ascending
    prediction_ids        [8 9 5]            label
    prediction_offsets    [0 1 3]
    next_sentence_labels  [1 0]
    file_indices          [0 0]              files[0] ...
    record_numbers        [1 2]              ... and its record, from 1
"""

import dataclasses

import numpy as np

INT32_MAX = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Sequences:
    """n sequences with T tokens and M predictions in all, in columns.

    Attributes:
        tokens: int32 `[T]`, WordPiece ids, no padding.
        token_type_ids: int8 `[T]`, sentence A/B as 0/1.
        offsets: int64 `[n + 1]`, where each sequence starts in `tokens`; T last.
        prediction_positions: int32 `[M]`, within the sequence, ascending.
        prediction_ids: int32 `[M]`, the masked token that is to be predicted.
        prediction_offsets: int64 `[n + 1]`, where the predictions of each sequence start; M last.
        next_sentence_labels: int8 `[n]`, 1 = random next.
        file_indices: int32 `[n]`, index into `files`.
        record_numbers: int64 `[n]`, record within the file, from 1.
        files: Tuple of paths.
    """

    tokens: np.ndarray
    token_type_ids: np.ndarray
    offsets: np.ndarray
    prediction_positions: np.ndarray
    prediction_ids: np.ndarray
    prediction_offsets: np.ndarray
    next_sentence_labels: np.ndarray
    file_indices: np.ndarray
    record_numbers: np.ndarray
    files: tuple[str, ...]

    def __len__(self):
        return len(self.next_sentence_labels)

    @property
    def lengths(self):
        """Tokens of each sequence: int64 `[n]`."""
        return np.diff(self.offsets)

    @property
    def num_predictions(self):
        """Predictions of each sequence: int64 `[n]`."""
        return np.diff(self.prediction_offsets)

    def origin(self, index):
        """Where a sequence comes from, in words."""
        return f"{self.files[self.file_indices[index]]}, record {self.record_numbers[index]}"


def make_sequences(
    tokens,
    token_type_ids,
    lengths,
    prediction_positions,
    prediction_ids,
    num_predictions,
    next_sentence_labels,
    record_numbers,
    path,
):
    """Build `Sequences` of one file from columns of any integer type, with lengths instead of offsets."""
    return Sequences(
        tokens=np.asarray(tokens, np.int32),
        token_type_ids=np.asarray(token_type_ids, np.int8),
        offsets=to_offsets(lengths),
        prediction_positions=np.asarray(prediction_positions, np.int32),
        prediction_ids=np.asarray(prediction_ids, np.int32),
        prediction_offsets=to_offsets(num_predictions),
        next_sentence_labels=np.asarray(next_sentence_labels, np.int8),
        file_indices=np.zeros(len(next_sentence_labels), np.int32),
        record_numbers=np.asarray(record_numbers, np.int64),
        files=(path,),
    )


def make_unlabelled(tokens, token_type_ids, lengths, record_numbers, path):
    """`make_sequences` of inputs that have neither predictions nor a next-sentence label."""
    return make_sequences(
        tokens,
        token_type_ids,
        lengths,
        prediction_positions=[],
        prediction_ids=[],
        num_predictions=np.zeros(len(lengths), np.int64),
        next_sentence_labels=np.zeros(len(lengths)),
        record_numbers=record_numbers,
        path=path,
    )


def without_predictions(sequences):
    """`Sequences` of which nothing is asked any more."""
    nothing, offsets = np.zeros(0, np.int32), np.zeros(len(sequences) + 1, np.int64)
    return dataclasses.replace(
        sequences, prediction_positions=nothing, prediction_ids=nothing, prediction_offsets=offsets
    )


def concatenate(batches):
    """Join `Sequences`, at least one, in the order given."""
    files = tuple(dict.fromkeys(path for batch in batches for path in batch.files))
    place = {path: index for index, path in enumerate(files)}
    file_indices = [
        np.array([place[path] for path in batch.files], np.int32)[batch.file_indices] for batch in batches
    ]
    joined = {
        field.name: np.concatenate([getattr(batch, field.name) for batch in batches])
        for field in dataclasses.fields(Sequences)
        if field.name not in ("offsets", "prediction_offsets", "file_indices", "files")
    }
    return Sequences(
        offsets=to_offsets(np.concatenate([batch.lengths for batch in batches])),
        prediction_offsets=to_offsets(np.concatenate([batch.num_predictions for batch in batches])),
        file_indices=np.concatenate(file_indices),
        files=files,
        **joined,
    )


def take(sequences, indices):
    """The sequences at `indices`, in that order: int array `[m]` or bool `[n]` -> `Sequences`."""
    if np.asarray(indices).dtype == bool:
        indices = np.flatnonzero(indices)
    lengths, num_predictions = sequences.lengths[indices], sequences.num_predictions[indices]
    tokens = range_indices(sequences.offsets[indices], lengths)
    predictions = range_indices(sequences.prediction_offsets[indices], num_predictions)
    return Sequences(
        tokens=sequences.tokens[tokens],
        token_type_ids=sequences.token_type_ids[tokens],
        offsets=to_offsets(lengths),
        prediction_positions=sequences.prediction_positions[predictions],
        prediction_ids=sequences.prediction_ids[predictions],
        prediction_offsets=to_offsets(num_predictions),
        next_sentence_labels=sequences.next_sentence_labels[indices],
        file_indices=sequences.file_indices[indices],
        record_numbers=sequences.record_numbers[indices],
        files=sequences.files,
    )


def range_indices(starts, lengths):
    """The indices of many ranges, one after the other.

        starts [5 0], lengths [3 2]   ->   [5 6 7 0 1]

    Args:
        starts, lengths: Integer arrays `[n]`.

    Returns:
        int64 `[sum of lengths]`.
    """
    lengths = np.asarray(lengths, np.int64)
    shifts = np.asarray(starts, np.int64) - to_offsets(lengths)[:-1]
    return np.repeat(shifts, lengths) + np.arange(lengths.sum())


def to_offsets(lengths):
    """Where ranges of these lengths start, the total last: [3 2] -> [0 3 5], int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def sum_ranges(values, sizes):
    """Sums of ranges that follow one another: values [1 2 3], sizes [2 0 1] -> [3 0 3], int64."""
    return np.diff(to_offsets(values)[to_offsets(sizes)])


def rank_in_groups(groups):
    """How many entries of its group stand before each entry: groups [1 0 1 1] -> [0 0 1 2], int64."""
    order = np.argsort(groups, kind="stable")
    sizes = np.unique(groups, return_counts=True)[1]
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = range_indices(np.zeros(len(sizes)), sizes)
    return ranks
