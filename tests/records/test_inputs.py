"""Patterns become files, or a mistake that names the flag; manifests beside them keep their promise."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from bert_packed import schema
from bert_packed.core import storage
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
from data_gen import pack_job
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import compare_files, find_overlong

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


def test_what_manifests_beside_files_promise(tmp_path):
    """Those of packs, of splits, and none; two vocabularies are one too many."""
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


@pytest.mark.parametrize(
    ("change", "received"),
    [
        ({"splits": []}, r"'list' object has no attribute 'values'"),
        ({"splits": {"train": 3}}, "'int' object is not subscriptable"),
        ({"splits": {"train": {"file": []}}}, "no 'files'"),
        ({"splits": {"train": {"files": ["in.tfrecord"]}}}, "string indices must be integers"),
        ({"splits": {"train": {"files": [{"name": "in.tfrecord", "num_records": 80}]}}}, "no 'sha256'"),
        ({"splits": {"train": {"files": [{**ENTRY, "num_records": "80"}]}}}, "num_records='80'"),
        ({"splits": {"train": {"files": [{**ENTRY, "name": 3}]}}}, "name=3"),
        ({"vocab_size": "300"}, "vocab_size='300'"),
        ({"do_lower_case": None}, "do_lower_case=None"),
        ({"splits": {}}, "no split"),
        ({"kind": "unpakced"}, "kind='unpakced'"),
        ({"kind": ["unpacked"]}, r"kind=\['unpacked'\]"),
    ],
)
def test_a_manifest_of_instances_that_is_broken_in_form_is_a_mistake(tmp_path, input_file, change, received):
    """It was taken for another program's, which promises nothing."""
    whole = {"kind": "unpacked", "settings": {}, "versions": {}, "vocab_size": 300}
    whole["splits"] = {"train": {"files": [ENTRY]}}
    write_manifest(tmp_path, **whole)
    assert read_input_manifests([input_file])[1][input_file] == {"num_records": 80, "sha256": "x"}
    write_manifest(tmp_path, **{**whole, **change})
    with pytest.raises(
        InputError, match=rf"manifest\.json: what create_.* in its form\. Received: {received}"
    ):
        pack(config(input_file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "received"),
    [
        ({"files": 3}, "'int' object is not iterable"),
        ({"files": [{"name": "in.tfrecord", "sha256": "x"}]}, "no 'num_records'"),
        ({"files": [{**ENTRY, "sha256": 5}]}, "sha256=5"),
        ({"kind": None}, "kind=None"),
    ],
)
def test_a_manifest_of_packs_that_is_broken_in_form_is_a_mistake(tmp_path, input_file, change, received):
    whole = {"kind": "packed", "settings": {}, "versions": {}, "spec": {}, "files": [ENTRY]}
    write_manifest(tmp_path, **whole)
    assert read_promises([input_file]) == {input_file: {"num_records": 80, "sha256": "x"}}
    write_manifest(tmp_path, **{**whole, **change})
    message = rf"manifest\.json: what pack_tf.* in its form\. Received: {received}"
    with pytest.raises(InputError, match=message):
        read_promises([input_file])


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b'{"files": ' * 50_000, b"1" * 5000, b"\xff{}"])
def test_a_manifest_that_is_no_json_is_a_mistake(tmp_path, input_file, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=r"manifest\.json must be (JSON|UTF-8)"):
        pack(config(input_file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_of_an_input_that_changed_starts_over(tmp_path, features, input_file, monkeypatch):
    """Its size is the same: only the time of the change differs."""

    def fail(work):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(pack_job, "write_shard", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            pack(config(input_file, tmp_path / "out", num_workers=1))
    before = os.stat(input_file)
    features[schema.NEXT_SENTENCE_LABELS] = 1 - features[schema.NEXT_SENTENCE_LABELS]
    write_features(input_file, features)
    os.utime(input_file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert os.stat(input_file).st_size == before.st_size and os.listdir(tmp_path / "out")
    pack(config(input_file, tmp_path / "out", num_workers=1))
    packed = sorted(str(path) for path in (tmp_path / "out").glob("*.tfrecord"))
    assert compare_files([input_file], packed, "error").is_good


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


def test_a_mistake_that_a_change_has_caused_is_told_as_the_change(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("content")
    with pytest.raises(InputError, match=r"^half of it$"), unchanged(stamp_files([str(path)])):
        raise InputError("half of it")
    with pytest.raises(InputError, match="must stay as it is"), unchanged(stamp_files([str(path)])):
        path.write_text("half")
        raise InputError("half of it")
    stamps = stamp_files([str(path)])
    path.write_text("other")
    with pytest.raises(InputError, match="must stay as it is"), unchanged(stamps):
        pytest.fail("what is no longer the file must not be read")


def test_the_folder_of_a_file_holds_its_manifest():
    paths = ("a", "b/a", "/a", "ram://a", "gs://bucket/a", "gs://bucket/b/a")
    assert [folder_of(path) for path in paths] == [".", "b", "/", "ram://", "gs://bucket", "gs://bucket/b"]


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


def test_a_path_spelled_twice_is_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    for pattern in (
        "a.txt,./a.txt",
        f"{tmp_path}/*.txt,a.txt",
        "a.txt,*.txt,a.txt",
        f"../{tmp_path.name}/a.txt,a.txt",
    ):
        (path,) = find_files(pattern, "input_file")
        assert Path(path).samefile("a.txt")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_under_two_names_is_refused(tmp_path, link):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").write_text("x")  # equal content is another file
    assert len(find_files(f"{tmp_path}/*.txt", "input_file")) == 2
    link(tmp_path / "a.txt", tmp_path / "c.txt")
    with pytest.raises(
        InputError, match=r"`input_file` must name each file once\. .*a\.txt and .*c\.txt, which"
    ):
        find_files(f"{tmp_path}/*.txt", "input_file")
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"a\.txt and .*folder/a\.txt, which are one"):
        find_files(f"{tmp_path}/a.txt,{tmp_path}/folder/a.txt", "input_file")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("*.txt", "b.txt"), ("b.txt", "b.txt"), ("*/a.txt", "lost"), ("*/d/*.txt", "folder/d"), ("**", "lost")],
)
def test_a_link_that_leads_nowhere_is_named(tmp_path, pattern, name):
    """A lost mount would take its part of the corpus with it, in silence."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "a.txt", tmp_path / "folder/a.txt"):
        path.write_text("x")
    link = tmp_path / name
    link.symlink_to("/nowhere")
    for given in (f"{tmp_path}/{pattern}", f"{tmp_path}/a.txt,{tmp_path}/{pattern}"):
        with pytest.raises(InputError, match=rf"{link} must lead to a file\. Received: a link to /nowhere"):
            find_files(given, "input_file")
    link.unlink()
    link.symlink_to(tmp_path / "folder")
    assert find_files(f"{tmp_path}/*.txt", "input_file") == [f"{tmp_path}/a.txt"]


def test_an_object_under_two_spellings_is_refused(monkeypatch):
    storage.write_text("ram://twice/a.txt", "x")
    assert find_files("ram://twice/*.txt,ram://twice/a.txt", "input_file") == ["ram://twice/a.txt"]
    monkeypatch.setattr(storage, "is_file", lambda path: "," not in path)  # as hdfs:// would say
    with pytest.raises(InputError, match=r"ram://twice/\./a\.txt and ram://twice/a\.txt, which"):
        find_files("ram://twice/./a.txt,ram://twice/a.txt", "input_file")


def test_commas_in_names(tmp_path):
    names = ["a", "b", "a,b", "c, d.txt", "e,1.txt", "e,2.txt"]
    (tmp_path / "f,g").mkdir()
    for name in (*names, "f,g/h"):
        (tmp_path / name).write_text("x")

    def find(*patterns):
        found = find_files(",".join(f"{tmp_path}/{pattern}" for pattern in patterns), "input_file")
        return [path.removeprefix(f"{tmp_path}/") for path in found]

    assert find("a,b") == ["a,b"]  # the whole is a name
    assert find("a", "b") == ["a", "b"]  # each with its folder: no file has that name
    assert find("c, d.txt") == ["c, d.txt"]
    assert find("a", "c, d.txt", "e,*", "f,g/*", "b") == ["a", "b", "c, d.txt", "e,1.txt", "e,2.txt", "f,g/h"]
    for none in ("none", "none-*"):
        with pytest.raises(InputError, match=rf"match at least one file\. Received: '.*/{re.escape(none)}'"):
            find("a", none, "c, d.txt")


def test_names_that_are_not_utf8_are_refused(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(name).write_text("x")
    with pytest.raises(InputError, match=r"`input_file` must match names in UTF-8\. .*caf\\udce9\.txt"):
        find_files(f"{tmp_path}/*.txt", "input_file")


def test_empty_files_are_refused(tmp_path):
    (tmp_path / "b.txt").touch()
    with pytest.raises(InputError, match=r"b\.txt, which is empty"):
        find_files(f"{tmp_path}/*", "input_file")
