"""Patterns become files, or a mistake that names the flag; manifests beside them keep their promise."""

import json
from pathlib import Path

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from data_gen.assembly.pack_config import PackConfig
from data_gen.assembly.pack_job import pack
from data_gen.checks.verification import find_overlong
from data_gen.cli.settings import InputError
from data_gen.records.inputs import find_files

S = 16
LENGTHS = np.random.default_rng(3).integers(2, S + 1, 80)


@pytest.fixture
def features():
    return make_features(LENGTHS, S)


@pytest.fixture
def input_file(tmp_path, features):
    return write_features(tmp_path / "in.tfrecord", features)


def config(input_file, output_dir, **changes):
    return PackConfig(
        **{"input_file": input_file, "output_dir": str(output_dir), "max_seq_length": S, **changes}
    )


def write_manifest(directory, **content):
    Path(directory).mkdir(exist_ok=True)
    (Path(directory) / "manifest.json").write_text(json.dumps(content))


def test_vocabulary_is_inherited_and_checked(tmp_path, input_file):
    write_manifest(tmp_path, vocab_size=300, do_lower_case=True)
    manifest = pack(config(input_file, tmp_path / "out"))
    assert (manifest["vocab_size"], manifest["do_lower_case"]) == (300, True)
    write_manifest(tmp_path, vocab_size=250)
    with pytest.raises(
        InputError, match=r"in\.tfrecord, record \d+: .*vocab_size=250 .*Received: 2[5-9]\d\."
    ):
        pack(config(input_file, tmp_path / "out2"))


def test_two_vocabularies_are_refused(tmp_path, features):
    for name, size in (("a", 300), ("b", 400)):
        write_manifest(tmp_path / name, vocab_size=size)
        write_features(tmp_path / name / "in.tfrecord", features)
    with pytest.raises(InputError, match=r"one vocabulary\. Received: .*300.*400"):
        pack(config(f"{tmp_path}/*/in.tfrecord", tmp_path / "out"))


def test_file_that_lost_whole_records_is_noticed(tmp_path, input_file):
    entry = {"name": "in.tfrecord", "num_records": 81, "sha256": ""}
    write_manifest(tmp_path, splits={"train": {"files": [entry]}})
    with pytest.raises(InputError, match=r"in\.tfrecord must hold 81 records.*Received: 80"):
        pack(config(input_file, tmp_path / "out"))


@pytest.mark.parametrize(
    "content",
    [
        [1],
        {"files": 12},
        {"files": ["a", {"name": 3, "sha256": "x"}, {"name": "in.tfrecord", "num_records": "3"}]},
        {"splits": ["train"]},
        {"splits": {"train": [1]}},
        {"vocab_size": "many", "settings": 5},
    ],
)
def test_another_programs_manifest_promises_nothing(tmp_path, input_file, content):
    text = json.dumps(content)
    (tmp_path / "manifest.json").write_text(text)
    manifest = pack(config(input_file, tmp_path / "out"))
    assert manifest["num_sequences"] == 80 and "vocab_size" not in manifest
    (tmp_path / "out" / "manifest.json").write_text(text)
    packed = [str(path) for path in (tmp_path / "out").glob("*.tfrecord")]
    assert find_overlong(packed) == "error"


def test_broken_manifest_beside_the_input(tmp_path, input_file):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest\.json must be JSON"):
        pack(config(input_file, tmp_path / "out"))


def test_find_files_sorts_and_joins_patterns(tmp_path):
    for name in ("b.txt", "a.txt", "c[1].txt", "other"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    pattern = f"{tmp_path}/*.txt, {tmp_path}/a.txt,{tmp_path}/c[1].txt"
    assert [path.rsplit("/", 1)[1] for path in find_files(pattern, "input_file")] == [
        "a.txt",
        "b.txt",
        "c[1].txt",
    ]


def test_a_glob_leaves_our_own_indexes_out(tmp_path):
    for name in ("train-0.tfrecord", "train-0.provenance.npz", "train-1"):
        (tmp_path / name).write_text("x")
    found = find_files(f"{tmp_path}/train-*", "input_file")
    assert found == [f"{tmp_path}/train-0.tfrecord", f"{tmp_path}/train-1"]
    index = f"{tmp_path}/train-0.provenance.npz"
    assert find_files(index, "input_file") == [index]  # the mistake of who names it shows when it is read
    with pytest.raises(InputError, match="must match at least one file"):
        find_files(f"{tmp_path}/*.npz", "input_file")


def test_find_files_refuses_nothing_and_empty_files(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        InputError, match=r"`input_file` must match at least one file\. Received: '.*none-\*'"
    ):
        find_files(f"{tmp_path}/a.txt,{tmp_path}/none-*", "input_file")
    (tmp_path / "b.txt").touch()
    with pytest.raises(InputError, match=r"b\.txt, which is empty"):
        find_files(f"{tmp_path}/*", "input_file")
