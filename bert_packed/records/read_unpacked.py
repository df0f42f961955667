"""Reading of google-research/bert's pre-training records, with every rule checked."""

import numpy as np

from bert_packed import schema
from bert_packed.core import progress
from bert_packed.core.settings import InputError
from bert_packed.records import examples, first_records, tfrecords
from bert_packed.records.record_rules import INT32_MAX, check_int32, follows, make_check
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences

# The features of length S are compared and gathered only, which is faster in small numbers
NARROW = (schema.INPUT_IDS, schema.INPUT_MASK, schema.SEGMENT_IDS)


def read_unpacked(path):
    """Read one file of unpacked records, ours or anybody's.

    S and P are those of the file's first record. Predictions may be in any order and become ascending.

    Args:
        path: TFRecord file with the features of `schema.UNPACKED_LENGTHS`.

    Yields:
        `Sequences` of one batch of records each, in the order of the file.

    Raises:
        InputError: naming file and record, for a feature that is missing or of another length, a mask that
            is not ones followed by zeros, predictions outside their sequence or twice at one position, or
            numbers out of range.
        OSError: the file cannot be opened.
    """
    lengths = _first_lengths(path)
    for batch in tfrecords.read_batches(path):
        yield _to_sequences(examples.parse_examples(batch, lengths, NARROW), batch)
        progress.advance(batch.num_bytes)


def _first_lengths(path):
    """Lengths of the features in the first record of a file."""
    record = tfrecords.first_record(path)
    names = examples.feature_names(record, path, 1)
    if schema.POSITION_IDS in names and schema.NEXT_SENTENCE_POSITIONS in names:
        raise InputError(f"{path} must hold unpacked records. Received: records that are packed already.")
    lengths = examples.feature_lengths(record, path, 1, schema.UNPACKED_LENGTHS)
    first_records.common_lengths(lengths, schema.UNPACKED_LENGTHS, path)
    return lengths


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
        record_numbers=np.arange(batch.number, batch.number + len(batch)),
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
