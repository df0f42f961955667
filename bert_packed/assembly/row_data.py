"""What laying sequences into rows must know of records for causal language modelling, of any length."""

import dataclasses

import numpy as np

from bert_packed.assembly.causal_data import to_columns
from bert_packed.records.columns import Column
from bert_packed.records.read_causal import check_causal_vocabulary, read_causal
from bert_packed.records.sequences import range_indices, to_offsets

# A part of a sequence, as it waits to be packed
PARTS = {
    "lengths": Column("<i4"),
    "first_positions": Column("<i8"),
    "rows": Column("<i4"),
    "row_starts": Column("<i8"),
    "num_bytes": Column("<i8"),
    "file_indices": Column("<i4"),
    "record_numbers": Column("<i8"),
    "tokens": Column("<i4", "lengths"),
    "labels": Column("<i4", "lengths"),
    "label_mask": Column("|i1", "lengths"),
}


@dataclasses.dataclass(frozen=True)
class RowData:
    """Sequences that may be cut across packs: what `pack_steps.read_file` asks of `PackData`.

    Attributes:
        vocab_size: Ids are below it; None where nobody says.
    """

    vocab_size: int | None

    layout = {  # noqa: RUF012 - a dataclass would make it a field if it were annotated
        "lengths": Column("<i4"),
        "file_indices": Column("<i4"),
        "record_numbers": Column("<i8"),
        "tokens": Column("<i4", "lengths"),
        "labels": Column("<i4", "lengths"),
        "label_mask": Column("|i1", "lengths"),
        "label_bytes": Column("<i4", "lengths"),
    }

    def read(self, path):
        """Read and check one file; yields as `BertData.read`."""
        for batch in read_causal(path):
            check_causal_vocabulary(batch, self.vocab_size)
            if batch.label_bytes is None:
                batch = dataclasses.replace(batch, label_bytes=share_bytes(batch))
            yield to_columns(batch, self.layout), len(batch), {}

    def lengths(self, columns):
        """Tokens of each sequence: int `[n]`."""
        return columns["lengths"]


def share_bytes(sequences):
    """Bytes for each label of records that have only their sums: as equal as whole numbers can be.

        num_bytes 8, label_mask [1 1 1 0]   ->   [2 3 3 0]

    Args:
        sequences: `CausalSequences`.

    Returns:
        int32 `[T]`.
    """
    labels = to_offsets(sequences.label_mask)
    ranks = labels[1:] - np.repeat(labels[sequences.offsets[:-1]], sequences.lengths)  # from 1, of a label
    totals = np.repeat(np.diff(labels[sequences.offsets]), sequences.lengths)
    num_bytes, totals = np.repeat(sequences.num_bytes, sequences.lengths), np.maximum(totals, 1)
    shares = num_bytes * ranks // totals - num_bytes * (ranks - 1) // totals
    return np.where(sequences.label_mask == 1, shares, 0).astype(np.int32)


def arrays_of_parts(columns, order):
    """The token columns of parts in another order, int array `[m]`: dict for `causal_data.lay_out`."""
    lengths = columns["lengths"][order].astype(np.int64)
    source = range_indices(to_offsets(columns["lengths"])[:-1][order], lengths)
    return {name: columns[name][source] for name in ("tokens", "labels", "label_mask")}
