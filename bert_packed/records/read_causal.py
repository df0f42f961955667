"""Reading of records for causal language modelling, packed and not, with every rule checked."""

import numpy as np

from bert_packed import schema
from bert_packed.core import progress
from bert_packed.core.settings import InputError
from bert_packed.records import examples, record_rules, tfrecords
from bert_packed.records.record_rules import LayoutError, check_int32, check_slots, make_check
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    FIRST_POSITIONS,
    LABEL_BYTES,
    make_sequences,
    sum_ranges,
    to_offsets,
)


def read_causal(path):
    """Read one file of unpacked records, ours or anybody's: yields `Sequences`, a batch at a time.

    They have the features of `schema.CAUSAL_UNPACKED_LENGTHS`, and maybe of `CAUSAL_OPTIONAL_LENGTHS`.
    """
    names = examples.feature_names(tfrecords.first_record(path), path, 1)
    if schema.SEQUENCE_BYTES in names:
        raise InputError(f"{path} must hold unpacked records. Received: records that are packed already.")
    examples.check_names(names, schema.CAUSAL_UNPACKED_LENGTHS, path, 1)
    optional = [name for name in schema.CAUSAL_OPTIONAL_LENGTHS if name in names]
    kinds = dict.fromkeys([*schema.CAUSAL_UNPACKED_LENGTHS, *optional], "int64")
    for batch in tfrecords.read_batches(path):
        yield _to_sequences(examples.parse_ragged(batch, kinds), batch)
        progress.advance(batch.num_bytes)


def read_packed_causal(path):
    for sequences, _ in read_parts(path, is_split=False):
        yield sequences


def read_parts(path, is_split=True):
    """Read one file of packs of whole sequences or, with `is_split`, of parts that go on in other packs.

    Yields, a batch at a time, `Sequences` without `label_bytes`, of which those of a pack share its
    `record_numbers`, and the `Records` that the packs are.
    """
    spec = record_rules.read_pack_spec([path], kinds=schema.CAUSAL_LENGTHS)
    lengths = {name: spec.size(kind) for name, kind in schema.CAUSAL_LENGTHS.items()}
    for batch in tfrecords.read_batches(path):
        yield _unpack(examples.parse_examples(batch, lengths), batch, is_split), batch


def _to_sequences(features, batch):
    check = make_check(batch)
    tokens, lengths = features[schema.INPUT_IDS]
    offsets, owners = to_offsets(lengths), np.repeat(np.arange(len(lengths)), lengths)
    check(lengths > 0, lengths, f"{schema.INPUT_IDS} must have a token")
    for name in features.keys() & {schema.LABEL_IDS, schema.LABEL_MASK, schema.LABEL_BYTES}:
        counts = features[name][1]
        check(counts == lengths, counts, f"{name} must be as long as {schema.INPUT_IDS}")
    num_bytes, counts = features[schema.NUM_BYTES]
    check(counts == 1, counts, f"{schema.NUM_BYTES} must have one value")
    check(num_bytes >= 0, num_bytes, f"{schema.NUM_BYTES} must not be negative")
    labels, mask = features[schema.LABEL_IDS][0], features[schema.LABEL_MASK][0]
    check((mask == 0) | (mask == 1), mask, f"{schema.LABEL_MASK} must be 0 or 1", offsets)
    _check_labels(check, tokens, labels, mask > 0, owners, offsets)
    good = (num_bytes == 0) | (sum_ranges(mask, lengths) > 0)
    check(good, num_bytes, f"{schema.NUM_BYTES} must be 0 where nothing is predicted")
    columns = {"tokens": tokens, "labels": labels, "label_mask": mask, "num_bytes": num_bytes}
    layout = CAUSAL_LAYOUT
    if schema.LABEL_BYTES in features:
        label_bytes, _ = features[schema.LABEL_BYTES]
        layout, columns["label_bytes"] = CAUSAL_LAYOUT | LABEL_BYTES, label_bytes
        check_int32(check, schema.LABEL_BYTES, label_bytes, offsets)
        good = (label_bytes == 0) | (mask == 1)
        check(good, label_bytes, f"{schema.LABEL_BYTES} must be 0 where nothing is predicted", offsets)
        good = sum_ranges(label_bytes, lengths) == num_bytes
        check(good, num_bytes, f"{schema.NUM_BYTES} must be the sum of {schema.LABEL_BYTES}")
    record_numbers = np.arange(batch.number, batch.number + len(batch))
    return make_sequences(layout, batch.path, lengths=lengths, record_numbers=record_numbers, **columns)


def _check_labels(check, tokens, labels, is_labelled, owners, *offsets):
    """Check ids, and that labels are next tokens as far as these are there; one sequence has one owner."""
    check_int32(check, schema.INPUT_IDS, tokens, *offsets)
    check_int32(check, schema.LABEL_IDS, labels, *offsets)
    rule = f"{schema.LABEL_IDS} must be 0 where nothing is predicted"
    check((labels == 0) | is_labelled, labels, rule, *offsets)
    is_next = np.ones(labels.shape, bool)
    goes_on = owners[..., 1:] == owners[..., :-1]
    is_next[..., :-1] = ~goes_on | ~is_labelled[..., :-1] | (labels[..., :-1] == tokens[..., 1:])
    check(is_next, labels, f"{schema.LABEL_IDS} must be the next token of the sequence", *offsets)


def _unpack(features, batch, is_split):
    check = make_check(batch, LayoutError)
    sequence_ids, positions = features[schema.INPUT_MASK], features[schema.POSITION_IDS]
    is_real = sequence_ids > 0
    tokens, labels = features[schema.INPUT_IDS], features[schema.LABEL_IDS]
    label_mask, num_bytes = features[schema.LABEL_MASK], features[schema.SEQUENCE_BYTES]
    starts, lengths = check_slots(check, features, num_bytes.shape[1], is_split)
    check((tokens == 0) | is_real, tokens, f"{schema.INPUT_IDS} must be 0 in padding")
    is_labelled = label_mask > 0
    good = (label_mask == 0) | ((label_mask == sequence_ids) & is_labelled)
    check(good, label_mask, f"{schema.LABEL_MASK} must be the sequence of its token, or 0")
    _check_labels(check, tokens, labels, is_labelled, sequence_ids)
    num_sequences = sequence_ids.max(axis=1)
    is_slot_used = np.arange(num_bytes.shape[1]) < num_sequences[:, None]
    weights = features[schema.SEQUENCE_WEIGHTS]
    check(weights == is_slot_used, weights, f"{schema.SEQUENCE_WEIGHTS} must be 1 per sequence, else 0")
    check(num_bytes >= 0, num_bytes, f"{schema.SEQUENCE_BYTES} must not be negative")
    good = (num_bytes == 0) | is_slot_used
    check(good, num_bytes, f"{schema.SEQUENCE_BYTES} must be 0 in an unused slot")
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
