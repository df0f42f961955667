"""How records for causal language modelling become sequences, packed and not, with every rule checked."""

import numpy as np

from bert_packed import schema
from bert_packed.core import progress
from bert_packed.core.settings import InputError
from bert_packed.records import examples, first_records, tfrecords
from bert_packed.records.read_packed import LayoutError
from bert_packed.records.read_unpacked import follows, refuse
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    FIRST_POSITIONS,
    INT32_MAX,
    LABEL_BYTES,
    make_sequences,
    range_indices,
    sum_ranges,
)


def read_causal(path):
    """Read one file of unpacked records, ours or anybody's.

    Args:
        path: TFRecord file with the features of `schema.CAUSAL_UNPACKED_LENGTHS`, and maybe those of
            `schema.CAUSAL_OPTIONAL_LENGTHS`.

    Yields:
        `Sequences` of one batch of records each, in the order of the file.

    Raises:
        InputError: naming file and record, for a feature that is missing or of another length, a label that
            is not the next token, or numbers out of range.
        OSError: the file cannot be opened.
    """
    names = examples.feature_names(tfrecords.first_record(path), path, 1)
    if schema.SEQUENCE_BYTES in names:
        raise InputError(f"{path} must hold unpacked records. Received: records that are packed already.")
    missing = [name for name in schema.CAUSAL_UNPACKED_LENGTHS if name not in names]
    if missing:
        raise InputError(
            f"{path}, record 1: features {', '.join(missing)} are missing. "
            f"Received: {', '.join(sorted(names)) or 'no feature'}."
        )
    optional = [name for name in schema.CAUSAL_OPTIONAL_LENGTHS if name in names]
    kinds = dict.fromkeys([*schema.CAUSAL_UNPACKED_LENGTHS, *optional], "int64")
    for batch in tfrecords.read_batches(path):
        yield _to_sequences(examples.parse_ragged(batch, kinds), batch)
        progress.advance(batch.num_bytes)


def read_packed_causal(path):
    """Read one file of packs and unpack it: yields the `Sequences` of `read_parts`; raises as that."""
    for sequences, _ in read_parts(path, is_split=False):
        yield sequences


def read_parts(path, is_split=True):
    """Read one file of packs of whole sequences, or of parts of them.

    Args:
        path: TFRecord file with the features of `schema.CAUSAL_LENGTHS`.
        is_split: Whether sequences may go on from one pack to another: then the first of a pack may begin at
            any position, and a pack may be empty.

    Yields:
        `Sequences` of one batch of packs, in the order of the file and of the slots, without `label_bytes`;
        and the `Records` that the packs are. The sequences of one pack share its `record_numbers`.

    Raises:
        LayoutError: naming file and record, where a pack breaks a rule of the layout.
        InputError: the file holds no packed records, or cannot be read.
        OSError: it cannot be opened.
    """
    spec = first_records.read_pack_spec([path], kinds=schema.CAUSAL_LENGTHS)
    lengths = {name: spec.size(kind) for name, kind in schema.CAUSAL_LENGTHS.items()}
    for batch in tfrecords.read_batches(path):
        yield _unpack(examples.parse_examples(batch, lengths), batch, is_split), batch


def _to_sequences(features, batch):
    tokens, lengths = features[schema.INPUT_IDS]
    owners = np.repeat(np.arange(len(lengths)), lengths)

    def check_records(good, values, rule):
        refuse(~good, values, rule, batch)

    def check(good, values, rule):
        if not good.all():
            place = int(np.argmin(good))
            index = place - int(np.searchsorted(owners, owners[place]))
            raise InputError(
                f"{batch.path}, record {batch.number + owners[place]}: {rule}. "
                f"Received: {values[place]} at index {index}."
            )

    check_records(lengths > 0, lengths, f"{schema.INPUT_IDS} must have a token")
    for name in features.keys() & {schema.LABEL_IDS, schema.LABEL_MASK, schema.LABEL_BYTES}:
        counts = features[name][1]
        check_records(counts == lengths, counts, f"{name} must be as long as {schema.INPUT_IDS}")
    num_bytes, counts = features[schema.NUM_BYTES]
    check_records(counts == 1, counts, f"{schema.NUM_BYTES} must have one value")
    check_records(num_bytes >= 0, num_bytes, f"{schema.NUM_BYTES} must not be negative")
    labels, mask = features[schema.LABEL_IDS][0], features[schema.LABEL_MASK][0]
    check((mask == 0) | (mask == 1), mask, f"{schema.LABEL_MASK} must be 0 or 1")
    _check_labels(tokens, labels, mask > 0, owners, check)
    num_labels = sum_ranges(mask, lengths)
    rule = f"{schema.NUM_BYTES} must be 0 where nothing is predicted"
    check_records((num_bytes == 0) | (num_labels > 0), num_bytes, rule)
    label_bytes = features[schema.LABEL_BYTES][0] if schema.LABEL_BYTES in features else None
    if label_bytes is not None:
        good = (label_bytes >= 0) & (label_bytes <= INT32_MAX)
        check(good, label_bytes, f"{schema.LABEL_BYTES} must be in 0..{INT32_MAX}")
        good = (label_bytes == 0) | (mask == 1)
        check(good, label_bytes, f"{schema.LABEL_BYTES} must be 0 where nothing is predicted")
        rule = f"{schema.NUM_BYTES} must be the sum of {schema.LABEL_BYTES}"
        check_records(sum_ranges(label_bytes, lengths) == num_bytes, num_bytes, rule)
    has_bytes = label_bytes is not None
    return make_sequences(
        CAUSAL_LAYOUT | (LABEL_BYTES if has_bytes else {}),
        batch.path,
        tokens=tokens,
        labels=labels,
        label_mask=mask,
        lengths=lengths,
        num_bytes=num_bytes,
        record_numbers=np.arange(batch.number, batch.number + len(batch)),
        **({"label_bytes": label_bytes} if has_bytes else {}),
    )


def _check_labels(tokens, labels, is_labelled, owners, check):
    """Check ids, and that labels are next tokens as far as these are there.

    Args:
        tokens, labels: int64 arrays `[...]`.
        is_labelled: bool `[...]`.
        owners: int array `[...]`, equal for the tokens of one sequence.
        check: Function of (bool array of what is good, values, rule in words), which raises.
    """
    check((tokens >= 0) & (tokens <= INT32_MAX), tokens, f"{schema.INPUT_IDS} must be in 0..{INT32_MAX}")
    check((labels >= 0) & (labels <= INT32_MAX), labels, f"{schema.LABEL_IDS} must be in 0..{INT32_MAX}")
    check((labels == 0) | is_labelled, labels, f"{schema.LABEL_IDS} must be 0 where nothing is predicted")
    is_next = np.ones(labels.shape, bool)
    goes_on = owners[..., 1:] == owners[..., :-1]
    is_next[..., :-1] = ~goes_on | ~is_labelled[..., :-1] | (labels[..., :-1] == tokens[..., 1:])
    check(is_next, labels, f"{schema.LABEL_IDS} must be the next token of the sequence")


def _unpack(features, batch, is_split):
    def check(good, values, rule):
        refuse(~good, values, rule, batch, LayoutError)

    sequence_ids, positions = features[schema.INPUT_MASK], features[schema.POSITION_IDS]
    tokens, labels = features[schema.INPUT_IDS], features[schema.LABEL_IDS]
    label_mask, num_bytes = features[schema.LABEL_MASK], features[schema.SEQUENCE_BYTES]
    starts, lengths = _check_slots(sequence_ids, positions, num_bytes.shape[1], check, is_split)
    check((tokens == 0) | (sequence_ids > 0), tokens, f"{schema.INPUT_IDS} must be 0 in padding")
    is_labelled = label_mask > 0
    good = (label_mask == 0) | ((label_mask == sequence_ids) & is_labelled)
    check(good, label_mask, f"{schema.LABEL_MASK} must be the sequence of its token, or 0")
    _check_labels(tokens, labels, is_labelled, sequence_ids, check)
    num_sequences = sequence_ids.max(axis=1)
    is_slot_used = np.arange(num_bytes.shape[1]) < num_sequences[:, None]
    weights = features[schema.SEQUENCE_WEIGHTS]
    check(weights == is_slot_used, weights, f"{schema.SEQUENCE_WEIGHTS} must be 1 per sequence, else 0")
    check(num_bytes >= 0, num_bytes, f"{schema.SEQUENCE_BYTES} must not be negative")
    good = (num_bytes == 0) | is_slot_used
    check(good, num_bytes, f"{schema.SEQUENCE_BYTES} must be 0 in an unused slot")
    is_real = sequence_ids > 0
    has_label = np.zeros(num_bytes.shape, bool)
    has_label[is_slot_used] = sum_ranges(is_labelled[is_real], lengths) > 0
    good = (num_bytes == 0) | has_label
    check(good, num_bytes, f"{schema.SEQUENCE_BYTES} must be 0 where nothing is predicted")
    return make_sequences(
        CAUSAL_LAYOUT | FIRST_POSITIONS,
        batch.path,
        tokens=tokens[is_real],
        labels=labels[is_real],
        label_mask=is_labelled[is_real],
        lengths=lengths,
        num_bytes=num_bytes[is_slot_used],
        record_numbers=np.repeat(np.arange(batch.number, batch.number + len(batch)), num_sequences),
        first_positions=positions.reshape(-1)[starts],
    )


def _check_slots(sequence_ids, positions, depth, check, is_split):
    """Check which sequence tokens belong to, `[n, S]`, and where in it they stand.

    Returns:
        Two int64 arrays, of all sequences of all packs: the index, into all tokens and padding, of the first
        token, and the number of tokens.
    """
    first, before, after = sequence_ids[:, 0], sequence_ids[:, :-1], sequence_ids[:, 1:]
    good = (first == 1) | ((first == 0) & is_split)
    check(good, first, f"{schema.INPUT_MASK} must begin with sequence 1")
    goes_on = (after == before) | ((before > 0) & ((after == before + 1) | (after == 0)))
    rule = f"{schema.INPUT_MASK} must count sequences 1, 2, ... and end in padding 0"
    check(follows(goes_on), sequence_ids, rule)
    check(sequence_ids <= depth, sequence_ids, f"{schema.INPUT_MASK} must be at most K={depth}")
    is_start = follows(after != before) & (sequence_ids > 0)
    starts = np.flatnonzero(is_start)
    rows = starts // sequence_ids.shape[1]
    num_tokens = np.count_nonzero(sequence_ids, axis=1)
    row_ends = np.arange(len(sequence_ids)) * sequence_ids.shape[1] + num_tokens
    ends = np.append(starts[1:], 0)
    is_last = np.append(rows[1:] != rows[:-1], True)[: len(starts)]
    lengths = np.where(is_last, row_ends[rows], ends[: len(starts)]) - starts
    expected = np.zeros(sequence_ids.shape, np.int64)
    # only the first sequence of a pack may have begun in another one
    firsts = np.where(starts % sequence_ids.shape[1] == 0, positions.reshape(-1)[starts], 0) * is_split
    expected.reshape(-1)[range_indices(starts, lengths)] = range_indices(firsts, lengths)
    rule = f"{schema.POSITION_IDS} must restart at 0 in every sequence"
    check((positions == expected) & (positions >= 0), positions, rule)
    return starts, lengths
