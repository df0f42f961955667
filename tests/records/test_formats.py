"""Graphcore's layout holds the same sequences as ours, as its programs expect them, checked as strictly."""

import json

import numpy as np
import pytest
from packed_records import PACK
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.records import first_records, tfrecords
from bert_packed.records.formats import find_common_format, from_graphcore, to_graphcore
from bert_packed.records.read_packed import LayoutError, read_packed
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verify_tfrecords import DESCRIPTION, VerifyConfig, main

S = 16
GRAPHCORE_PACK = {
    schema.GRAPHCORE_INPUT_IDS: [7, 4, 3, 9, 3, 0, 2, 2],
    schema.GRAPHCORE_INPUT_MASK: [1, 1, 1, 2, 2, 0, 2, 1],
    schema.GRAPHCORE_SEGMENT_IDS: [0, 1, 1, 0, 0, 0, 0, 0],
    schema.GRAPHCORE_POSITION_IDS: [1, 2, 3, 1, 2, 0, 0, 0],
    schema.GRAPHCORE_MASKED_LM_POSITIONS: [1, 3, 0],
    schema.GRAPHCORE_MASKED_LM_IDS: [8, 9, 0],
    schema.GRAPHCORE_MASKED_LM_MASK: [1, 2, 0],
    schema.GRAPHCORE_NEXT_SENTENCE_LABELS: [0, 0, 1],
    schema.GRAPHCORE_NEXT_SENTENCE_MASK: [0, 1, 1],
}


def arrays(lists):
    return {name: np.array([values]) for name, values in lists.items()}


def lists(features):
    return {name: values[0].tolist() for name, values in features.items()}


def accept(good, values, rule):
    assert np.all(good), rule


def by_loop(pack_arrays, length, depth, room):
    """Graphcore's record of one pack of ours, sequence by sequence."""
    out = {
        name: [0] * {"S": length, "K": depth, "P": room}[k] for name, k in schema.GRAPHCORE_LENGTHS.items()
    }
    offset = used = 0
    for index in range(1, max(pack_arrays[schema.INPUT_MASK]) + 1):
        places = [s for s in range(length) if pack_arrays[schema.INPUT_MASK][s] == index]
        for rank, place in enumerate(places):
            target = length - index if rank == 0 else offset + rank - 1
            out[schema.GRAPHCORE_INPUT_IDS][target] = pack_arrays[schema.INPUT_IDS][place]
            out[schema.GRAPHCORE_INPUT_MASK][target] = index
            out[schema.GRAPHCORE_SEGMENT_IDS][target] = pack_arrays[schema.SEGMENT_IDS][place]
            out[schema.GRAPHCORE_POSITION_IDS][target] = rank
        for position, label, weight in zip(
            pack_arrays[schema.MASKED_LM_POSITIONS],
            pack_arrays[schema.MASKED_LM_IDS],
            pack_arrays[schema.MASKED_LM_WEIGHTS],
            strict=True,
        ):
            if weight == index:
                rank = position - places[0]
                out[schema.GRAPHCORE_MASKED_LM_POSITIONS][used] = (
                    length - index if rank == 0 else offset + rank - 1
                )
                out[schema.GRAPHCORE_MASKED_LM_IDS][used] = label
                out[schema.GRAPHCORE_MASKED_LM_MASK][used] = index
                used += 1
        out[schema.GRAPHCORE_NEXT_SENTENCE_LABELS][depth - index] = pack_arrays[schema.NEXT_SENTENCE_LABELS][
            index - 1
        ]
        out[schema.GRAPHCORE_NEXT_SENTENCE_MASK][depth - index] = 1
        offset += len(places) - 1
    return out


def test_the_picture():
    assert lists(to_graphcore(arrays(PACK))) == GRAPHCORE_PACK
    assert lists(from_graphcore(arrays(GRAPHCORE_PACK), accept)) == PACK
    assert by_loop(PACK, 8, 3, 3) == GRAPHCORE_PACK


@pytest.fixture
def input_file(tmp_path):
    lengths = np.random.default_rng(1).integers(1, S, 60)
    return write_features(tmp_path / "in.tfrecord", make_features(lengths, S))


def pack_as(output_format, input_file, folder, **settings):
    config = PackConfig(
        input_file=input_file,
        output_dir=str(folder),
        max_seq_length=S,
        output_format=output_format,
        num_shards=1,
        **settings,
    )
    return pack(config), str(folder / "packed-00000-of-00001.tfrecord")


def read_arrays(path, kinds):
    spec = first_records.read_pack_spec([path], kinds=kinds)
    lengths = {name: spec.size(kind) for name, kind in kinds.items()}
    (batch,) = tfrecords.read_batches(path)
    return tfrecords.parse_examples(batch, lengths, path, 1), spec


def test_both_layouts_hold_the_same_packs(tmp_path, input_file):
    ours, our_path = pack_as("packed", input_file, tmp_path / "ours")
    theirs, their_path = pack_as("graphcore", input_file, tmp_path / "theirs")
    assert ours["plan"] == theirs["plan"]
    our_arrays, _ = read_arrays(our_path, schema.PACKED_LENGTHS)
    their_arrays, spec = read_arrays(their_path, schema.GRAPHCORE_LENGTHS)
    # 3 predictions in a sequence of 16, and one more for each further sequence of a pack
    assert spec.max_predictions_per_pack == max(
        ours["spec"]["max_predictions_per_pack"],
        schema.default_predictions(S) + spec.max_sequences_per_pack - 1,
    )
    for row in range(ours["num_packs"]):
        one = {name: values[row].tolist() for name, values in our_arrays.items()}
        expected = by_loop(one, S, spec.max_sequences_per_pack, spec.max_predictions_per_pack)
        assert {name: values[row].tolist() for name, values in their_arrays.items()} == expected
    for one, other in zip(read_packed(our_path), read_packed(their_path), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.prediction_positions.tolist() == other.prediction_positions.tolist()
        assert one.prediction_ids.tolist() == other.prediction_ids.tolist()
        assert one.next_sentence_labels.tolist() == other.next_sentence_labels.tolist()
    depths = our_arrays[schema.INPUT_MASK].max(axis=1)
    assert np.mean(depths > 1) > 0.3


def verify(input_file, packed_file, **flags):
    arguments = {"input_file": input_file, "packed_file": packed_file, **flags}
    argv = ["verify_tfrecords.py", *(f"--{name}={value}" for name, value in arguments.items())]
    return run(main, VerifyConfig, DESCRIPTION, argv)


def test_verify_reads_graphcores_layout(tmp_path, input_file):
    manifest, path = pack_as("graphcore", input_file, tmp_path / "out")
    assert manifest["settings"]["output_format"] == "graphcore"
    assert verify(input_file, path, json=tmp_path / "result.json") == 0
    assert json.loads((tmp_path / "result.json").read_text())[0]["result"] == "equal"
    _, ours = pack_as("packed", input_file, tmp_path / "ours")
    with pytest.raises(InputError, match=r"one layout\. Received: .*packed.*graphcore"):
        find_common_format([ours, path])


@pytest.mark.parametrize("depth", [2, "max"])
def test_lossless_at_any_depth(tmp_path, input_file, depth):
    _, path = pack_as("graphcore", input_file, tmp_path / "out", max_sequences_per_pack=depth)
    assert verify(input_file, path) == 0


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        (schema.GRAPHCORE_INPUT_MASK, [1, 1, 1, 2, 2, 0, 1, 2]),  # [CLS] in our order
        (schema.GRAPHCORE_INPUT_MASK, [1, 1, 2, 2, 2, 0, 2, 1]),
        (schema.GRAPHCORE_INPUT_MASK, [1, 1, 1, 2, 2, 0, 0, 1]),
        (schema.GRAPHCORE_INPUT_MASK, [1, 1, 1, 4, 4, 0, 2, 1]),
        (schema.GRAPHCORE_INPUT_MASK, [1, 1, 1, 0, 2, 0, 2, 1]),
        (schema.GRAPHCORE_INPUT_IDS, [7, 4, 3, 9, 3, 5, 2, 2]),
        (schema.GRAPHCORE_SEGMENT_IDS, [0, 1, 1, 0, 0, 1, 0, 0]),
        (schema.GRAPHCORE_SEGMENT_IDS, [0, 3, 1, 0, 0, 0, 0, 0]),
        (schema.GRAPHCORE_POSITION_IDS, [0, 1, 2, 0, 1, 0, 0, 0]),
        (schema.GRAPHCORE_POSITION_IDS, [1, 3, 2, 1, 2, 0, 0, 0]),
        (schema.GRAPHCORE_POSITION_IDS, [1, 2, 3, 1, 2, 0, 0, 1]),
        (schema.GRAPHCORE_POSITION_IDS, [1, 2, 3, 1, 2, 3, 0, 0]),
        (schema.GRAPHCORE_MASKED_LM_POSITIONS, [1, 8, 0]),
        (schema.GRAPHCORE_MASKED_LM_POSITIONS, [1, 5, 0]),
        (schema.GRAPHCORE_MASKED_LM_POSITIONS, [1, 1, 0]),
        (schema.GRAPHCORE_MASKED_LM_POSITIONS, [1, 3, 2]),
        (schema.GRAPHCORE_MASKED_LM_MASK, [2, 1, 0]),
        (schema.GRAPHCORE_MASKED_LM_MASK, [1, 1, 0]),
        (schema.GRAPHCORE_MASKED_LM_IDS, [8, 9, 9]),
        (schema.GRAPHCORE_NEXT_SENTENCE_LABELS, [1, 0, 1]),
        (schema.GRAPHCORE_NEXT_SENTENCE_LABELS, [0, 0, 2]),
        (schema.GRAPHCORE_NEXT_SENTENCE_MASK, [1, 1, 0]),
        (schema.GRAPHCORE_NEXT_SENTENCE_MASK, [1, 1, 1]),
        (schema.GRAPHCORE_NEXT_SENTENCE_MASK, [0, 0, 1]),
    ],
)
def test_broken_layout_is_refused(tmp_path, feature, values):
    path = write_features(tmp_path / "p.tfrecord", arrays({**GRAPHCORE_PACK, feature: values}))
    with pytest.raises(LayoutError, match=r"p\.tfrecord, record 1: .* must .*Received: "):
        list(read_packed(path))


def test_a_slot_too_many_is_a_label_of_another_sequence(tmp_path):
    moved = arrays({**GRAPHCORE_PACK, schema.GRAPHCORE_NEXT_SENTENCE_LABELS: [0, 1, 0]})
    (sequences,) = read_packed(write_features(tmp_path / "p.tfrecord", moved))
    assert sequences.next_sentence_labels.tolist() == [0, 1]  # a valid pack, which `verify` tells apart


def swap_rows(arrays):
    mask = arrays[schema.GRAPHCORE_INPUT_MASK]
    mask[0] = np.select([mask[0] == 1, mask[0] == 2], [2, 1], mask[0])


DEFECTS = {
    "drop": lambda arrays: arrays.update({name: values[1:] for name, values in arrays.items()}),
    "duplicate": lambda arrays: arrays.update({n: np.concatenate([v, v[:1]]) for n, v in arrays.items()}),
    "token": lambda arrays: np.add.at(arrays[schema.GRAPHCORE_INPUT_IDS], (0, 0), 1),
    "label": lambda arrays: np.add.at(arrays[schema.GRAPHCORE_MASKED_LM_IDS], (0, 0), 1),
    "next sentence": lambda arrays: np.bitwise_xor.at(
        arrays[schema.GRAPHCORE_NEXT_SENTENCE_LABELS], (0, -1), 1
    ),
    "sequence index": swap_rows,
    "position": lambda arrays: np.add.at(arrays[schema.GRAPHCORE_POSITION_IDS], (0, 0), 1),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_planted_defect_is_found(tmp_path, input_file, defect):
    _, path = pack_as("graphcore", input_file, tmp_path / "out")
    found, _ = read_arrays(path, schema.GRAPHCORE_LENGTHS)
    full = np.flatnonzero(
        (found[schema.GRAPHCORE_NEXT_SENTENCE_MASK].sum(axis=1) > 1)
        & (found[schema.GRAPHCORE_MASKED_LM_MASK][:, 0] > 0)
    )
    order = np.concatenate([full, np.setdiff1d(np.arange(len(found[schema.GRAPHCORE_INPUT_IDS])), full)])
    damaged = {name: values[order] for name, values in found.items()}
    assert verify(input_file, write_features(tmp_path / "same.tfrecord", damaged)) == 0
    DEFECTS[defect](damaged)
    assert verify(input_file, write_features(tmp_path / "bad.tfrecord", damaged)) == 1
