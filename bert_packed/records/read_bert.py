"""Reading of BERT's records, google-research/bert's and packs of them, with every rule checked."""

import numpy as np

from bert_packed import schema
from bert_packed.core import progress
from bert_packed.core.settings import InputError
from bert_packed.records import examples, record_rules, tfrecords
from bert_packed.records.record_rules import (
    INT32_MAX,
    LayoutError,
    check_int32,
    check_slots,
    follows,
    make_check,
)
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences

# The features of length S are only compared and gathered, which is faster in small numbers
NARROW = (schema.INPUT_IDS, schema.INPUT_MASK, schema.SEGMENT_IDS)


def read_unpacked(path):
    """Read one file of unpacked records, ours or anybody's: yields `Sequences`, a batch at a time.

    S and P are those of the file's first record. Predictions may be in any order and become ascending.
    """
    record = tfrecords.first_record(path)
    names = examples.feature_names(record, path, 1)
    if schema.POSITION_IDS in names and schema.NEXT_SENTENCE_POSITIONS in names:
        raise InputError(f"{path} must hold unpacked records. Received: records that are packed already.")
    lengths = examples.feature_lengths(record, path, 1, schema.UNPACKED_LENGTHS)
    record_rules.common_lengths(lengths, schema.UNPACKED_LENGTHS, path)
    for batch in tfrecords.read_batches(path):
        yield _to_sequences(examples.parse_examples(batch, lengths, NARROW), batch)
        progress.advance(batch.num_bytes)


def _to_sequences(features, batch):
    tokens, mask = features[schema.INPUT_IDS], features[schema.INPUT_MASK]
    token_types = features[schema.SEGMENT_IDS]
    labels = features[schema.NEXT_SENTENCE_LABELS][:, 0]

    check = make_check(batch)
    check((mask == 0) | (mask == 1), mask, f"{schema.INPUT_MASK} must be 0 or 1")
    check(mask[:, 0] == 1, mask[:, 0], f"{schema.INPUT_MASK} must begin with 1")
    check(follows(mask[:, 1:] <= mask[:, :-1]), mask, f"{schema.INPUT_MASK} must be ones, then zeros")
    is_real = mask == 1
    check_int32(check, schema.INPUT_IDS, tokens)
    check((token_types == 0) | (token_types == 1), token_types, f"{schema.SEGMENT_IDS} must be 0 or 1")
    check((labels == 0) | (labels == 1), labels, f"{schema.NEXT_SENTENCE_LABELS} must be 0 or 1")
    lengths = mask.sum(axis=1, dtype=np.int64)
    positions, ids, is_used = _sorted_predictions(features)
    weights = features[schema.MASKED_LM_WEIGHTS]
    check((weights == 0) | (weights == 1), weights, f"{schema.MASKED_LM_WEIGHTS} must be 0 or 1")
    inside = (positions >= 0) & (positions < lengths[:, None])
    check(inside | ~is_used, positions, f"{schema.MASKED_LM_POSITIONS} must lie within the sequence")
    once = follows(positions[:, 1:] > positions[:, :-1]) | ~is_used
    check(once, positions, f"{schema.MASKED_LM_POSITIONS} must not name a position twice")
    check_int32(check, schema.MASKED_LM_IDS, ids)
    return make_sequences(
        BERT_LAYOUT,
        batch.path,
        tokens=tokens[is_real],
        token_type_ids=token_types[is_real],
        lengths=lengths,
        prediction_positions=positions[is_used],
        prediction_ids=ids[is_used],
        num_predictions=is_used.sum(axis=1),
        next_sentence_labels=labels,
        record_numbers=batch.numbers,
    )


def _sorted_predictions(features):
    """Positions, labels and whether they are used, each `[n, P]`; used ones first and ascending."""
    positions, ids = features[schema.MASKED_LM_POSITIONS], features[schema.MASKED_LM_IDS]
    is_used = features[schema.MASKED_LM_WEIGHTS] != 0
    key = np.where(is_used, positions, INT32_MAX)
    if np.all(key[:, 1:] >= key[:, :-1]):  # the common case: google-research/bert sorts them
        return positions, ids, is_used
    order = np.argsort(key, axis=1, kind="stable")
    return tuple(np.take_along_axis(values, order, axis=1) for values in (positions, ids, is_used))


def read_packed(path):
    """Read one file of packs: yields `Sequences`, a batch at a time; those of a pack share its number."""
    spec = record_rules.read_pack_spec([path], kinds=schema.PACKED_LENGTHS)
    lengths = {name: spec.size(kind) for name, kind in schema.PACKED_LENGTHS.items()}
    for batch in tfrecords.read_batches(path):
        yield _unpack(examples.parse_examples(batch, lengths), batch)


def _unpack(features, batch):
    check = make_check(batch, LayoutError)
    sequence_ids, token_types = features[schema.INPUT_MASK], features[schema.SEGMENT_IDS]
    is_real = sequence_ids > 0
    starts, lengths, is_slot_used = check_slots(check, features, schema.NEXT_SENTENCE_WEIGHTS)
    check_int32(check, schema.INPUT_IDS, features[schema.INPUT_IDS])
    check((token_types == 0) | (token_types == 1), token_types, f"{schema.SEGMENT_IDS} must be 0 or 1")
    for name in (schema.INPUT_IDS, schema.SEGMENT_IDS):
        check((features[name] == 0) | is_real, features[name], f"{name} must be 0 in padding")
    _check_next_sentence(features, starts, is_slot_used, check)
    _check_predictions(features, check)
    num_sequences = is_slot_used.sum(axis=1)
    first_sequence = np.cumsum(num_sequences) - num_sequences
    is_used = features[schema.MASKED_LM_WEIGHTS] != 0
    packs, _ = np.nonzero(is_used)
    positions = features[schema.MASKED_LM_POSITIONS][is_used]
    owners = first_sequence[packs] + sequence_ids[packs, positions] - 1
    return make_sequences(
        BERT_LAYOUT,
        batch.path,
        tokens=features[schema.INPUT_IDS][is_real],
        token_type_ids=token_types[is_real],
        lengths=lengths,
        prediction_positions=features[schema.POSITION_IDS][packs, positions],
        prediction_ids=features[schema.MASKED_LM_IDS][is_used],
        num_predictions=np.bincount(owners, minlength=len(lengths)),
        next_sentence_labels=features[schema.NEXT_SENTENCE_LABELS][is_slot_used],
        record_numbers=np.repeat(batch.numbers, num_sequences),
    )


def _check_next_sentence(features, starts, is_slot_used, check):
    positions, labels = features[schema.NEXT_SENTENCE_POSITIONS], features[schema.NEXT_SENTENCE_LABELS]
    expected = np.zeros_like(positions)
    expected[is_slot_used] = starts % features[schema.INPUT_MASK].shape[1]
    check(positions == expected, positions, f"{schema.NEXT_SENTENCE_POSITIONS} must be the sequence's [CLS]")
    check((labels == 0) | (labels == 1), labels, f"{schema.NEXT_SENTENCE_LABELS} must be 0 or 1")
    check((labels == 0) | is_slot_used, labels, f"{schema.NEXT_SENTENCE_LABELS} must be 0 in an unused slot")


def _check_predictions(features, check):
    sequence_ids = features[schema.INPUT_MASK]
    positions, ids = features[schema.MASKED_LM_POSITIONS], features[schema.MASKED_LM_IDS]
    weights = features[schema.MASKED_LM_WEIGHTS]
    is_used = weights != 0
    within = (positions >= 0) & (positions < sequence_ids.shape[1])
    check(within, positions, f"{schema.MASKED_LM_POSITIONS} must lie within the pack")
    owners = np.take_along_axis(sequence_ids, positions, axis=1)
    own = (weights == owners) | ~is_used
    own |= ((weights == 1) | ~is_used).all(axis=1, keepdims=True)  # --masked_lm_weights=binary: in all of it
    check(own, weights, f"{schema.MASKED_LM_WEIGHTS} must be the sequence of the prediction's position")
    rising = follows(positions[:, 1:] > positions[:, :-1]) | ~is_used
    check(rising, positions, f"{schema.MASKED_LM_POSITIONS} must ascend")
    ends = follows(is_used[:, 1:] <= is_used[:, :-1])
    check(ends, weights, f"{schema.MASKED_LM_WEIGHTS} must end in zeros")
    check_int32(check, schema.MASKED_LM_IDS, ids)
    for name, values in ((schema.MASKED_LM_POSITIONS, positions), (schema.MASKED_LM_IDS, ids)):
        check((values == 0) | is_used, values, f"{name} must be 0 where unused")
