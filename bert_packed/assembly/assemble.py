"""How sequences become packs: the arrays of the packed record, gathered for many packs at once."""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.records.sequences import range_indices, to_offsets


def count_predictions(packs, num_predictions):
    """Predictions in each pack.

    Args:
        packs: `Packs`.
        num_predictions: int64 `[n]`, predictions of each sequence.

    Returns:
        int64 `[num_packs]`.
    """
    totals = to_offsets(num_predictions[packs.members])[packs.offsets]
    return np.diff(totals)


def assemble_packs(sequences, packs, spec):
    """Gather sequences into the arrays of the packed record; `schema.py` shows a pack.

    Args:
        sequences: `Sequences`.
        packs: `Packs`, n of them, whose members index `sequences`.
        spec: `schema.PackSpec` that no pack exceeds.

    Returns:
        Dict from feature name to array: `[n, S]`, `[n, P]` or `[n, K]`; int32, weights float32.

    Raises:
        ValueError: a pack exceeds the spec.
    """
    members, depths = packs.members, np.diff(packs.offsets)
    pack_of_member = np.repeat(np.arange(len(packs)), depths)
    slot_of_member = range_indices(np.zeros(len(packs)), depths)
    lengths, num_predictions = sequences["lengths"][members], sequences["num_predictions"][members]
    starts = _starts_in_pack(lengths, packs)
    prediction_starts = _starts_in_pack(num_predictions, packs)
    _check_fits(starts + lengths, depths, prediction_starts + num_predictions, spec)

    arrays = {
        name: np.zeros(
            (len(packs), *spec.shape(name)), np.float32 if name in schema.FLOAT_FEATURES else np.int32
        )
        for name in schema.PACKED_LENGTHS
    }

    def put(name, indices, values):
        arrays[name].reshape(-1)[indices] = values

    source = range_indices(sequences.offsets("tokens")[members], lengths)
    target = range_indices(pack_of_member * spec.max_seq_length + starts, lengths)
    put(schema.INPUT_IDS, target, sequences["tokens"][source])
    put(schema.INPUT_MASK, target, np.repeat(slot_of_member + 1, lengths))
    put(schema.SEGMENT_IDS, target, sequences["token_type_ids"][source])
    put(schema.POSITION_IDS, target, range_indices(np.zeros(len(members)), lengths))

    source = range_indices(sequences.offsets("prediction_ids")[members], num_predictions)
    first = pack_of_member * spec.max_predictions_per_pack + prediction_starts
    target = range_indices(first, num_predictions)
    shifts = np.repeat(starts, num_predictions)
    put(schema.MASKED_LM_POSITIONS, target, sequences["prediction_positions"][source] + shifts)
    put(schema.MASKED_LM_IDS, target, sequences["prediction_ids"][source])
    put(schema.MASKED_LM_WEIGHTS, target, np.repeat(slot_of_member + 1, num_predictions))

    target = pack_of_member * spec.max_sequences_per_pack + slot_of_member
    put(schema.NEXT_SENTENCE_POSITIONS, target, starts)
    put(schema.NEXT_SENTENCE_LABELS, target, sequences["next_sentence_labels"][members])
    put(schema.NEXT_SENTENCE_WEIGHTS, target, 1)
    return arrays


def _starts_in_pack(sizes, packs):
    """Where each member starts within its pack: sizes [4 3 5] in packs of 2 and 1 -> [0 4 0]."""
    offsets = to_offsets(sizes)
    return offsets[:-1] - np.repeat(offsets[packs.offsets[:-1]], np.diff(packs.offsets))


def _check_fits(ends, depths, prediction_ends, spec):
    # Without this an over-full pack would spill into the row of its neighbour.
    needed = schema.PackSpec(*(int(values.max(initial=0)) for values in (ends, depths, prediction_ends)))
    limits, needs = dataclasses.astuple(spec), dataclasses.astuple(needed)
    if any(need > limit for need, limit in zip(needs, limits, strict=True)):
        raise ValueError(f"packs must fit `spec`. Received: packs that need {needed}, {spec}.")
