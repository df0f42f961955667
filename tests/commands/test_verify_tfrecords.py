"""The command says by table, first differences and exit status whether packs hold their inputs."""

import json

import numpy as np
import pytest
from causal_files import read_examples, write_sequences
from recorded_calls import assert_refused, run
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import find_overlong
from data_gen.verify_tfrecords import VerifyConfig, main

S = 16
LENGTHS = np.random.default_rng(5).integers(3, S // 2, 40)


@pytest.fixture
def input_file(tmp_path):
    return write_features(tmp_path / "in.tfrecord", make_features(LENGTHS, S))


@pytest.fixture
def packs(tmp_path, input_file):
    """Correct packs as dicts of lists, which a test may damage before it writes them."""
    pack(PackConfig(input_file, f"{tmp_path}/packed", max_seq_length=S, num_workers=1))
    return read_examples((tmp_path / "packed").glob("*.tfrecord"))


def verify(**flags):
    return run(main, VerifyConfig, **flags)


def forget_a_slot(packs):
    packs[2][schema.NEXT_SENTENCE_WEIGHTS][1] = 0


@pytest.mark.parametrize(
    ("change", "table", "sentence"),
    [
        (lambda packs: packs.reverse(), "equal 40 40 0 0", ""),
        (lambda packs: packs.pop(0), "different 40 {rest} {held} 0", "in the inputs, not in the packs: {in}"),
        (
            lambda packs: packs.append(packs[0]),
            "different 40 {more} 0 {held}",
            "in the packs, not in the inputs: {out}, record {last} (",
        ),
        (forget_a_slot, "malformed packs 40 0 0 0", "{out}, record 3: next_sentence_weights must be"),
    ],
    ids=["another order", "lost", "twice", "malformed"],
)
def test_the_table_and_the_first_differences(tmp_path, input_file, packs, change, table, sentence):
    held, out = max(packs[0][schema.INPUT_MASK]), tmp_path / "packs.tfrecord"
    words = {"held": held, "rest": 40 - held, "more": 40 + held, "last": len(packs) + 1}
    words |= {"in": input_file, "out": out}
    change(packs)
    write_sequences(out, packs)
    seen = verify(input_file=input_file, packed_file=out, json=tmp_path / "table.json")
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert " ".join(map(str, row.values())) == table.format(**words)
    _, _, printed, *sentences = seen.out.splitlines()
    assert printed.split() == table.format(**words).split()
    assert seen.status == (1 if sentence else 0)
    assert len(sentences) == (held if "different" in table else bool(sentence))
    assert all(sentence.format(**words) in each for each in sentences) and held > 1


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


def test_a_mistake_is_one_line(tmp_path, input_file, packs):
    path = tmp_path / "packs.tfrecord"
    write_sequences(path, packs)
    path.write_bytes(path.read_bytes()[:-3])
    for packed_file, message in (
        ("", "`packed_file` must be given"),
        (input_file, "holds unpacked records"),
        ("nowhere", "`packed_file` must match at least one file"),
        (path, f"record {len(packs)}: the record is truncated"),
    ):
        assert_refused(main, VerifyConfig, message, input_file=input_file, packed_file=packed_file)
