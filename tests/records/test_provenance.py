"""Every sequence of a pack can be traced to its input record, and every record to its document."""

import hashlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from unpacked_records import list_packed, list_unpacked, make_features, read_packs, write_features

from bert_packed import schema
from bert_packed.core import storage
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.records import provenance
from bert_packed.records.provenance import find_sources, provenance_path
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen import find_sources as command
from data_gen.find_sources import SourcesConfig, main
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text.create_config import CreateConfig
from data_gen.text.create_job import create

S = 16
TRACED = {"max_seq_length": S, "num_shards": 1, "num_workers": 1, "provenance": True}


def test_every_sequence_of_a_pack_is_found_in_its_source(tmp_path):
    inputs = {}
    for seed, name in enumerate(("a", "b")):
        lengths = np.random.default_rng(seed).integers(2, S + 1, 50)
        features = make_features(lengths, S, seed)
        inputs[write_features(tmp_path / f"{name}.tfrecord", features)] = list_unpacked(features)
    out = tmp_path / "out"
    manifest = pack(PackConfig(f"{tmp_path}/*.tfrecord", output_dir=str(out), **TRACED | {"num_shards": 3}))
    seen = set()
    for entry in manifest["files"]:
        path = str(out / entry["name"])
        found = iter(list_packed(read_packs([path])))
        for number in range(1, entry["num_records"] + 1):
            for source, record in find_sources(path, number):
                assert next(found) == inputs[source][record - 1]
                seen.add((source, record))
        assert next(found, None) is None
        # the index is compact: a few bytes a sequence
        assert Path(provenance_path(path)).stat().st_size < 1000
    assert len(seen) == 100
    with pytest.raises(InputError, match=r"must have the record\. Received: 0 of"):
        find_sources(path, 0)


def test_a_link_keeps_its_own_name(tmp_path, monkeypatch):
    """A cache has files that are links to their content: the index lies beside the link."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snap").mkdir()
    (tmp_path / "blobs/4711").write_bytes(b"records")
    (tmp_path / "snap/train.tfrecord").symlink_to("../blobs/4711")
    (tmp_path / "hub").symlink_to("snap")
    monkeypatch.chdir(tmp_path)
    entry = provenance.describe_path("hub/train.tfrecord", "packs")
    assert entry == {"path": "hub/train.tfrecord", "relative_path": "../snap/train.tfrecord"}
    (tmp_path / "packs").mkdir()
    assert provenance.resolve_path(entry, "packs") == "snap/train.tfrecord"


PACKS = (([2, 1], [0, 1, 0], [7, 300, 9]), ([1, 3], [1, 1, 0, 0], [1, 2, 3, 4]))


def write_packs(path, index_path, batches=PACKS):
    """Two records, and the index of four packs."""

    def serialize(index):
        for columns in batches:
            index.add_packs(*map(np.array, columns))
        yield from (b"four", b"packs")

    return provenance.write_traced(path, index_path, provenance.PACK_COLUMNS, serialize)


@pytest.fixture
def shard(tmp_path):
    """A file of packs with its index, both with two inputs; the manifest beside them lists it."""
    path = tmp_path / "x.tfrecord"
    write_packs(str(path), provenance_path(path))
    write_manifest(path)
    return path


def write_manifest(path):
    """A manifest beside a file that lists it; whatever it holds."""
    entry = {"name": path.name, "num_records": 4, "sha256": storage.file_sha256(path)}
    manifest = {"inputs": [{"path": "a"}, {"path": "b"}], "files": [entry]}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


def test_an_index_is_what_numpy_would_write(shard, tmp_path, monkeypatch):
    with np.load(provenance_path(shard)) as index:
        found = {name: (index[name].dtype, index[name].tolist()) for name in index.files}
    assert found == {
        "pack_offsets": (np.uint8, [0, 2, 3, 4, 7]),
        "file_indices": (np.uint8, [0, 1, 0, 1, 1, 0, 0]),
        "record_numbers": (np.uint16, [7, 300, 9, 1, 2, 3, 4]),
        "shard_sha256": (np.uint8, list(hashlib.sha256(shard.read_bytes()).digest())),
    }
    monkeypatch.setattr(provenance, "VALUES_AT_ONCE", 2)
    one_batch = [np.concatenate(columns) for columns in zip(*PACKS, strict=True)]
    for folder in (tmp_path, "memory://provenance"):
        storage.make_folder(str(folder))
        path = f"{folder}/y.provenance.npz"
        write_packs(f"{folder}/y.tfrecord", path, [one_batch])
        with storage.open_file(path) as file, np.load(io.BytesIO(file.read())) as index:
            assert {name: (index[name].dtype, index[name].tolist()) for name in index.files} == found
    names = ["manifest.json", *(f"{name}.{end}" for name in "xy" for end in ("provenance.npz", "tfrecord"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "y.provenance.npz").read_bytes() == Path(provenance_path(shard)).read_bytes()
    assert find_sources(shard, 4) == [("b", 2), ("a", 3), ("a", 4)]
    assert find_sources(shard, 1) == [("a", 7), ("b", 300)]


def change_index(change):
    """A damage of the bytes of the index."""

    def damage(shard):
        path = Path(provenance_path(shard))
        path.write_bytes(change(path.read_bytes()))

    return damage


def change_manifest(**changes):
    def damage(shard):
        content = json.loads((shard.parent / "manifest.json").read_text())
        (shard.parent / "manifest.json").write_text(json.dumps(content | changes))

    return damage


def copy_index(shard):
    """The index of another shard: of as many packs, so that only the checksum differs."""
    shard.write_bytes(b"more packs")
    write_manifest(shard)


def age_index(shard):
    """Make an index as before there were checksums, and of five packs: only their number tells it apart."""
    with np.load(provenance_path(shard)) as index:
        arrays = {name: index[name] for name in index.files if name != "shard_sha256"}
    np.savez(provenance_path(shard), **{**arrays, "pack_offsets": np.append(arrays["pack_offsets"], 7)})


NO_INDEX = r"x\.provenance\.npz must be an index of --provenance"
NO_MANIFEST = r"must hold the manifest\.json .*Received: "
OTHER_SHARD = r"x\.provenance\.npz must be of .*x\.tfrecord with .* Received: "
FOREIGN = {"inputs": ["a", "b"], "splits": [], "files": {}}


@pytest.mark.parametrize(
    ("damage", "flag", "message"),
    [
        (change_index(lambda content: content[:200]), "", NO_INDEX),
        # the damage is behind a header
        (change_index(lambda content: content[:80] + b"\xff" + content[81:]), "", NO_INDEX),
        (lambda shard: np.savez(provenance_path(shard), other=np.zeros(3)), "", NO_INDEX),
        (lambda shard: (shard.parent / "manifest.json").unlink(), "", NO_MANIFEST + "none that lists it"),
        (change_manifest(**FOREIGN), "", NO_MANIFEST + "none that lists it"),
        (change_manifest(inputs=["a", {"path": 3}]), "", NO_MANIFEST + "0 inputs, .* names number 2"),
        (change_manifest(inputs=[{"path": "a"}]), "", NO_MANIFEST + "1 inputs, .* names number 2"),
        (lambda shard: shard.write_bytes(b"five packs"), "", NO_MANIFEST + "one with another SHA"),
        (copy_index, "", OTHER_SHARD + "that of a file with"),
        (age_index, "", OTHER_SHARD + "one of 6 entries"),
        (None, "--record_number=5", r"x\.tfrecord must have the record\. Received: 5 of 4"),
        (None, "--record_number=0", "`record_number` must be at least 1"),
        (None, "--packed_file=", "`packed_file` must be given"),
        (None, "--packed_file=/nowhere.tfrecord", r"with --provenance\. Received: no /nowhere\.prov"),
    ],
)
def test_mistakes_of_the_command_are_one_line(shard, capsys, damage, flag, message):
    if damage:
        damage(shard)
    argv = ["find_sources.py", f"--packed_file={shard}", *flag.split()]
    assert run(main, SourcesConfig, argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error), error


INSTANCES = "in/train-00000-of-00001.tfrecord"
SHARD = "deep/out/packed-00000-of-00001.tfrecord"
WORDS = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(6))]


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """Packs of instances of two texts, both with an index, by paths from the folder that is returned."""
    monkeypatch.chdir(tmp_path)
    for kept in (command.file_sha256, command.find_line_of):
        kept.cache_clear()  # of the same paths from another folder
    Path("text").mkdir()
    Path("text/words.txt").write_text("\n".join(WORDS))
    Path("text/a.txt").write_text("\n\nw0 w0\nw0\n\n\n\u200b\n\n \nw1 w1\nw1\n")
    lines = [{"text": "w2 w2"}, {"text": ""}, {"text": " \n "}, {"paragraphs": ["w3 w3", "w3"]}]
    Path("text/b.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    create(CreateConfig("text/[ab].*", "in", "text/words.txt", dupe_factor=2, **TRACED))
    pack(PackConfig(input_file="in/train-*", output_dir="deep/out", **TRACED))
    return tmp_path


def rows_of(shard=SHARD):
    """The table of every pack of a shard, and the first word of each sequence."""
    packs = read_packs([shard])
    rows, words = [], []
    for number in range(1, len(packs[schema.INPUT_IDS]) + 1):
        argv = ["f.py", f"--packed_file={shard}", f"--record_number={number}", f"--json={shard}.json"]
        assert run(main, SourcesConfig, argv) == 0
        rows += json.loads(Path(f"{shard}.json").read_text())
    for tokens, _, predictions, _ in list_packed(packs):
        words.append(WORDS[dict([*enumerate(tokens), *predictions])[1]])
    assert len(rows) == len(words) > 4
    return rows, words


def test_a_pack_is_traced_to_file_document_and_line(traced):
    expected = {
        "w0": ("text/a.txt", 1, 3),
        "w1": ("text/a.txt", 3, 10),
        "w2": ("text/b.jsonl", 1, 1),
        "w3": ("text/b.jsonl", 4, 7),
    }
    rows, words = rows_of()
    assert set(words) == set(expected) and {row["input file"] for row in rows} == {INSTANCES}
    for row, word in zip(rows, words, strict=True):
        assert (row["text file"], row["document"], row["line"]) == expected[word]
    with np.load(provenance_path(INSTANCES)) as index:
        assert set(index["duplicates"].tolist()) == {0, 1}
        assert len(index["duplicates"]) == len(index["document_numbers"]) == len(rows)


def test_what_changed_or_is_gone_is_left_out_or_named(traced, capsys):
    Path("text/a.txt").write_text("other")
    Path("text/b.jsonl").unlink()
    rows, _ = rows_of()
    assert {row["line"] for row in rows} == {""} and {row["document"] for row in rows} == {1, 3, 4}
    index = Path(provenance_path(INSTANCES))
    with np.load(index) as content:
        short = {name: content[name][: 32 if name == "shard_sha256" else 1] for name in content.files}
    np.savez(index, **short)
    with pytest.raises(InputError, match="must be of the instances that were packed"):
        provenance.find_documents([(INSTANCES, number) for number in (1, 2)])
    index.unlink()
    Path(INSTANCES).unlink()
    capsys.readouterr()
    rows, _ = rows_of()
    assert {tuple(row) for row in rows} == {("slot", "input file", "record")}
    assert f"{INSTANCES} is not there, so that its documents are not known" in capsys.readouterr().err


def test_instances_that_changed_are_named(traced, capsys):
    """Their records are others: to name one by its number would mislead."""
    path = Path(INSTANCES)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    argv = ["f.py", f"--packed_file={SHARD}", "--json=table.json"]
    assert run(main, SourcesConfig, argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"{INSTANCES} must have the SHA-256 .*, as when it was packed\. Received: ", error)
    assert not Path("table.json").exists()
    path.unlink()  # as without instances, their index is believed
    assert all(provenance.find_documents(find_sources(SHARD, 1), SHARD))


def test_relative_paths_lead_to_documents_from_any_folder(traced, monkeypatch):
    expected, _ = rows_of()
    moved = shutil.copytree(traced, traced.parent / "moved", dirs_exist_ok=True)
    for root in (traced, moved):
        monkeypatch.chdir(root / "text")
        for path in (f"../{SHARD}", f"{root}/{SHARD}"):
            rows, _ = rows_of(path)
            from_here = {"input file": f"{root}/{INSTANCES}"}
            assert rows == [
                row | from_here | {"text file": os.path.basename(row["text file"])} for row in expected
            ]
