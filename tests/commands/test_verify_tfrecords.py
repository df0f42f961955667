"""Verification accepts packs that hold their inputs, and finds every kind of planted defect."""

import json
from pathlib import Path

import numpy as np
import pytest
from recorded_calls import assert_refused, run
from unpacked_records import load, make_features, write_features

from bert_packed import schema
from bert_packed.assembly.assignment import assign_sequences
from bert_packed.assembly.record_kinds import assemble_packs
from bert_packed.core.settings import InputError
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import count_lengths
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import find_overlong
from data_gen.verify_tfrecords import VerifyConfig, main

S = 16
LENGTHS = np.random.default_rng(5).integers(3, S // 2, 40)


@pytest.fixture
def input_file(tmp_path):
    features = make_features(LENGTHS, S)
    # every sequence has a prediction at position 1, so that each defect below has one to hit
    features[schema.MASKED_LM_POSITIONS][:] = [1, 0, 0, 0]
    features[schema.MASKED_LM_IDS][:] = [9, 0, 0, 0]
    features[schema.MASKED_LM_WEIGHTS][:] = [1, 0, 0, 0]
    return write_features(tmp_path / "in.tfrecord", features)


@pytest.fixture
def packed(input_file):
    """Arrays of correct packs, which a test may damage before it writes them."""
    sequences = load(input_file)
    plan = pack_lpfhp(count_lengths(LENGTHS, S), S, 3)
    packs = assign_sequences(plan, sequences["lengths"], seed=0)
    spec = schema.PackSpec(S, 3, int(packs.totals(sequences["num_predictions"]).max()))
    arrays = assemble_packs(sequences, packs, spec)
    assert np.mean(arrays[schema.INPUT_MASK].max(axis=1) > 1) > 0.8
    return arrays


def verify(**flags):
    return run(main, VerifyConfig, **flags)


def compare(tmp_path, input_file, arrays):
    path = write_features(tmp_path / "packs.tfrecord", arrays)
    return verify(input_file=input_file, packed_file=path, json=tmp_path / "table.json")


def test_correct_packs_are_equal_in_any_order(tmp_path, input_file, packed):
    seen = compare(tmp_path, input_file, {name: values[::-1] for name, values in packed.items()})
    assert seen.status == 0 and seen.out.splitlines()[-1].split() == ["equal", "40", "40", "0", "0"]
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert list(row.values()) == ["equal", 40, 40, 0, 0]


def test_dropped_and_duplicated_packs(tmp_path, input_file, packed):
    held = int(packed[schema.INPUT_MASK][0].max())
    seen = compare(tmp_path, input_file, {name: values[1:] for name, values in packed.items()})
    assert seen.status == 1 and seen.out.count("in the inputs, not in the packs: ") == held > 1
    assert "in.tfrecord, record " in seen.out and "in the packs, not" not in seen.out
    twice = {name: np.concatenate([values, values[-1:]]) for name, values in packed.items()}
    seen = compare(tmp_path, input_file, twice)
    assert seen.status == 1 and "not in the packs" not in seen.out
    assert f"packs.tfrecord, record {len(twice[schema.INPUT_IDS])} " in seen.out


def put(name, place, value):
    """Damage: another value in the third pack, or what a function makes of the one there."""

    def damage(packed):
        row = packed[name][2]
        row[place] = value(row[place]) if callable(value) else value

    return damage


def change(name, place=0):
    return put(name, place, lambda value: value ^ 1)  # for labels, 0 and 1 become each other


def drop_last_prediction(packed):
    last = np.count_nonzero(packed[schema.MASKED_LM_WEIGHTS][2]) - 1
    for name in (schema.MASKED_LM_POSITIONS, schema.MASKED_LM_IDS, schema.MASKED_LM_WEIGHTS):
        packed[name][2, last] = 0


def swap_tokens(packed):
    second = int(np.argmax(packed[schema.INPUT_MASK][2] == 2))
    tokens = packed[schema.INPUT_IDS][2]
    tokens[[0, second]] = tokens[[second, 0]]


# A damage has the number of sequences that are missing; None where the pack itself is malformed, of whose
# rules `tests/records/test_read_bert.py` has the others
DAMAGES = {
    "token": (change(schema.INPUT_IDS), 1),
    "segment": (change(schema.SEGMENT_IDS), 1),
    "label": (change(schema.MASKED_LM_IDS), 1),
    "position of a label": (change(schema.MASKED_LM_POSITIONS), 1),
    "next sentence": (change(schema.NEXT_SENTENCE_LABELS, 1), 1),
    "prediction dropped": (drop_last_prediction, 1),
    "tokens swapped": (swap_tokens, 2),
    "slot forgotten": (put(schema.NEXT_SENTENCE_WEIGHTS, 1, 0), None),
}


@pytest.mark.parametrize(("damage", "num_missing"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_pack_is_found(tmp_path, input_file, packed, damage, num_missing):
    damage(packed)
    seen = compare(tmp_path, input_file, packed)
    assert seen.status == 1
    if num_missing is None:
        assert "malformed packs" in seen.out and "packs.tfrecord, record 3: " in seen.out
    else:
        assert seen.out.count("in the inputs, not in the packs: ") == num_missing
        unexpected = f"in the packs, not in the inputs: {tmp_path}/packs.tfrecord, record 3 "
        assert seen.out.count(unexpected) == num_missing


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_overlong_treatment_is_read_from_the_manifest(tmp_path, input_file, overlong):
    out = tmp_path / "out"
    config = PackConfig(input_file=input_file, output_dir=str(out), max_seq_length=6, overlong=overlong)
    assert sum(pack(config)["num_overlong"].values()) > 0
    flags = {"input_file": input_file, "packed_file": f"{out}/*.tfrecord"}
    assert verify(**flags).status == 0
    assert verify(**flags, overlong=overlong).status == 0
    assert verify(**flags, overlong="error").status == 1


def test_packs_of_two_treatments_are_refused(tmp_path):
    for name, settings in {"a": {"overlong": "drop"}, "b": {"overlong": "error"}, "c": 7}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"settings": settings}))
    a, b, c, d = (f"{tmp_path}/{name}/x" for name in "abcd")
    assert [find_overlong(paths) for paths in ([a, a], [b, c, d])] == ["drop", "error"]
    with pytest.raises(InputError, match=r"must be made with one --overlong\. Received: .*drop.*error"):
        find_overlong([a, b])


def test_a_mistake_is_one_line(tmp_path, input_file, packed):
    path = Path(write_features(tmp_path / "packs.tfrecord", packed))
    path.write_bytes(path.read_bytes()[:-3])
    for packed_file, message in (
        ("", "`packed_file` must be given"),
        (input_file, "holds unpacked records"),
        ("nowhere", "`packed_file` must match at least one file"),
        (path, f"record {len(packed[schema.INPUT_IDS])}: the record is truncated"),
    ):
        assert_refused(main, VerifyConfig, message, input_file=input_file, packed_file=packed_file)
