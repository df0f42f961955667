"""Packs of split sequences: the rows that they are cut from, and their parts joined again.

Two rows in packs of 4, read in order; a part that begins at a position above 0 continues the last sequence of
its row:

    pack 0, row 0    [a0 a1 a2 b0]
    pack 1, row 1    [c0 c1 c2 c3]
    pack 2, row 0    [b1 b2  .  .]     ->   a, b: positions 1, 2 follow 0
    pack 3, row 1    [c4 d0 d1  .]     ->   c, d
"""

import dataclasses
import itertools

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.records.inputs import folder_of
from bert_packed.records.provenance import read_manifest
from bert_packed.records.read_causal import read_parts
from bert_packed.records.record_rules import LayoutError, read_pack_spec
from bert_packed.records.sequences import concatenate, take


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
        yield from _join(batches, num_rows, folder)


def _join(batches, num_rows, folder):
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
