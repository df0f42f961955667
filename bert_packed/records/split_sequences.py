"""How sequences that were cut across packs become whole again: row by row, part after part.

Two rows in packs of 4, read in order; a part that begins at a position above 0 goes on from its row's pack
before:

    pack 0, row 0    [a0 a1 a2 b0]
    pack 1, row 1    [c0 c1 c2 c3]
    pack 2, row 0    [b1 b2  .  .]     ->   a, b: positions 1, 2 go on after 0
    pack 3, row 1    [c4 d0 d1  .]     ->   c, d
"""

import dataclasses
import itertools

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.records.first_records import read_pack_spec
from bert_packed.records.inputs import folder_of
from bert_packed.records.manifests import read_manifest
from bert_packed.records.read_causal import read_parts
from bert_packed.records.read_packed import LayoutError
from bert_packed.records.sequences import CAUSAL_LAYOUT, make_sequences, take


@dataclasses.dataclass
class RowFacts:
    """What a file of packs holds.

    Attributes:
        num_records: Packs.
        num_parts: Sequences in packs, parts counted each.
        depth: The most in a pack.
        largest_id: The largest id of a token or label.
    """

    num_records: int = 0
    num_parts: int = 0
    depth: int = 0
    largest_id: int = 0

    def add(self, parts, num_packs):
        """Add a batch of packs, `Sequences` and their number."""
        self.num_records += num_packs
        self.num_parts += len(parts)
        self.depth = max(
            self.depth, int(np.unique(parts["record_numbers"], return_counts=True)[1].max(initial=0))
        )
        for ids in (parts["tokens"], parts["labels"]):
            self.largest_id = max(self.largest_id, int(ids.max(initial=0)))


@dataclasses.dataclass
class _Row:
    """The sequence of a row that may go on, as arrays of its parts, and the file and record it began in."""

    is_over: bool = False  # padding was seen
    parts: list = dataclasses.field(default_factory=list)
    length: int = 0
    origin: tuple = ()


def find_num_rows(paths):
    """R, of packs whose manifest says `split_sequences`; 0 where none does.

    Raises:
        InputError: directories disagree.
    """
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


def read_joined(paths, num_rows, facts):
    """Read packs of split sequences, in order, and join their parts.

    Args:
        paths: All files of the packs of one folder or several, those of each in order.
        num_rows: R.
        facts: Dict to put the `RowFacts` of each path into.

    Yields:
        Number of the file, and `Sequences` of it that are whole, each with the record it begins in.
        What the rows of a folder end with comes after its last file.

    Raises:
        LayoutError: naming file and record, where a part goes on from nowhere, or a row after its padding, or
            the packs of a folder are no multiple of R.
    """
    for folder, numbered in itertools.groupby(enumerate(paths), lambda pair: folder_of(pair[1])):
        rows, num_packs = [_Row() for _ in range(num_rows)], 0
        for index, path in numbered:
            facts[path] = RowFacts()
            length = read_pack_spec([path]).max_seq_length
            for parts, count in read_parts(path):
                whole, ended = _add_batch(rows, num_packs, parts, count, length, index, facts[path])
                num_packs += count
                yield from ((index, sequences) for sequences in whole)
                yield from _join(ended, paths)
        if num_packs % num_rows:
            raise LayoutError(
                f"{folder}: `num_rows` must divide the number of packs. "
                f"Received: {num_rows}, {num_packs} packs."
            )
        yield from _join([row for row in rows if row.parts], paths)


def _add_batch(rows, num_before, parts, num_packs, length, file, facts):
    """Add packs to their rows: list of `Sequences` that are whole, and of `_Row` that have ended."""
    whole, ended, first_record = [], [], facts.num_records + 1
    facts.add(parts, num_packs)
    limits = np.searchsorted(parts["record_numbers"], np.arange(first_record, first_record + num_packs + 1))
    for pack, (first, last) in enumerate(itertools.pairwise(limits.tolist())):
        place = f"{parts.files[0]}, record {first_record + pack}"
        ended += _add_pack(rows[(num_before + pack) % len(rows)], parts, first, last, length, file, place)
        whole.extend(range(first + 1, last - 1))
    return [take(parts, np.array(whole))] if whole else [], ended


def _add_pack(row, parts, first, last, length, file, place):
    """Add the parts `first` to `last` of a pack to its row: list of `_Row`, of sequences that have ended.

    The parts between the first and the last of a pack are whole, and left alone.
    """
    ended = []
    if first == last:
        row.is_over = True
        return ended
    if row.is_over:
        raise LayoutError(f"{place}: a row must have padding at its end only. Received: a token after it.")
    position = int(parts["first_positions"][first])
    if position == 0:
        ended += _end(row)
    elif position != row.length:
        raise LayoutError(
            f"{place}: position_ids must go on from the row's pack before, at {row.length}. "
            f"Received: {position}."
        )
    _extend(row, parts, first, file)
    if last - first > 1:
        ended += _end(row)
        _extend(row, parts, last - 1, file)
    row.is_over = int(parts.offsets("tokens")[last] - parts.offsets("tokens")[first]) < length
    return ended


def _end(row):
    """Take the sequence that has ended from a row: list of one `_Row`, or none."""
    ended = [_Row(parts=row.parts, length=row.length, origin=row.origin)] if row.parts else []
    row.parts, row.length = [], 0
    return ended


def _extend(row, parts, index, file):
    span = slice(*parts.offsets("tokens")[index : index + 2].tolist())
    if not row.parts:
        row.origin = (file, int(parts["record_numbers"][index]))
    # copies: a part would keep the whole batch
    arrays = tuple(column[span].copy() for column in (parts["tokens"], parts["labels"], parts["label_mask"]))
    row.parts.append((*arrays, int(parts["num_bytes"][index])))
    row.length += span.stop - span.start


def _join(ended, paths):
    """`Sequences` of sequences that have ended: yields as `read_joined`."""
    for file in sorted({row.origin[0] for row in ended}):
        some = [row for row in ended if row.origin[0] == file]
        names = ("tokens", "labels", "label_mask")
        columns = (np.concatenate([part[i] for row in some for part in row.parts]) for i in range(3))
        sequences = make_sequences(
            CAUSAL_LAYOUT,
            paths[file],
            **dict(zip(names, columns, strict=True)),
            lengths=[row.length for row in some],
            num_bytes=[sum(part[3] for part in row.parts) for row in some],
            record_numbers=[row.origin[1] for row in some],
        )
        yield file, sequences
