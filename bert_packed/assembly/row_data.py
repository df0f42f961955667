"""What laying sequences into rows must know of records for causal language modelling, of any length."""

import dataclasses

import numpy as np

from bert_packed.records.read_causal import check_causal_vocabulary, read_causal
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    FIRST_POSITIONS,
    LABEL_BYTES,
    Column,
    Sequences,
    range_indices,
    to_offsets,
)

# A part of a sequence, as it waits to be packed
PARTS = CAUSAL_LAYOUT | FIRST_POSITIONS | {"rows": Column("<i4"), "row_starts": Column("<i8")}


@dataclasses.dataclass(frozen=True)
class RowData:
    """Sequences that may be cut across packs: what `pack_steps.read_file` asks of `PackData`.

    Attributes:
        vocab_size: Ids are below it; None where nobody says.
    """

    vocab_size: int | None

    layout = CAUSAL_LAYOUT | LABEL_BYTES

    def read(self, path):
        """Read and check one file; yields as `BertData.read`."""
        for batch in read_causal(path):
            check_causal_vocabulary(batch, self.vocab_size)
            if "label_bytes" not in batch.layout:
                columns = {**batch.columns, "label_bytes": share_bytes(batch)}
                batch = Sequences(self.layout, columns, batch.files)
            yield batch, len(batch), {}

    def lengths(self, columns):
        """Tokens of each sequence: int `[n]`."""
        return columns["lengths"]


def share_bytes(sequences):
    """Bytes for each label of records that have only their sums: as equal as whole numbers can be.

        num_bytes 8, label_mask [1 1 1 0]   ->   [2 3 3 0]

    Args:
        sequences: `Sequences` of `CAUSAL_LAYOUT`.

    Returns:
        int32 `[T]`.
    """
    lengths, offsets = sequences["lengths"], sequences.offsets("tokens")
    labels = to_offsets(sequences["label_mask"])
    ranks = labels[1:] - np.repeat(labels[offsets[:-1]], lengths)  # from 1, of a label
    totals = np.maximum(np.repeat(np.diff(labels[offsets]), lengths), 1)
    num_bytes = np.repeat(sequences["num_bytes"], lengths)
    shares = num_bytes * ranks // totals - num_bytes * (ranks - 1) // totals
    return np.where(sequences["label_mask"] == 1, shares, 0).astype(np.int32)


def arrays_of_parts(columns, order):
    """The token columns of parts in another order, int array `[m]`: dict for `causal_data.lay_out`."""
    source = range_indices(columns.offsets("tokens")[order], columns["lengths"][order])
    return {name: columns[name][source] for name in ("tokens", "labels", "label_mask")}
