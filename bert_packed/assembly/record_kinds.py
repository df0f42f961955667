"""Kinds of records and their packs: BERT's, and those for causal language modelling; `schema.py` shows both.

A kind reads records, counts lengths, plans, and assembles packs; `feature_packs.py` has the third. A causal
sequence is packed as a whole or, in rows, cut where packs end. Each part then counts the bytes of
the labels in it.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from bert_packed import schema
from bert_packed.assembly.assignment import empty_arrays, find_places, put
from bert_packed.core.settings import InputError
from bert_packed.packing import histogram as histograms
from bert_packed.packing import plan as plans
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.records.read_bert import read_packed, read_unpacked
from bert_packed.records.read_causal import read_causal, read_packed_causal
from bert_packed.records.sequences import (
    BERT_LAYOUT,
    CAUSAL_LAYOUT,
    LABEL_BYTES,
    Column,
    Sequences,
    check_vocabulary,
    range_indices,
    sum_ranges,
    take,
    to_offsets,
)


@dataclasses.dataclass(frozen=True)
class RecordKind:
    """Records of one objective, whose sequences have one length each."""

    max_seq_length: int
    overlong: str = "error"  # or "truncate" or "drop": the treatment of longer sequences
    vocab_size: int | None = None  # ids are below it; None where it is not known

    layout: ClassVar[dict[str, Column]]  # columns that packing preserves, and origins
    measured_columns: ClassVar[tuple[str, ...]]  # those that `lengths` and `measure` need
    advice: ClassVar[str]  # settings that accept longer sequences, for messages

    @property
    def num_lengths(self):
        """1 + the largest length."""
        return self.max_seq_length + 1

    @property
    def capacities(self):
        """Capacity of a pack, by the column that counts the entries of a sequence."""
        return {"lengths": self.max_seq_length}

    def read(self, path):
        """Read and check one file; raises `InputError` where a record cannot be used.

        Yields, by batch, the `Sequences` to be packed, the counts of `fit`, and the number of records.
        """
        for batch in self.read_unpacked(path):
            check_vocabulary(batch, self.vocab_size)
            yield *self.fit(batch), len(batch)

    def fit(self, sequences):
        """Drop overlong sequences, or raise `InputError` for the first.

        Returns `Sequences`, and a dict with the numbers of those "truncated" and "dropped".
        """
        is_overlong = sequences["lengths"] > self.max_seq_length
        if is_overlong.any() and self.overlong != "drop":
            first = int(np.argmax(is_overlong))
            raise InputError(
                f"{sequences.origin(first)}: a sequence must have at most max_seq_length="
                f"{self.max_seq_length} tokens, unless {self.advice}. "
                f"Received: {sequences['lengths'][first]} tokens."
            )
        counts = {"truncated": 0, "dropped": int(is_overlong.sum())}
        return (take(sequences, ~is_overlong) if is_overlong.any() else sequences), counts

    def lengths(self, sequences):
        """Lengths for the plan: int64 `[n]`, each from 1 and below `num_lengths`."""
        return sequences["lengths"]

    def describe_lengths(self, histogram):
        """Plain JSON for a manifest, from a histogram, int64 `[num_lengths]`."""
        return histograms.to_json(histogram[1:])

    def make_plan(self, histogram, algorithm, depth):
        return plan_lengths(histogram[1:], algorithm, self.max_seq_length, depth)

    def measure(self, sequences, packs):
        """Maximum over packs of what plans do not limit: predictions, in BERT's records."""
        return 0


def plan_lengths(histogram, algorithm, max_seq_length, depth):
    """Run a packing algorithm and validate its plan: dict of plain JSON for a manifest.

    Raises `InputError` where the algorithm does not scale to this length, depth or number of sequences.
    """
    histogram = np.asarray(histogram, np.int64)
    try:
        plan = ALGORITHMS[algorithm](histogram, max_seq_length, depth)
    except ValueError as error:
        raise InputError(f"`algorithm` {algorithm} cannot pack these lengths: {error}") from error
    plans.validate_plan(plan, histogram)
    return {
        "plan": plan.to_json(),
        "num_sequences": plan.num_sequences,
        "num_packs": plan.num_packs,
        "efficiency": plan.efficiency,
        "packing_factor": plan.packing_factor,
        "depth": plan.depth,
        "lower_bound": plan.certificate.lower_bound,
        "gap": plan.certificate.gap,
    }


@dataclasses.dataclass(frozen=True)
class BertKind(RecordKind):
    """BERT's records."""

    max_predictions_per_pack: int = 0  # P; 0 = as many as the fullest pack needs
    masked_lm_weights: str = schema.SEQUENCE

    layout = BERT_LAYOUT
    measured_columns = ("lengths", "num_predictions")
    advice = "--overlong=truncate or drop"
    read_unpacked = staticmethod(read_unpacked)
    read_packed = staticmethod(read_packed)

    @property
    def capacities(self):
        # Predictions are an estimate: `make_spec` has their number
        return super().capacities | {"num_predictions": schema.default_predictions(self.max_seq_length)}

    def fit(self, sequences):
        num_overlong = int(np.count_nonzero(sequences["lengths"] > self.max_seq_length))
        if self.overlong == "truncate" and num_overlong:
            return truncate(sequences, self.max_seq_length), {"truncated": num_overlong, "dropped": 0}
        return super().fit(sequences)

    def measure(self, sequences, packs):
        return int(packs.totals(sequences["num_predictions"]).max(initial=0))

    def make_spec(self, depth, measured):
        """`PackSpec` for K=`depth` and `measured` predictions; `InputError` where these do not fit."""
        # Data without predictions need room for 1, too: a feature of length 0 looks like a missing one
        needed = max(measured, 1)
        if self.max_predictions_per_pack and self.max_predictions_per_pack < needed:
            raise InputError(
                f"`max_predictions_per_pack` must be at least {needed}, which the fullest pack needs, or 0. "
                f"Received: {self.max_predictions_per_pack}."
            )
        return schema.PackSpec(self.max_seq_length, depth, self.max_predictions_per_pack or needed)

    def assemble(self, sequences, packs, spec):
        arrays = assemble_packs(sequences, packs, spec)
        if self.masked_lm_weights == schema.BINARY:
            arrays[schema.MASKED_LM_WEIGHTS] = np.minimum(arrays[schema.MASKED_LM_WEIGHTS], 1)
        return arrays


def truncate(sequences, max_seq_length):
    """Shorten sequences over `max_seq_length`: keep the first tokens, and the last, [SEP].

        2 7 4 6 9 3  with 4   ->   2 7 4 3

    Where sentence A fills the length, only the [SEP] is left of sentence B.
    """
    lengths = sequences["lengths"]
    token_position = range_indices(0, lengths)
    from_end = np.repeat(lengths, lengths) - token_position
    keep_token = (token_position < max_seq_length - 1) | (from_end == 1)
    position = sequences["prediction_positions"]
    last = np.repeat(lengths, sequences["num_predictions"]) - 1
    keep_prediction = (position < max_seq_length - 1) | (position == last)
    return sequences.replace(
        lengths=np.minimum(lengths, max_seq_length),
        tokens=sequences["tokens"][keep_token],
        token_type_ids=sequences["token_type_ids"][keep_token],
        num_predictions=sum_ranges(keep_prediction, sequences["num_predictions"]),
        # the last token moves to the last position that is left
        prediction_positions=np.minimum(position, max_seq_length - 1)[keep_prediction],
        prediction_ids=sequences["prediction_ids"][keep_prediction],
    )


def assemble_packs(sequences, packs, spec):
    """Gather `Sequences` of `BERT_LAYOUT` into the arrays of n packed records; `schema.py` shows a pack.

    Returns a dict from feature name to array, `[n, S]`, `[n, P]` or `[n, K]`; int32, weights float32. Raises
    `ValueError` for a pack that exceeds the `PackSpec`.
    """
    members, numbers = packs.members, packs.slots + 1
    lengths, num_predictions = sequences["lengths"][members], sequences["num_predictions"][members]
    arrays = empty_arrays(schema.PACKED_LENGTHS, packs, spec, np.int32)

    source, target, starts = find_places(sequences, packs, "tokens", spec.max_seq_length)
    put(arrays, schema.INPUT_IDS, target, sequences["tokens"][source])
    put(arrays, schema.INPUT_MASK, target, np.repeat(numbers, lengths))
    put(arrays, schema.SEGMENT_IDS, target, sequences["token_type_ids"][source])
    put(arrays, schema.POSITION_IDS, target, range_indices(0, lengths))

    room = spec.max_predictions_per_pack
    source, target, _ = find_places(sequences, packs, "prediction_ids", room)
    shifts = np.repeat(starts, num_predictions)
    put(arrays, schema.MASKED_LM_POSITIONS, target, sequences["prediction_positions"][source] + shifts)
    put(arrays, schema.MASKED_LM_IDS, target, sequences["prediction_ids"][source])
    put(arrays, schema.MASKED_LM_WEIGHTS, target, np.repeat(numbers, num_predictions))

    target = packs.owners * spec.max_sequences_per_pack + packs.slots
    put(arrays, schema.NEXT_SENTENCE_POSITIONS, target, starts)
    put(arrays, schema.NEXT_SENTENCE_LABELS, target, sequences["next_sentence_labels"][members])
    put(arrays, schema.NEXT_SENTENCE_WEIGHTS, target, 1)
    return arrays


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
        """`assemble_packs` in int64, for `CAUSAL_LAYOUT`, or parts, with `FIRST_POSITIONS` too."""
        members, lengths = packs.members, sequences["lengths"][packs.members]
        arrays = empty_arrays(schema.CAUSAL_LENGTHS, packs, spec)
        is_cut = "first_positions" in sequences.layout
        first_positions = sequences["first_positions"][members] if is_cut else 0

        source, target, _ = find_places(sequences, packs, "tokens", spec.max_seq_length)
        numbers = np.repeat(packs.slots + 1, lengths)
        put(arrays, schema.INPUT_IDS, target, sequences["tokens"][source])
        put(arrays, schema.INPUT_MASK, target, numbers)
        put(arrays, schema.POSITION_IDS, target, range_indices(first_positions, lengths))
        put(arrays, schema.LABEL_IDS, target, sequences["labels"][source])
        put(arrays, schema.LABEL_MASK, target, numbers * sequences["label_mask"][source])
        target = packs.owners * spec.max_sequences_per_pack + packs.slots
        put(arrays, schema.SEQUENCE_WEIGHTS, target, 1)
        put(arrays, schema.SEQUENCE_BYTES, target, sequences["num_bytes"][members])
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
