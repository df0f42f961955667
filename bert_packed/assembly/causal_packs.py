"""Records for causal language modelling and their packs; `schema.py` shows one.

A sequence is packed as a whole or, in rows (`rows.py`), cut where packs end. Each part then counts the bytes
of the labels in it.
"""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.assembly.packs import empty_arrays, find_places
from bert_packed.assembly.record_kind import RecordKind
from bert_packed.records.read_causal import read_causal, read_packed_causal
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    LABEL_BYTES,
    Sequences,
    range_indices,
    to_offsets,
)


@dataclasses.dataclass(frozen=True)
class CausalKind(RecordKind):
    """Records for causal language modelling."""

    is_split: bool = False  # sequences of any length may be cut across packs

    measured_columns = ("lengths",)
    advice = "--overlong=drop or --split_sequences"
    read_unpacked = staticmethod(read_causal)
    read_packed = staticmethod(read_packed_causal)

    @property
    def layout(self):
        return CAUSAL_LAYOUT | (LABEL_BYTES if self.is_split else {})

    @property
    def num_lengths(self):
        """1 + the largest length; 0 for any length."""
        return 0 if self.is_split else super().num_lengths

    def fit(self, sequences):
        # Sequences are never truncated: the bytes of lost labels would not be known
        if not self.is_split:
            return super().fit(sequences)
        if "label_bytes" in sequences.layout:
            return sequences, {}
        columns = {**sequences.columns, "label_bytes": share_bytes(sequences)}
        return Sequences(self.layout, columns, sequences.files), {}

    def make_spec(self, depth, measured):
        return schema.PackSpec(self.max_seq_length, depth, 0)

    def assemble(self, sequences, packs, spec):
        """`bert_packs.assemble_packs` in int64, for `CAUSAL_LAYOUT`, or parts, with `FIRST_POSITIONS` too."""
        members, lengths = packs.members, sequences["lengths"][packs.members]
        arrays = empty_arrays(schema.CAUSAL_LENGTHS, packs, spec)
        is_cut = "first_positions" in sequences.layout
        first_positions = sequences["first_positions"][members] if is_cut else np.zeros(len(members))

        def put(name, indices, values):
            arrays[name].reshape(-1)[indices] = values

        source, target, _ = find_places(sequences, packs, "tokens", spec.max_seq_length)
        numbers = np.repeat(packs.slots + 1, lengths)
        put(schema.INPUT_IDS, target, sequences["tokens"][source])
        put(schema.INPUT_MASK, target, numbers)
        put(schema.POSITION_IDS, target, range_indices(first_positions, lengths))
        put(schema.LABEL_IDS, target, sequences["labels"][source])
        put(schema.LABEL_MASK, target, numbers * sequences["label_mask"][source])
        target = packs.owners * spec.max_sequences_per_pack + packs.slots
        put(schema.SEQUENCE_WEIGHTS, target, 1)
        put(schema.SEQUENCE_BYTES, target, sequences["num_bytes"][members])
        return arrays


def share_bytes(sequences):
    """Divide a sequence's bytes among its labels as equally as possible: int32 `[T]`, 0 for tokens without
    one.

        num_bytes 8, label_mask [1 1 1 0]   ->   [2 3 3 0]
    """
    lengths, offsets = sequences["lengths"], sequences.offsets("tokens")
    labels = to_offsets(sequences["label_mask"])
    ranks = labels[1:] - np.repeat(labels[offsets[:-1]], lengths)  # of each label in its sequence, from 1
    totals = np.maximum(np.repeat(np.diff(labels[offsets]), lengths), 1)
    num_bytes = np.repeat(sequences["num_bytes"], lengths)
    shares = num_bytes * ranks // totals - num_bytes * (ranks - 1) // totals
    return np.where(sequences["label_mask"] == 1, shares, 0).astype(np.int32)
