"""BERT's records and their packs: truncation, room for predictions, and the arrays of `schema.py`."""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.assembly.packs import empty_arrays, find_places
from bert_packed.assembly.record_kind import RecordKind
from bert_packed.core.settings import InputError
from bert_packed.records.read_bert import read_packed, read_unpacked
from bert_packed.records.sequences import BERT_LAYOUT, range_indices, sum_ranges


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
        # An estimate for predictions: `make_spec` has the number
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
    token_position = range_indices(np.zeros(len(sequences), np.int64), lengths)
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

    def put(name, indices, values):
        arrays[name].reshape(-1)[indices] = values

    source, target, starts = find_places(sequences, packs, "tokens", spec.max_seq_length)
    put(schema.INPUT_IDS, target, sequences["tokens"][source])
    put(schema.INPUT_MASK, target, np.repeat(numbers, lengths))
    put(schema.SEGMENT_IDS, target, sequences["token_type_ids"][source])
    put(schema.POSITION_IDS, target, range_indices(np.zeros(len(members)), lengths))

    room = spec.max_predictions_per_pack
    source, target, _ = find_places(sequences, packs, "prediction_ids", room)
    shifts = np.repeat(starts, num_predictions)
    put(schema.MASKED_LM_POSITIONS, target, sequences["prediction_positions"][source] + shifts)
    put(schema.MASKED_LM_IDS, target, sequences["prediction_ids"][source])
    put(schema.MASKED_LM_WEIGHTS, target, np.repeat(numbers, num_predictions))

    target = packs.owners * spec.max_sequences_per_pack + packs.slots
    put(schema.NEXT_SENTENCE_POSITIONS, target, starts)
    put(schema.NEXT_SENTENCE_LABELS, target, sequences["next_sentence_labels"][members])
    put(schema.NEXT_SENTENCE_WEIGHTS, target, 1)
    return arrays
