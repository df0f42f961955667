"""Sequences that a caller gives as lists, or as a dict of columns, checked and made into `Sequences`.

Errors name the sequence, from 0, and what was received.
"""

import itertools
from collections.abc import Mapping

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.records.sequences import Column, Sequences

TOKENS = "input_ids"  # whose lengths are those of the sequences
SEQUENCE_IDS, POSITION_IDS, SEQUENCE_INDEX = MADE = ("sequence_ids", "position_ids", "sequence_index")
LENGTHS = "lengths"  # a column beside those that are given
READ_AT_ONCE = 1_000  # sequences of a stream, at most
SAME_KIND = "be a list in every sequence, or in none"


def read_stream(sequences, max_seq_length, num_at_once):
    """`Sequences` of parts of a stream, whose first sequence decides which columns there are."""
    sequences, first, names, sizes = iter(sequences), 0, None, None
    while part := list(itertools.islice(sequences, num_at_once)):
        if names is None:
            names = list(part[0]) if isinstance(part[0], Mapping) else []
        for number, one in enumerate(part, first):
            if (set(one) if isinstance(one, Mapping) else set()) != set(names):
                rule = f"have the columns {', '.join(names)}" if names else "be a list, as the first one"
                raise InputError(f"sequence {number} must {rule}. Received: {one!r:.100}.")
        columns = {name: [one[name] for one in part] for name in names} if names else part
        batch = read_columns(columns, max_seq_length, first)
        found = {name: column.sizes for name, column in batch.layout.items()}
        for name in found.keys() if sizes else ():
            if found[name] != sizes[name]:
                received = f"{columns[name][0]!r:.100}"
                raise InputError(f"sequence {first}: {name} must {SAME_KIND}. Received: {received}.")
        sizes = found
        yield batch
        first += len(batch)


def read_columns(sequences, max_seq_length, first=0):
    """`Sequences` of n lists, or of a dict of columns of n entries, numbered from `first`.

    A column has a value a token, or one a sequence; its type stays. An `attention_mask` of ones is left out.
    """
    given = dict(sequences) if isinstance(sequences, Mapping) else {TOKENS: sequences}
    if TOKENS not in given:
        raise InputError(f"`sequences` must have a column {TOKENS}. Received: {', '.join(map(str, given))}.")
    for name, values in given.items():
        if name in (*MADE, LENGTHS):
            used = ", ".join((*MADE, LENGTHS))
            raise InputError(
                f"`sequences` must not have columns {used}, which packing uses. Received: {name}."
            )
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise InputError(f"`sequences` must have a list of entries in {name}. Received: {values!r:.100}.")
    columns = {name: _read_column(name, values, first) for name, values in given.items()}
    tokens = columns[TOKENS]
    lengths = np.array([len(one) for one in tokens], np.int64)
    if (lengths > max_seq_length).any():
        wrong = int(np.argmax(lengths > max_seq_length))
        raise InputError(
            f"sequence {first + wrong} must have at most max_seq_length={max_seq_length} tokens. "
            f"Received: {lengths[wrong]}."
        )
    for name, values in columns.items():
        _check_lengths(name, values, lengths, first)
    for number, values in enumerate(columns.pop("attention_mask", []), first):
        if not values.all():
            raise InputError(f"sequence {number} must be without padding. Received: attention_mask with 0.")
    layout = {SEQUENCE_INDEX: Column("<i8"), LENGTHS: Column("<i8")}
    flat = {SEQUENCE_INDEX: np.arange(first, first + len(tokens)), LENGTHS: lengths}
    for name, values in columns.items():
        layout[name], flat[name] = _flatten(name, values)
    return Sequences(layout, flat)


def _read_column(name, values, first):
    """The entries of a column as arrays `[length]`, or all `[]`."""
    arrays = []
    for number, value in enumerate(values, first):
        try:
            array = np.asarray(value)
        except ValueError as error:  # lists of different lengths
            raise InputError(f"sequence {number}: {name} must be a list of numbers: {error}.") from error
        if (array.dtype.kind not in "biuf" and array.size) or array.ndim > 1:
            rule = "be a list of numbers, or one"
        elif name == TOKENS and (not array.ndim or not array.size or array.dtype.kind not in "iu"):
            rule = "be a list of one token id or more"
        elif array.ndim != (arrays or [array])[0].ndim:
            rule = SAME_KIND
        else:
            arrays.append(array)
            continue
        raise InputError(f"sequence {number}: {name} must {rule}. Received: {value!r:.100}.")
    return arrays


def _check_lengths(name, values, lengths, first):
    if len(values) != len(lengths):
        raise InputError(
            f"every column must have {len(lengths)} entries, as {TOKENS}. "
            f"Received: {name} with {len(values)}."
        )
    for number, (value, length) in enumerate(zip(values, lengths.tolist(), strict=True), first):
        if value.ndim and len(value) != length:
            raise InputError(
                f"sequence {number}: {name} must have a value for each of its {length} tokens, or a "
                f"single one. Received: {len(value)}."
            )


def _flatten(name, values):
    """`Column` and content of entries."""
    types = {one.dtype for one in values} or {np.dtype(np.int64)}
    dtype = np.result_type(*types)
    if dtype.kind == "f" and all(one.kind in "iu" for one in types):
        raise InputError(
            f"{name} must hold whole numbers of 64 bits. Received: some over 2**63, some below 0."
        )
    if values and not values[0].ndim:
        return Column(dtype.str), np.array(values, dtype)
    return Column(dtype.str, LENGTHS), np.concatenate([*values, np.zeros(0, dtype)], dtype=dtype)


def type_with_padding(dtype, value, name):
    """The type of a column with its padding: its own, or a larger one, as for -100 in a column of bytes."""
    kind = np.asarray(value).dtype.kind
    if np.ndim(value) == 0 and (kind in "biu" or (kind == "f" and dtype.kind == "f")):
        with np.errstate(over="ignore"):
            if np.asarray(value).astype(dtype) == value:
                return dtype
        found = np.result_type(dtype, np.min_scalar_type(value))
        if found.kind != "f" or dtype.kind == "f":
            return found
    raise InputError(f"`padding` of {name} must be a number that fits {dtype}. Received: {value!r:.100}.")
