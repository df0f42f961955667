"""Reading of records for causal language modelling, packed and not, with every rule checked.

Packs of split sequences are cut from rows, and their parts are joined again. Two rows in packs of 4, read in
order; a part that begins at a position above 0 continues the last sequence of its row:

    pack 0, row 0    [a0 a1 a2 b0]
    pack 1, row 1    [c0 c1 c2 c3]
    pack 2, row 0    [b1 b2  .  .]     ->   a, b: positions 1, 2 follow 0
    pack 3, row 1    [c4 d0 d1  .]     ->   c, d
"""

import dataclasses
import itertools

import numpy as np

from bert_packed import schema
from bert_packed.core import progress
from bert_packed.core.settings import InputError
from bert_packed.records import examples, tfrecords
from bert_packed.records.inputs import folder_of
from bert_packed.records.provenance import read_manifest
from bert_packed.records.record_rules import LayoutError, check_int32, check_slots, make_check, read_pack_spec
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    FIRST_POSITIONS,
    LABEL_BYTES,
    concatenate,
    make_sequences,
    sum_ranges,
    take,
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
    spec = read_pack_spec([path], kinds=schema.CAUSAL_LENGTHS)
    lengths = {name: spec.size(kind) for name, kind in schema.CAUSAL_LENGTHS.items()}
    for batch in tfrecords.read_batches(path):
        yield _unpack(examples.parse_examples(batch, lengths), batch, is_split), batch


def _to_sequences(features, batch):
    check = make_check(batch)
    tokens, lengths = features[schema.INPUT_IDS]
    offsets, owners = to_offsets(lengths), np.repeat(np.arange(len(lengths)), lengths)
    check(lengths > 0, lengths, f"{schema.INPUT_IDS} must have a token")
    for name in (schema.LABEL_IDS, schema.LABEL_MASK, schema.LABEL_BYTES):
        if name not in features:  # bytes are optional
            continue
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
    return make_sequences(layout, batch.path, lengths=lengths, record_numbers=batch.numbers, **columns)


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
    starts, lengths, is_slot_used = check_slots(check, features, schema.SEQUENCE_WEIGHTS, is_split)
    check((tokens == 0) | is_real, tokens, f"{schema.INPUT_IDS} must be 0 in padding")
    is_labelled = label_mask > 0
    good = (label_mask == 0) | ((label_mask == sequence_ids) & is_labelled)
    check(good, label_mask, f"{schema.LABEL_MASK} must be the sequence of its token, or 0")
    _check_labels(check, tokens, labels, is_labelled, sequence_ids)
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
        record_numbers=np.repeat(batch.numbers, is_slot_used.sum(axis=1)),
        first_positions=positions.reshape(-1)[starts],
    )


def find_num_rows(paths):
    """R, of packs whose manifest says `split_sequences`; 0 where none does; `InputError` if they disagree."""
    found = {}
    for folder in sorted({folder_of(path) for path in paths}):
        manifest = read_manifest(folder, any_json=True) or {}
        num_rows = manifest.get("num_rows") if manifest.get("split_sequences") is True else 0
        if (
            type(num_rows) is not int
            or num_rows < 0
            or (num_rows == 0) == bool(manifest.get("split_sequences"))
        ):
            raise InputError(
                f"{folder}: `num_rows` of the manifest.json must be a whole number of at least 1. "
                f"Received: {num_rows!r}."
            )
        found[num_rows] = folder
    if len(found) > 1:
        raise InputError(f"packs must be made with one --split_sequences and --num_rows. Received: {found}.")
    return next(iter(found))


def read_joined(paths, num_rows, see):
    """Read packs of split sequences in R rows, and join their parts: yields `Sequences` of one folder.

    `paths` are all files of the packs of each folder, in order; each sequence has the file and record that it
    begins in. `see` is called with the path, the parts and the number of packs of each batch.
    """

    def read(path):
        length = read_pack_spec([path]).max_seq_length
        for parts, records in read_parts(path):
            see(path, parts, len(records))
            yield parts, records, length

    for folder, its_paths in itertools.groupby(paths, folder_of):
        batches = itertools.chain.from_iterable(map(read, its_paths))
        yield from _join_rows(batches, num_rows, folder)


def _join_rows(batches, num_rows, folder):
    """`Sequences` that have ended, of batches of (parts, `Records` that they are of, S)."""
    num_packs, is_over = 0, np.zeros(num_rows, bool)
    held, held_rows = [], np.zeros(0, np.int64)  # the last sequence of each row, which may go on
    for parts, records, length in batches:
        packs = parts["record_numbers"] - records.number
        first, last = num_packs % num_rows, num_packs % num_rows + len(records)
        num_packs += len(records)
        num_tokens = np.bincount(packs, parts["lengths"], len(records))
        steps = np.zeros((-(-last // num_rows), num_rows), bool)
        steps.reshape(-1)[first:last] = num_tokens < length
        were_over = np.logical_or.accumulate(np.vstack([is_over, steps]))
        is_over = were_over[-1]
        after_padding = np.flatnonzero(were_over.reshape(-1)[first:last] & (num_tokens > 0))

        rows = np.concatenate([held_rows, (first + packs) % num_rows])
        order = np.argsort(rows, kind="stable")
        rows, joined = rows[order], take(concatenate([*held, parts]), order)
        packs = np.concatenate([np.full(len(held_rows), -1), packs])[order]
        positions = joined["first_positions"]
        expected = np.zeros_like(positions)
        expected[1:] = (positions + joined["lengths"])[:-1] * (rows[1:] == rows[:-1])
        wrong = np.flatnonzero((positions > 0) & (positions != expected))
        rule = "a row must have padding at its end only. Received: a token after it."
        mistakes = [(pack, rule) for pack in after_padding]
        for place in wrong:
            rule = f"position_ids must go on from the row's pack before, at {expected[place]}"
            mistakes.append((packs[place], f"{rule}. Received: {positions[place]}."))
        if mistakes:
            pack, rule = min(mistakes, key=lambda mistake: mistake[0])
            raise LayoutError(f"{records.path}, record {records.number + pack}: {rule}")

        starts = np.flatnonzero(positions == 0)
        if not len(starts):
            continue
        columns = {name: joined[name] for name, column in joined.layout.items() if column.sizes}
        columns |= {name: joined[name][starts] for name in joined.layout.keys() - columns}
        columns |= {name: np.add.reduceat(joined[name], starts) for name in ("lengths", "num_bytes")}
        whole, rows = dataclasses.replace(joined, columns=columns), rows[starts]
        is_last = np.append(rows[1:] != rows[:-1], True)
        held, held_rows = [take(whole, is_last)], rows[is_last]
        yield take(whole, ~is_last)
    if num_packs % num_rows:
        raise LayoutError(
            f"{folder}: `num_rows` must divide the number of packs. Received: {num_rows}, {num_packs} packs."
        )
    yield from held
