"""Patterns become files, or a mistake that names the flag; manifests beside them keep their promise."""

import json
import os
from pathlib import Path

import pytest
from unpacked_records import make_features, write_features

from bert_packed.core.settings import InputError
from bert_packed.records.inputs import (
    check_promises,
    find_files,
    folder_of,
    read_input_manifests,
    read_promises,
    stamp_files,
    unchanged,
)
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import find_overlong

S = 16


@pytest.fixture
def input_file(tmp_path):
    return write_features(tmp_path / "in.tfrecord", make_features([3, 9, 16], S))


def write_manifest(directory, **content):
    Path(directory).mkdir(exist_ok=True)
    (Path(directory) / "manifest.json").write_text(json.dumps(content))


def test_what_manifests_beside_files_promise(tmp_path):
    """Manifests are of packs, of splits, and missing; two vocabularies are one too many."""
    entry = {"name": "in.tfrecord", "num_records": 81, "sha256": "abc"}
    known = {"vocab_size": 300, "objective": "mlm"}
    write_manifest(tmp_path / "a", files=[entry], **known)
    write_manifest(tmp_path / "b", splits={"train": {"files": [entry]}}, **known)
    write_manifest(tmp_path / "c", files=[{**entry, "name": "other"}], **{**known, "vocab_size": 400})
    a, b, c, d = (f"{tmp_path}/{name}/in.tfrecord" for name in "abcd")
    promise = {"num_records": 81, "sha256": "abc"}
    assert read_input_manifests([a, b, d]) == (known, {a: promise, b: promise})
    with pytest.raises(InputError, match=r"one vocabulary and objective\. Received: .*300.*400"):
        read_input_manifests([a, c])


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
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    vocabulary, promised = read_input_manifests([input_file])
    assert vocabulary == {} and promised.get(input_file, {}) == {}
    assert find_overlong([input_file]) == "error"


ENTRY = {"name": "in.tfrecord", "num_records": 80, "sha256": "x"}
INSTANCES = {"kind": "unpacked", "settings": {}, "versions": {}, "vocab_size": 300}
INSTANCES["splits"] = {"train": {"files": [ENTRY]}}
OF_PACKS = {"kind": "packed", "settings": {}, "versions": {}, "spec": {}, "files": [ENTRY]}


def of_train(*entries):
    return {"splits": {"train": {"files": list(entries)}}}


@pytest.mark.parametrize(
    ("whole", "change", "received"),
    [
        (INSTANCES, {"splits": []}, r"'list' object has no attribute 'values'"),
        (INSTANCES, {"splits": {"train": 3}}, "'int' object is not subscriptable"),
        (INSTANCES, {"splits": {"train": {"file": []}}}, "no 'files'"),
        (INSTANCES, of_train("in.tfrecord"), "string indices must be integers"),
        (INSTANCES, of_train({"name": "in.tfrecord", "num_records": 80}), "no 'sha256'"),
        (INSTANCES, of_train({**ENTRY, "num_records": "80"}), "num_records='80'"),
        (INSTANCES, of_train({**ENTRY, "name": 3}), "name=3"),
        (INSTANCES, {"vocab_size": "300"}, "vocab_size='300'"),
        (INSTANCES, {"do_lower_case": None}, "do_lower_case=None"),
        (INSTANCES, {"splits": {}}, "no split"),
        (INSTANCES, {"kind": "unpakced"}, "kind='unpakced'"),
        (INSTANCES, {"kind": ["unpacked"]}, r"kind=\['unpacked'\]"),
        (OF_PACKS, {"files": 3}, "'int' object is not iterable"),
        (OF_PACKS, {"files": [{"name": "in.tfrecord", "sha256": "x"}]}, "no 'num_records'"),
        (OF_PACKS, {"files": [{**ENTRY, "sha256": 5}]}, "sha256=5"),
        (OF_PACKS, {"kind": None}, "kind=None"),
    ],
)
def test_a_manifest_of_ours_with_a_broken_form_is_named(tmp_path, input_file, whole, change, received):
    """It was taken for another program's, which promises nothing."""
    write_manifest(tmp_path, **whole)
    assert read_promises([input_file]) == {input_file: {"num_records": 80, "sha256": "x"}}
    write_manifest(tmp_path, **{**whole, **change})
    command = "create_" if whole is INSTANCES else "pack_tf"
    with pytest.raises(InputError, match=rf"json: what {command}.* in its form\. Received: {received}"):
        read_promises([input_file])


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b'{"files": ' * 50_000, b"1" * 5000, b"\xff{}"])
def test_a_manifest_that_is_no_json_is_a_mistake(tmp_path, input_file, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=r"manifest\.json must be (JSON|UTF-8)"):
        pack(PackConfig(input_file, output_dir=str(tmp_path / "out"), max_seq_length=S))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["time", "size", "other file"])
def test_what_changes_while_it_is_read_is_named(tmp_path, change):
    path = tmp_path / "a.txt"
    path.write_text("content")
    stamps = stamp_files([str(path)])
    with unchanged(stamps):
        path.read_text()
    with pytest.raises(InputError, match=r"a\.txt must stay as it is while it is read"), unchanged(stamps):
        if change == "time":
            os.utime(path, ns=(0, stamps[0][2] + 1))
        elif change == "size":
            path.write_text("more content")
            os.utime(path, ns=(0, stamps[0][2]))
        else:
            (tmp_path / "b.txt").write_text("CONTENT")
            os.utime(tmp_path / "b.txt", ns=(0, stamps[0][2]))
            (tmp_path / "b.txt").replace(path)


def test_the_folder_of_a_file_holds_its_manifest():
    paths = ("a", "b/a", "/a", "memory://a", "gs://bucket/a", "gs://bucket/b/a")
    assert [folder_of(path) for path in paths] == [".", "b", "/", "memory://", "gs://bucket", "gs://bucket/b"]


@pytest.mark.parametrize(
    ("promised", "message"),
    [
        ({"num_records": 4, "sha256": "abc"}, r"x must hold 4 records, .* Received: 3\."),
        ({"num_records": 2}, r"x must hold 2 records, .* Received: 3\."),
        ({"num_records": 3, "sha256": "abd"}, r"x must have the SHA-256 abd, .* Received: abc\."),
    ],
)
def test_a_broken_promise_is_named(promised, message):
    for kept in ({}, {"num_records": 3}, {"num_records": 3, "sha256": "abc"}):
        check_promises(kept, "x", 3, "abc")
    with pytest.raises(InputError, match=message):
        check_promises(promised, "x", 3, "abc")


@pytest.mark.parametrize(
    ("made", "patterns", "expected"),
    [
        ("b.txt a.txt c[1].txt other d.txt/", ["*.txt", "a.txt", "c[1].txt"], "a.txt b.txt c[1].txt"),
        # An index of ours is no input, unless it is named: the mistake shows when it is read
        ("a.tfrecord a.provenance.npz", ["a*"], "a.tfrecord"),
        ("a.tfrecord a.provenance.npz", ["a.provenance.npz"], "a.provenance.npz"),
        ("a", ["a", "./a", "../{folder}/a"], "a"),
        # A comma may be in a name, and a name may be that of another part
        ("a b a,b", ["a,b"], "a,b"),
        ("a b a,b", ["a", "b"], "a b"),
        ("a c,_d e,1 e,2 f,g/h", ["a", "c,_d", "e,*", "f,g/*"], "a c,_d e,1 e,2 f,g/h"),
    ],
)
def test_patterns_become_files(tmp_path, made, patterns, expected):
    make(tmp_path, made)
    given = ",".join(f"{tmp_path}/{pattern}".format(folder=tmp_path.name) for pattern in patterns)
    found = [os.path.relpath(path, tmp_path) for path in find_files(given, "input_file")]
    assert found == expected.split()


def make(folder, names):
    """Files of one character, and folders where a name ends in a slash."""
    for name in names.split():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text("x")


def lose(name):
    """A link that leads nowhere: a lost mount would take its part of the corpus with it, in silence."""
    return lambda folder: (folder / name).symlink_to("/nowhere")


@pytest.mark.parametrize(
    ("prepare", "pattern", "message"),
    [
        (None, "none-*", r"match at least one file\. Received: '.*/none-\*'"),
        (None, "a.txt,~/none", r"match at least one file\. Received: '.*/none'"),
        (None, "*.npz", "must match at least one file"),
        (lambda folder: (folder / "c.txt").touch(), "*.txt", r"c\.txt, which is empty"),
        (lambda folder: make(folder, os.fsdecode(b"\xe9.txt")), "*.txt", r"names in UTF-8\. .*udce9\.txt"),
        (lambda folder: os.symlink(folder / "a.txt", folder / "c.txt"), "*.txt", r"name each file once\."),
        (lambda folder: os.link(folder / "a.txt", folder / "c.txt"), "*.txt", r"name each file once\."),
        (lambda folder: (folder / "d").symlink_to(folder), "a.txt,~/d/a.txt", r"a\.txt and .*d/a\.txt, wh"),
        (lose("c.txt"), "*.txt", "lead to a file.* /nowhere"),
        (lose("c.txt"), "c.txt", "lead to a file.* /nowhere"),
        (lose("lost"), "*/a.txt", "lead to a file.* /nowhere"),
        (lose("e/d"), "*/d/*.txt", "lead to a file.* /nowhere"),
    ],
)
def test_what_is_no_input_is_named(tmp_path, prepare, pattern, message):
    make(tmp_path, "a.txt b.txt x.npz/ x.provenance.npz e/")
    if prepare:
        prepare(tmp_path)
    with pytest.raises(InputError, match=message):
        find_files(f"{tmp_path}/{pattern}".replace("~", str(tmp_path)), "input_file")
