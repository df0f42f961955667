"""The arrays of a batch: their names in batches and records, lengths, and limits of values.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack.
"""

import dataclasses
import math
from collections.abc import Callable

from bert_packed import schema


@dataclasses.dataclass(frozen=True)
class Feature:
    """One array of a batch."""

    name: str
    length: str  # "S", "P" or "K": [B, S] by token, [B, P] by prediction or [B, K] by sequence
    record_name: str | None = None  # in packed records; None where they do not hold it
    limit_name: str | None = None  # for messages
    # (model config, spec) to a number; values are integers from 0 and below it
    limit: Callable[[object, schema.PackSpec], int] | None = None
    is_position: bool = False  # values are indices into the pack
    is_slot: bool = False  # values are sequences of the pack, 1..K, 0 for none
    begins_at_0: bool = False  # the first value of a pack must be 0, since none continues from another


def _recorded(name, record_name, limit_name=None, limit=None, **kind):
    length = {**schema.PACKED_LENGTHS, **schema.CAUSAL_LENGTHS}[record_name]
    return Feature(name, length, record_name, limit_name, limit, **kind)


def _place(name, record_name):
    return _recorded(
        name, record_name, "max_seq_length", lambda _, spec: spec.max_seq_length, is_position=True
    )


def _slot(name, record_name):
    def limit(_, spec):
        return spec.max_sequences_per_pack + 1

    return _recorded(name, record_name, "max_sequences_per_pack + 1", limit, is_slot=True)


def _id(name, record_name, field):
    def limit(config, _):
        size = getattr(config, field)
        return math.inf if size is None else size  # a model without such a table has no limit

    return _recorded(name, record_name, field, limit)


# Read by every model and objective
TOKENS = (
    _id("token_ids", schema.INPUT_IDS, "vocab_size"),
    _slot("sequence_ids", schema.INPUT_MASK),
    # `segment_ids`, as in records, would elsewhere mean the sequence within a pack
    _id("token_type_ids", schema.SEGMENT_IDS, "type_vocab_size"),
    _id("position_ids", schema.POSITION_IDS, "max_position_embeddings"),
)
SLOTS = (
    _place("cls_positions", schema.NEXT_SENTENCE_POSITIONS),
    _recorded("slot_weights", schema.NEXT_SENTENCE_WEIGHTS),  # 1 = the slot holds a sequence
)
PREDICTIONS = (
    _place("prediction_positions", schema.MASKED_LM_POSITIONS),
    _id("prediction_ids", schema.MASKED_LM_IDS, "vocab_size"),
    _slot("prediction_sequences", schema.MASKED_LM_WEIGHTS),
)
NEXT_SENTENCES = (
    _recorded("nsp_labels", schema.NEXT_SENTENCE_LABELS, "the number of classes", lambda *_: 2),
)
SEQUENCES = (*TOKENS, *SLOTS)
MASKED_TOKENS = (*TOKENS, SLOTS[1], *PREDICTIONS)  # where no sequence is classified
RECORDED = (*SEQUENCES, *PREDICTIONS, *NEXT_SENTENCES)  # all that a packed record holds
# Packs for next-token prediction have these; positions have no limit, as they index no table of embeddings
NEXT_TOKENS = (
    *TOKENS[:2],
    _recorded("position_ids", schema.POSITION_IDS, begins_at_0=True),
    _id("label_ids", schema.LABEL_IDS, "vocab_size"),
    _slot("label_sequences", schema.LABEL_MASK),
    _recorded("slot_weights", schema.SEQUENCE_WEIGHTS),
    _recorded("sequence_bytes", schema.SEQUENCE_BYTES),  # of the labels' text
)
# Packs that continue one another need not begin at position 0
NEXT_TOKENS_OF_ROWS = tuple(dataclasses.replace(feature, begins_at_0=False) for feature in NEXT_TOKENS)
# The arrays with the sequence, 1..K, of each token and of each prediction; 0 is unused
OWNERS = {"S": "sequence_ids", "P": "prediction_sequences"}
BATCH_NAMES = {feature.record_name: feature.name for feature in RECORDED}
