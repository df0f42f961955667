"""Parts of sequences that were cut across packs are joined as a plain loop over the rows joins them."""

import itertools
import json

import numpy as np
import pytest
from causal_files import make_sequences, write_sequences

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.record_rules import LayoutError
from bert_packed.records.split_sequences import find_num_rows, read_joined

S, NUM_ROWS = 6, 3
SEQUENCES = make_sequences([3, 20, 1, 6, 5, 2, 13, 4, 9, 6], vocab_size=40)
NAMES = (schema.INPUT_IDS, schema.LABEL_IDS, schema.LABEL_MASK)


def make_packs(row):
    """The packs of a row of sequences, one after the other, as dicts of lists."""
    tokens = [
        (number, position, *(sequence[name][position] for name in (*NAMES, schema.LABEL_BYTES)))
        for number, sequence in enumerate(row)
        for position in range(len(sequence[schema.INPUT_IDS]))
    ]
    packs = []
    for start in range(0, len(tokens), S):
        some = tokens[start : start + S]
        numbers = sorted({number for number, *_ in some})
        slots = [numbers.index(number) + 1 for number, *_ in some]
        columns = {
            schema.INPUT_IDS: [token[2] for token in some],
            schema.INPUT_MASK: slots,
            schema.POSITION_IDS: [token[1] for token in some],
            schema.LABEL_IDS: [token[3] for token in some],
            schema.LABEL_MASK: [token[4] * slot for token, slot in zip(some, slots, strict=True)],
        }
        sums = [sum(token[5] for token in some if token[0] == number) for number in numbers]
        packs.append(
            {name: values + [0] * (S - len(values)) for name, values in columns.items()}
            | {schema.SEQUENCE_WEIGHTS: [1] * len(numbers) + [0] * (S - len(numbers))}
            | {schema.SEQUENCE_BYTES: sums + [0] * (S - len(sums))}
        )
    return packs


def write_rows(folder, num_files=2, change=lambda packs: None):
    """Write sequences in rows, every third to each; returns the paths."""
    rows = [make_packs(SEQUENCES[number::NUM_ROWS]) for number in range(NUM_ROWS)]
    empty = {name: [0] * len(values) for name, values in rows[0][0].items()}
    steps = itertools.zip_longest(*rows, fillvalue=empty)
    packs = [pack for step in steps for pack in step]
    change(packs)
    folder.mkdir(exist_ok=True)
    size = -(-len(packs) // num_files)
    parts = [packs[start : start + size] for start in range(0, len(packs), size)]
    return [write_sequences(folder / f"{number}.tfrecord", part) for number, part in enumerate(parts)]


def list_joined(paths):
    found, num_packs = [], 0

    def see(path, parts, count):
        nonlocal num_packs
        num_packs += count

    for sequences in read_joined(paths, NUM_ROWS, see):
        for index in range(len(sequences)):
            first, last = sequences.offsets("tokens")[index : index + 2]
            columns = (sequences[name][first:last].tolist() for name in ("tokens", "labels", "label_mask"))
            found.append((*columns, int(sequences["num_bytes"][index]), sequences.origin(index)))
    return sorted(found), num_packs


@pytest.mark.parametrize("num_files", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 2, 4, 100])
def test_sequences_are_whole_again(tmp_path, monkeypatch, num_files, batch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", batch)
    paths = write_rows(tmp_path / "a", num_files)
    found, num_packs = list_joined(paths)
    assert [one[:4] for one in found] == sorted(
        (*(sequence[name] for name in NAMES), *sequence[schema.NUM_BYTES]) for sequence in SEQUENCES
    )
    size = -(-num_packs // num_files)
    origins = set()
    for row in range(NUM_ROWS):
        lengths = [len(sequence[schema.INPUT_IDS]) for sequence in SEQUENCES[row::NUM_ROWS]]
        for start in np.cumsum([0, *lengths[:-1]]).tolist():
            pack = start // S * NUM_ROWS + row
            origins.add(f"{paths[pack // size]}, record {pack % size + 1}")
    assert {one[4] for one in found} == origins


def skip_a_position(packs):
    packs[4][schema.POSITION_IDS] = [place + 1 for place in packs[4][schema.POSITION_IDS]]


def begin_in_the_middle(packs):
    packs[2][schema.POSITION_IDS][0] = 4  # the first of its row


def pad_a_row(packs):
    for name in packs[1]:
        packs[1][name] = [0] * len(packs[1][name])


def pad_the_end_of_a_pack(packs):
    for name in (*NAMES, schema.INPUT_MASK, schema.POSITION_IDS):
        packs[2][name][-1] = 0
    packs[5][schema.POSITION_IDS] = list(range(S))  # its row goes on with another sequence


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (skip_a_position, "record 5: position_ids must go on from the row's pack before, at 6. Received: 7."),
        (
            begin_in_the_middle,
            "record 3: position_ids must go on from the row's pack before, at 0. Received: 4.",
        ),
        (pad_a_row, "record 5: a row must have padding at its end only. Received: a token after it."),
        (pad_the_end_of_a_pack, "record 6: a row must have padding at its end only."),
        (lambda packs: packs.pop(), "`num_rows` must divide the number of packs. Received: 3, "),
    ],
)
def test_what_is_no_row_is_named(tmp_path, monkeypatch, batch, change, message):
    monkeypatch.setattr(tfrecords, "READ_BATCH", batch)
    with pytest.raises(LayoutError) as found:
        list_joined(write_rows(tmp_path / "a", 1, change))
    assert message in str(found.value) and str(tmp_path / "a") in str(found.value)


def test_manifests_agree_on_the_number_of_rows(tmp_path):
    for name, manifest in {
        "a": {"split_sequences": True, "num_rows": 3},
        "b": {"split_sequences": True, "num_rows": 4},
        "c": {"split_sequences": False},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    a, b, c, d = (f"{tmp_path}/{name}/x" for name in "abcd")
    assert [find_num_rows(paths) for paths in ([a], [b], [c, d], [a, a])] == [3, 4, 0, 3]
    for paths in ([a, b], [a, c], [d, b]):
        with pytest.raises(InputError, match="one --split_sequences and --num_rows"):
            find_num_rows(paths)
