"""How packed records become sequences again, with every rule of the packed layout checked."""

import numpy as np

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import examples, first_records, tfrecords
from bert_packed.records.read_unpacked import follows, refuse
from bert_packed.records.sequences import BERT_LAYOUT, INT32_MAX, make_sequences


class LayoutError(InputError):
    """A packed record breaks a rule of `schema.py`'s layout."""


def read_packed(path):
    """Read one file of packs and unpack it.

    Args:
        path: TFRecord file with the features of `schema.PACKED_LENGTHS`.

    Yields:
        `Sequences` of one batch of packs each, in the order of the file and of the slots.
        `record_numbers` is the pack's, so the sequences of one pack share it.

    Raises:
        LayoutError: naming file and record, where a pack breaks a rule of the layout.
        InputError: the file holds no packed records, or cannot be read.
        OSError: it cannot be opened.
    """
    spec = first_records.read_pack_spec([path], kinds=schema.PACKED_LENGTHS)
    lengths = {name: spec.size(kind) for name, kind in schema.PACKED_LENGTHS.items()}
    for batch in tfrecords.read_batches(path):
        yield _to_sequences(examples.parse_examples(batch, lengths), batch)


def _to_sequences(features, batch):
    def check(good, values, rule):
        refuse(~good, values, rule, batch, LayoutError)

    sequence_ids = features[schema.INPUT_MASK]
    is_start = _check_tokens(features, check)
    _check_next_sentence(features, is_start, check)
    _check_predictions(features, check)
    is_real = sequence_ids > 0
    num_sequences = sequence_ids.max(axis=1)
    first_sequence = np.cumsum(num_sequences) - num_sequences
    starts = np.flatnonzero(is_start[is_real])
    is_used = features[schema.MASKED_LM_WEIGHTS] != 0
    packs, _ = np.nonzero(is_used)
    positions = features[schema.MASKED_LM_POSITIONS][is_used]
    owners = first_sequence[packs] + sequence_ids[packs, positions] - 1
    return make_sequences(
        BERT_LAYOUT,
        batch.path,
        tokens=features[schema.INPUT_IDS][is_real],
        token_type_ids=features[schema.SEGMENT_IDS][is_real],
        lengths=np.diff(starts, append=is_real.sum()),
        prediction_positions=features[schema.POSITION_IDS][packs, positions],
        prediction_ids=features[schema.MASKED_LM_IDS][is_used],
        num_predictions=np.bincount(owners, minlength=len(starts)),
        next_sentence_labels=features[schema.NEXT_SENTENCE_LABELS][
            features[schema.NEXT_SENTENCE_WEIGHTS] > 0
        ],
        record_numbers=np.repeat(np.arange(batch.number, batch.number + len(batch)), num_sequences),
    )


def _check_tokens(features, check):
    """Check the features of length S; returns where sequences start, bool `[n, S]`."""
    tokens, sequence_ids = features[schema.INPUT_IDS], features[schema.INPUT_MASK]
    token_types, positions = features[schema.SEGMENT_IDS], features[schema.POSITION_IDS]
    depth = features[schema.NEXT_SENTENCE_LABELS].shape[1]
    check(sequence_ids[:, 0] == 1, sequence_ids[:, 0], f"{schema.INPUT_MASK} must begin with sequence 1")
    before, after = sequence_ids[:, :-1], sequence_ids[:, 1:]
    goes_on = (after == before) | ((before > 0) & ((after == before + 1) | (after == 0)))
    check(
        follows(goes_on),
        sequence_ids,
        f"{schema.INPUT_MASK} must count sequences 1, 2, ... and end in padding 0",
    )
    check(sequence_ids <= depth, sequence_ids, f"{schema.INPUT_MASK} must be at most K={depth}")

    is_start = np.ones(sequence_ids.shape, bool)
    is_start[:, 1:] = (after != before) & (after > 0)
    columns = np.arange(sequence_ids.shape[1])
    start_of = np.maximum.accumulate(np.where(is_start, columns, 0), axis=1)
    is_padding = sequence_ids == 0
    expected = np.where(is_padding, 0, columns - start_of)
    check(positions == expected, positions, f"{schema.POSITION_IDS} must restart at 0 in every sequence")
    check((tokens >= 0) & (tokens <= INT32_MAX), tokens, f"{schema.INPUT_IDS} must be in 0..{INT32_MAX}")
    check((token_types == 0) | (token_types == 1), token_types, f"{schema.SEGMENT_IDS} must be 0 or 1")
    for name, values in ((schema.INPUT_IDS, tokens), (schema.SEGMENT_IDS, token_types)):
        check((values == 0) | ~is_padding, values, f"{name} must be 0 in padding")
    return is_start


def _check_next_sentence(features, is_start, check):
    """Check the features of length K."""
    sequence_ids = features[schema.INPUT_MASK]
    positions, labels = features[schema.NEXT_SENTENCE_POSITIONS], features[schema.NEXT_SENTENCE_LABELS]
    weights = features[schema.NEXT_SENTENCE_WEIGHTS]
    is_slot_used = np.arange(labels.shape[1]) < sequence_ids.max(axis=1)[:, None]
    expected = np.zeros_like(positions)
    packs, columns = np.nonzero(is_start)
    expected[packs, sequence_ids[packs, columns] - 1] = columns
    check(weights == is_slot_used, weights, f"{schema.NEXT_SENTENCE_WEIGHTS} must be 1 per sequence, else 0")
    check(positions == expected, positions, f"{schema.NEXT_SENTENCE_POSITIONS} must be the sequence's [CLS]")
    check((labels == 0) | (labels == 1), labels, f"{schema.NEXT_SENTENCE_LABELS} must be 0 or 1")
    check((labels == 0) | is_slot_used, labels, f"{schema.NEXT_SENTENCE_LABELS} must be 0 in an unused slot")


def _check_predictions(features, check):
    """Check the features of length P."""
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
    check((ids >= 0) & (ids <= INT32_MAX), ids, f"{schema.MASKED_LM_IDS} must be in 0..{INT32_MAX}")
    for name, values in ((schema.MASKED_LM_POSITIONS, positions), (schema.MASKED_LM_IDS, ids)):
        check((values == 0) | is_used, values, f"{name} must be 0 where unused")
