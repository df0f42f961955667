"""Sequences that a caller gives as lists, or as a dict of columns, checked and made into `Sequences`.

Errors name the sequence, from 0, and what was received.
"""

import itertools
from collections.abc import Mapping

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.packing.arguments import WHOLE, as_array, is_whole, iterate, shown
from bert_packed.records.sequences import Column, Sequences

TOKENS = "input_ids"  # whose lengths are those of the sequences
SEQUENCE_IDS, POSITION_IDS, SEQUENCE_INDEX = MADE = ("sequence_ids", "position_ids", "sequence_index")
ATTENTION_MASK = "attention_mask"
LENGTHS = "lengths"  # a column beside those that are given
READ_AT_ONCE = 1_000  # sequences of a stream, at most
SAME_KIND = "be a list in every sequence, or in none"


def refuse(subject, rule, received):
    raise InputError(f"{subject} must {rule}. Received: {received}.")


def read_stream(sequences, max_seq_length, num_at_once):
    """`Sequences` of parts of a stream, whose first sequence decides which columns there are."""
    first, names, sizes = 0, None, None
    while part := list(itertools.islice(sequences, num_at_once)):
        if names is None:
            names = list(part[0]) if isinstance(part[0], Mapping) else []
        for number, one in enumerate(part, first):
            if (set(one) if isinstance(one, Mapping) else set()) != set(names):
                rule = f"have the columns {', '.join(names)}" if names else "be a list, as the first one"
                refuse(f"sequence {number}", rule, shown(one))
        columns = {name: [one[name] for one in part] for name in names} if names else part
        batch = read_columns(columns, max_seq_length, first)
        found = {name: column.sizes for name, column in batch.layout.items()}
        for name in found.keys() if sizes else ():
            if found[name] != sizes[name]:
                refuse(f"sequence {first}: {name}", SAME_KIND, shown(columns[name][0]))
        sizes = found
        yield batch
        first += len(batch)


def read_columns(sequences, max_seq_length, first=0):
    """`Sequences` of n lists, or of a dict of columns of n entries, numbered from `first`.

    A column has a value a token, or one a sequence; its type stays. An `attention_mask` of ones is left out.
    """
    given = dict(sequences) if isinstance(sequences, Mapping) else {TOKENS: sequences}
    if TOKENS not in given:
        refuse("`sequences`", f"have a column {TOKENS}", ", ".join(map(str, given)))
    for name, values in given.items():
        if name in (*MADE, LENGTHS):
            used = ", ".join((*MADE, LENGTHS))
            refuse("`sequences`", f"not have columns {used}, which packing uses", name)
        given[name] = iterate(values, "`sequences`", f"have a list of entries in {name}")
    columns = {name: _read_column(name, values, first) for name, values in given.items()}
    tokens = columns[TOKENS]
    lengths = np.array([len(one) for one in tokens], np.int64)
    if (lengths > max_seq_length).any():
        wrong = int(np.argmax(lengths > max_seq_length))
        refuse(
            f"sequence {first + wrong}",
            f"have at most max_seq_length={max_seq_length} tokens",
            lengths[wrong],
        )
    for name, values in columns.items():
        _check_lengths(name, values, lengths, first)
    for number, values in enumerate(columns.pop(ATTENTION_MASK, []), first):
        if not (values == 1).all():
            rule = "be 1 at every token, since a sequence is one and without padding"
            refuse(f"sequence {number}: {ATTENTION_MASK}", rule, shown(values.tolist()))
    layout = {SEQUENCE_INDEX: Column("<i8"), LENGTHS: Column("<i8")}
    flat = {SEQUENCE_INDEX: np.arange(first, first + len(tokens)), LENGTHS: lengths}
    for name, values in columns.items():
        layout[name], flat[name] = _flatten(name, values)
    return Sequences(layout, flat)


def _read_column(name, values, first):
    """The entries of a column as arrays `[length]`, or all `[]`."""
    arrays = []
    for number, value in enumerate(values, first):
        array = as_array(value, f"sequence {number}: {name}", "be a list of numbers, or one")
        if array.ndim > 1:
            rule = "be a list of numbers, or one"
        elif name == TOKENS and (not array.ndim or not array.size or array.dtype.kind not in "iu"):
            rule = "be a list of one token id or more"
        elif array.ndim != (arrays or [array])[0].ndim:
            rule = SAME_KIND
        else:
            arrays.append(array)
            continue
        refuse(f"sequence {number}: {name}", rule, shown(value))
    return arrays


def _check_lengths(name, values, lengths, first):
    if len(values) != len(lengths):
        refuse("every column", f"have {len(lengths)} entries, as {TOKENS}", f"{name} with {len(values)}")
    for number, (value, length) in enumerate(zip(values, lengths.tolist(), strict=True), first):
        if value.ndim and len(value) != length:
            rule = f"have a value for each of its {length} tokens, or a single one"
            refuse(f"sequence {number}: {name}", rule, len(value))


def _flatten(name, values):
    """`Column` and content of entries."""
    types = {one.dtype for one in values} or {np.dtype(np.int64)}
    dtype = np.result_type(*types)
    if dtype.kind == "f" and all(one.kind in "iu" for one in types):
        refuse(name, "hold whole numbers of 64 bits", "some over 2**63, some below 0")
    if values and not values[0].ndim:
        return Column(dtype.str), np.array(values, dtype)
    return Column(dtype.str, LENGTHS), np.concatenate([*values, np.zeros(0, dtype)], dtype=dtype)


def read_packs(columns, max_seq_length):
    """Arrays of rows that are packs already: sequences 1, 2, ... of which each has positions from 0.

    An `attention_mask` of ones, 0 in padding, is left out. Errors name row and place, from 0.
    """
    needed = (TOKENS, SEQUENCE_IDS, POSITION_IDS)
    packs = {name: _read_rows(name, columns[name], max_seq_length) for name in needed}
    ids_BS, positions_BS = packs[SEQUENCE_IDS], packs[POSITION_IDS]
    before_BS = np.zeros_like(ids_BS)
    before_BS[:, 1:] = ids_BS[:, :-1]
    is_next_BS = (ids_BS == before_BS + 1) & ((before_BS > 0) | (np.arange(max_seq_length) == 0))
    rule = "be 1, 2, ..., each in one run, and 0 in padding, which stands last"
    _check_places(SEQUENCE_IDS, ids_BS, is_next_BS | (ids_BS == before_BS) | (ids_BS == 0), rule)
    is_counted_BS = (positions_BS == count_positions(ids_BS)) | (ids_BS == 0)
    _check_places(POSITION_IDS, positions_BS, is_counted_BS, f"count from 0 in each of {SEQUENCE_IDS}")
    if ATTENTION_MASK in columns:
        mask_BS = _read_rows(ATTENTION_MASK, columns[ATTENTION_MASK], max_seq_length)
        rule = f"be 1 where {SEQUENCE_IDS} are above 0, and 0 elsewhere"
        _check_places(ATTENTION_MASK, mask_BS, mask_BS == (ids_BS > 0), rule)
    left_out = {*packs, ATTENTION_MASK, SEQUENCE_INDEX}  # the last may be of another length in another plan
    for name in [name for name in columns if name not in left_out]:
        packs[name] = as_array(columns[name], f"`examples`: {name}", "be numbers, equally many in each row")
    return packs


def count_positions(ids_BS):
    """Positions from 0 in each run of equal ids, 0 in padding: int64 `[B, S]`."""
    places_S = np.arange(ids_BS.shape[1])
    begins_BS = np.ones(ids_BS.shape, bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    starts_BS = np.maximum.accumulate(np.where(begins_BS, places_S, 0), axis=1)
    return (places_S - starts_BS) * (ids_BS > 0)


def _read_rows(name, rows, max_seq_length):
    """Whole numbers `[B, S]`."""
    arrays = []
    for number, row in enumerate(rows):
        rule = f"have max_seq_length={max_seq_length} numbers"
        array = as_array(row, f"row {number}: {name}", rule, shape=(max_seq_length,))
        if array.dtype.kind not in WHOLE:
            place = int(np.argmax([not is_whole(one, floats=True) for one in array.tolist()]))
            refuse(f"row {number}, token {place}: {name}", "be an integer", array[place])
        arrays.append(array)
    return np.stack(arrays)


def _check_places(name, values_BS, is_right_BS, rule):
    if not is_right_BS.all():
        row, place = np.argwhere(~is_right_BS)[0]
        refuse(f"row {row}, token {place}: {name}", rule, values_BS[row, place])


def type_with_padding(dtype, value, name):
    """The type of a column with its padding: its own, or a larger one, as for -100 in a column of bytes."""
    kinds = "biuf" if dtype.kind == "f" else "biu"
    array = as_array(value, f"`padding` of {name}", f"be a number that fits {dtype}", kinds, ())
    with np.errstate(over="ignore"):
        if array.astype(dtype) == array:
            return dtype
    found = np.result_type(dtype, np.min_scalar_type(array))
    if found.kind == "f" and dtype.kind != "f":
        refuse(f"`padding` of {name}", f"be a number that fits {dtype}", shown(value))
    return found
