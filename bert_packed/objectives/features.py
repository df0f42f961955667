"""What a batch holds: what each array is called here and in a record, its length, the limit of its values.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack.
"""

import dataclasses
from collections.abc import Callable

from bert_packed import schema


@dataclasses.dataclass(frozen=True)
class Feature:
    """One array of a batch.

    Attributes:
        name: In model code.
        length: "S", "P" or "K": `[B, S]` has a value for every token, `[B, P]` for every prediction, `[B, K]`
            for every sequence.
        record_name: In a packed record, one of `schema.PACKED_LENGTHS` or `schema.CAUSAL_LENGTHS`; None for
            what no record holds.
        limit_name: What the values, which are whole numbers from 0, must be below, for people; None for no
            limit.
        limit: Function `(model_config, spec)` to that number.
        is_position: Whether the values are places in the pack.
        is_slot: Whether the values tell a sequence of the pack, 1..K, and 0 none.
        begins_at_0: Whether the first value of each pack must be 0: no pack goes on from another.
    """

    name: str
    length: str
    record_name: str | None = None
    limit_name: str | None = None
    limit: Callable[[object, schema.PackSpec], int] | None = None
    is_position: bool = False
    is_slot: bool = False
    begins_at_0: bool = False


def _recorded(name, record_name, limit_name=None, limit=None, **kind):
    length = {**schema.PACKED_LENGTHS, **schema.CAUSAL_LENGTHS}[record_name]
    return Feature(name, length, record_name, limit_name, limit, **kind)


def _place(name, record_name):
    return _recorded(
        name, record_name, "max_seq_length", lambda _, spec: spec.max_seq_length, is_position=True
    )


def _slot(name, record_name):
    limit_name = "max_sequences_per_pack + 1"
    limit = lambda _, spec: spec.max_sequences_per_pack + 1  # noqa: E731
    return _recorded(name, record_name, limit_name, limit, is_slot=True)


def _id(name, record_name, field):
    return _recorded(name, record_name, field, lambda config, _: getattr(config, field))


# What every model reads and every objective needs: the tokens, and which sequence each is of
TOKENS = (
    # The record's name of A/B means two things in the field
    _id("token_ids", schema.INPUT_IDS, "vocab_size"),
    _slot("sequence_ids", schema.INPUT_MASK),
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
MASKED_TOKENS = (*TOKENS, SLOTS[1], *PREDICTIONS)  # what is read where no sequence is classified
RECORDED = (*SEQUENCES, *PREDICTIONS, *NEXT_SENTENCES)  # all that a packed record holds
# Of packs for next-token prediction; what has no position table has no greatest position
NEXT_TOKENS = (
    _id("token_ids", schema.INPUT_IDS, "vocab_size"),
    _slot("sequence_ids", schema.INPUT_MASK),
    _recorded("position_ids", schema.POSITION_IDS, begins_at_0=True),
    _id("label_ids", schema.LABEL_IDS, "vocab_size"),
    _slot("label_sequences", schema.LABEL_MASK),
    _recorded("slot_weights", schema.SEQUENCE_WEIGHTS),
    _recorded("sequence_bytes", schema.SEQUENCE_BYTES),  # of text that the labels stand for
)
# The same where packs go on from one another
NEXT_TOKENS_OF_ROWS = tuple(dataclasses.replace(feature, begins_at_0=False) for feature in NEXT_TOKENS)
# Which array tells the sequence, 1..K, of each token and of each prediction; 0 is unused
OWNERS = {"S": "sequence_ids", "P": "prediction_sequences"}
BATCH_NAMES = {feature.record_name: feature.name for feature in RECORDED}
