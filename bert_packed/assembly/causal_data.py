"""What packing must know of records for causal language modelling; `schema.py` shows a pack of them."""

import dataclasses
import math

import numpy as np

from bert_packed import schema
from bert_packed.assembly.length_plan import plan_lengths
from bert_packed.assembly.overlong import drop_overlong
from bert_packed.packing import histogram as histograms
from bert_packed.records.read_causal import check_causal_vocabulary, read_causal
from bert_packed.records.sequences import CAUSAL_LAYOUT, range_indices, row_bytes, to_offsets


@dataclasses.dataclass(frozen=True)
class CausalData:
    """Records for causal language modelling; `pack_data.PackData` says what each member is for.

    Attributes:
        max_seq_length: S.
        overlong: "error" or "drop".
        vocab_size: Ids are below it; None where nobody says.
    """

    max_seq_length: int
    overlong: str
    vocab_size: int | None

    layout = CAUSAL_LAYOUT
    measured_columns = ("lengths",)

    @property
    def num_lengths(self):
        """Lengths are below it."""
        return self.max_seq_length + 1

    def pack_bytes(self, depth):
        """About how many bytes the columns of a full pack take, which holds `depth` sequences."""
        return 9 * self.max_seq_length + math.ceil(depth * row_bytes(self.layout))

    def read(self, path):
        """Read, check and fit one file; yields as `BertData.read`."""
        for batch in read_causal(path):
            check_causal_vocabulary(batch, self.vocab_size)
            fitted, num_overlong = drop_overlong(batch, self.max_seq_length, self.overlong)
            yield fitted, len(batch), num_overlong

    def lengths(self, columns):
        """What a plan is made for: int `[n]`, each from 1 and below `num_lengths`."""
        return columns["lengths"]

    def describe_lengths(self, histogram):
        """What the manifest says of a histogram `[num_lengths]`: the `lengths` that occur, and `counts`."""
        return histograms.to_json(histogram[1:])

    def make_plan(self, histogram, algorithm, depth):
        """Plan the packs for a histogram `[num_lengths]`: see `plan_lengths`."""
        return plan_lengths(histogram[1:], algorithm, self.max_seq_length, depth)

    def measure(self, columns, packs):
        """Nothing beyond what the plan knows."""
        return 0

    def make_spec(self, depth, measured):
        """The shapes of the packed record: no P."""
        return schema.PackSpec(self.max_seq_length, depth, 0)

    def assemble(self, columns, packs, spec):
        """The arrays of packed records: dict from feature to array `[number of packs, ...]`."""
        depths = np.diff(packs.offsets)
        slots = range_indices(np.zeros(len(packs)), depths)
        lengths = columns["lengths"][packs.members]
        ends = to_offsets(lengths)
        starts = ends[:-1] - np.repeat(ends[packs.offsets[:-1]], depths)
        source = range_indices(columns.offsets("tokens")[packs.members], lengths)
        return lay_out(
            spec,
            len(packs),
            owners=np.repeat(np.arange(len(packs)), depths),
            slots=slots,
            starts=starts,
            lengths=lengths,
            first_positions=np.zeros(len(lengths), np.int64),
            num_bytes=columns["num_bytes"][packs.members],
            tokens=columns["tokens"][source],
            labels=columns["labels"][source],
            label_mask=columns["label_mask"][source],
        )


def lay_out(
    spec,
    num_packs,
    *,
    owners,
    slots,
    starts,
    lengths,
    first_positions,
    num_bytes,
    tokens,
    labels,
    label_mask,
):
    """Lay sequences, or parts of them, into the arrays of the packed record.

    Args:
        spec: `schema.PackSpec` that no pack exceeds.
        num_packs: n.
        owners, slots, starts: Int arrays `[m]`: the pack of each sequence, its slot from 0, its first place.
        lengths, first_positions, num_bytes: Int arrays `[m]`.
        tokens, labels, label_mask: Int arrays `[T]`, of all sequences, one after the other.

    Returns:
        Dict from feature name to array `[n, S]` or `[n, K]`, int64, weights float32.

    Raises:
        ValueError: a pack exceeds the spec.
    """
    length, depth = spec.max_seq_length, spec.max_sequences_per_pack
    if len(slots) and (slots.max() >= depth or (starts + lengths).max() > length):
        # without this an over-full pack would spill into the row of its neighbour
        raise ValueError(f"packs must fit `spec`. Received: {slots.max() + 1} slots, {spec}.")
    arrays = {
        name: np.zeros((num_packs, *spec.shape(name)), schema.dtype(name)) for name in schema.CAUSAL_LENGTHS
    }

    def put(name, indices, values):
        arrays[name].reshape(-1)[indices] = values

    numbers = np.repeat(slots + 1, lengths)
    target = range_indices(owners * length + starts, lengths)
    put(schema.INPUT_IDS, target, tokens)
    put(schema.INPUT_MASK, target, numbers)
    put(schema.POSITION_IDS, target, range_indices(first_positions, lengths))
    put(schema.LABEL_IDS, target, labels)
    put(schema.LABEL_MASK, target, numbers * label_mask)
    put(schema.SEQUENCE_WEIGHTS, owners * depth + slots, 1)
    put(schema.SEQUENCE_BYTES, owners * depth + slots, num_bytes)
    return arrays
