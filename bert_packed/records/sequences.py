"""Many sequences in columns: the form in which they are read, counted, sorted, gathered and compared.

Two of BERT's sequences of lengths 4 and 3, the first with one prediction, the second with two:

    lengths               [4 3]               one entry a sequence
    tokens                [2 7 4 3 2 4 4]     as many entries a sequence as `lengths` says
    token_type_ids        [0 0 1 1 0 0 0]
    num_predictions       [1 2]
    prediction_positions  [2 1 2]             within the sequence, ascending
    prediction_ids        [8 9 5]             labels
    next_sentence_labels  [1 0]
    file_indices          [0 0]               files[0] ...
    record_numbers        [1 2]               ... and its record, from 1

A layout names the columns. Those for causal language modelling, for a document of 4 tokens that continues in
another sequence, and one of 3:

    lengths       [4 3]
    tokens        [0 7 4 8 0 5 0]
    labels        [7 4 8 9 5 0 0]     the token that follows in the document; 0 where none
    label_mask    [1 1 1 1 1 1 0]     1 where something is predicted
    label_bytes   [4 3 3 4 3 0 0]     UTF-8 bytes of the label's text; optional
    num_bytes     [14 3]              their sum
"""

import dataclasses
import functools
import hashlib

import numpy as np

from bert_packed.core.settings import InputError

TAKEN_AT_ONCE = 2**20  # entries; their indices take several times the room of the values
DIGEST_BYTES = 16  # chance of one collision among 10^9 sequences: 10^-21


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a layout."""

    dtype: str  # NumPy's name, with byte order
    sizes: str = ""  # the column, before it in the layout, that counts a row's entries; "" for one
    width: int = 1  # values of an entry


ORIGINS = {"file_indices": Column("<i4"), "record_numbers": Column("<i8")}
BERT_LAYOUT = {
    **ORIGINS,
    "lengths": Column("<i8"),
    "num_predictions": Column("<i8"),
    "next_sentence_labels": Column("|i1"),
    "tokens": Column("<i4", "lengths"),
    "token_type_ids": Column("|i1", "lengths"),
    "prediction_positions": Column("<i4", "num_predictions"),
    "prediction_ids": Column("<i4", "num_predictions"),
}
CAUSAL_LAYOUT = {
    **ORIGINS,
    "lengths": Column("<i8"),
    "num_bytes": Column("<i8"),
    "tokens": Column("<i4", "lengths"),
    "labels": Column("<i4", "lengths"),
    "label_mask": Column("|i1", "lengths"),
}
LABEL_BYTES = {"label_bytes": Column("<i4", "lengths")}
# The position of the first token: 0, but for a part of a sequence that is cut across packs
FIRST_POSITIONS = {"first_positions": Column("<i8")}


@dataclasses.dataclass(frozen=True)
class Sequences:
    """n sequences in columns.

        first, last = sequences.offsets("tokens")[i : i + 2]
        sequences["tokens"][first:last]                          the tokens of sequence i

    Indices of sequences count from 0, their records from 1.
    """

    layout: dict[str, Column]  # by name; among them those of `ORIGINS`
    columns: dict[str, np.ndarray]  # by name, each [entries * width]
    files: tuple[str, ...] = ()  # paths, by `file_indices`; () where the caller knows them

    def __len__(self):
        name = next(name for name, column in self.layout.items() if not column.sizes)
        return len(self.columns[name]) // self.layout[name].width

    def __getitem__(self, name):
        return self.columns[name]

    def offsets(self, name):
        """Starts of each sequence's entries of a column, the total last: int64 `[n + 1]`."""
        return self._offsets[self.layout[name].sizes]

    @functools.cached_property
    def _offsets(self):
        names = {column.sizes for column in self.layout.values()} - {""}
        return {name: to_offsets(self[name]) for name in names}

    def origin(self, index):
        """File and record of a sequence, for messages."""
        return f"{self.files[self['file_indices'][index]]}, record {self['record_numbers'][index]}"

    def replace(self, **columns):
        """The same sequences with other content of some columns, which are of the layout."""
        return dataclasses.replace(self, columns={**self.columns, **columns})


def make_sequences(layout, path, **columns):
    """`Sequences` of one file from arrays or lists of any type, `record_numbers` among them, others 0."""
    if unknown := columns.keys() - layout.keys():
        raise ValueError(f"columns must be of the layout. Received: {', '.join(sorted(unknown))}.")
    made = {}
    for name, column in layout.items():
        if name in columns:
            made[name] = np.asarray(columns[name], column.dtype)
        else:
            num_entries = made[column.sizes].sum() if column.sizes else len(columns["record_numbers"])
            made[name] = np.zeros(num_entries * column.width, column.dtype)
    return Sequences(layout, made, (path,))


def id_columns(sequences):
    """Names of the columns of token ids, labels included."""
    return [name for name in ("tokens", "labels", "prediction_ids") if name in sequences.layout]


def check_vocabulary(sequences, vocab_size):
    """Raise `InputError` where a token or label is not below `vocab_size`; None checks nothing."""
    if vocab_size is None:
        return
    for name in id_columns(sequences):
        ids = sequences[name]
        if ids.max(initial=0) >= vocab_size:
            place = int(np.argmax(ids >= vocab_size))
            owner = int(np.searchsorted(sequences.offsets(name), place, side="right")) - 1
            raise InputError(
                f"{sequences.origin(owner)}: token ids must be below the vocab_size={vocab_size} that the "
                f"manifest.json beside it names. Received: {ids[place]}."
            )


def without_predictions(sequences):
    """`Sequences` of `BERT_LAYOUT` without anything to predict."""
    nothing = np.zeros(0, np.int32)
    none = np.zeros_like(sequences["num_predictions"])
    return sequences.replace(num_predictions=none, prediction_positions=nothing, prediction_ids=nothing)


def concatenate(batches):
    """Join `Sequences` of one layout, at least one, in the order given."""
    files = tuple(dict.fromkeys(path for batch in batches for path in batch.files))
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0].layout}
    if any(batch.files != files for batch in batches):
        place = {path: index for index, path in enumerate(files)}
        columns["file_indices"] = np.concatenate(
            [np.array([place[path] for path in b.files], np.int32)[b["file_indices"]] for b in batches]
        )
    return Sequences(batches[0].layout, columns, files)


def take(sequences, indices):
    """The sequences at `indices`, in that order: int array `[m]` or bool `[n]` -> `Sequences`."""
    if np.asarray(indices).dtype == bool:
        indices = np.flatnonzero(indices)
    columns = {}
    for name, column in sequences.layout.items():
        values = sequences[name].reshape(-1, column.width)
        if column.sizes:
            starts, sizes = sequences.offsets(name)[:-1], sequences[column.sizes]
            columns[name] = _take_ranges(values, starts[indices], sizes[indices]).reshape(-1)
        else:
            columns[name] = values[indices].reshape(-1)
    return dataclasses.replace(sequences, columns=columns)


def content_digests(sequences, layout):
    """Digests of the content of sequences, uint64 `[n, 2]`: of a layout's columns but for `ORIGINS`."""
    # The sizes are among them, without which equal bytes could be divided otherwise
    parts = []
    for name in [name for name in layout if name not in ORIGINS]:
        column, values = layout[name], sequences[name]
        ends = sequences.offsets(name) if column.sizes else np.arange(len(sequences) + 1)
        ends = ends * column.width * values.itemsize
        parts.append((memoryview(values.tobytes()), ends.tolist()))
    digests = []
    for row in range(len(sequences)):
        found = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for content, ends in parts:
            found.update(content[ends[row] : ends[row + 1]])
        digests.append(found.digest())
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def entry_bytes(layout, sizes=""):
    """Bytes of an entry in all columns that `sizes` counts the entries of; "" for those of one a sequence."""
    columns = (column for column in layout.values() if column.sizes == sizes)
    return sum(np.dtype(column.dtype).itemsize * column.width for column in columns)


def range_indices(starts, lengths):
    """The indices of many ranges, one after the other, int64: starts [5 0], lengths [3 2] -> [5 6 7 0 1].

    One start may be that of all: 0, lengths [3 2] -> [0 1 2 0 1].
    """
    lengths = np.asarray(lengths, np.int64)
    shifts = np.asarray(starts, np.int64) - to_offsets(lengths)[:-1]
    return np.repeat(shifts, lengths) + np.arange(lengths.sum())


def to_offsets(lengths):
    """Starts of ranges of these lengths, the total last: [3 2] -> [0 3 5], int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def sum_ranges(values, sizes):
    """Sums of ranges that follow one another: values [1 2 3], sizes [2 0 1] -> [3 0 3], int64."""
    return np.diff(to_offsets(values)[to_offsets(sizes)])


def rank_in_groups(groups):
    """Number of entries of its group before each entry: groups [1 0 1 1] -> [0 0 1 2], int64."""
    ranks = np.empty(len(groups), np.int64)
    ranks[np.argsort(groups, kind="stable")] = range_indices(0, np.bincount(groups))
    return ranks


def _take_ranges(values, starts, sizes):
    """Rows of `values [n, width]` in many ranges, one after the other: `[sum of sizes, width]`."""
    ends = to_offsets(sizes)
    taken = np.empty((ends[-1], values.shape[1]), values.dtype)
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(ends, ends[first] + TAKEN_AT_ONCE, side="right")) - 1
        last = max(last, first + 1)
        indices = range_indices(starts[first:last], sizes[first:last])
        np.take(values, indices, axis=0, out=taken[ends[first] : ends[last]])
        first = last
    return taken
