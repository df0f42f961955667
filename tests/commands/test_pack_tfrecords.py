"""Packing writes every sequence once, says what it did, and leaves nothing half-done behind."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from crash import all_bytes
from recorded_calls import assert_refused, run
from unpacked_records import list_packed, list_unpacked, make_features, read_packs, write_features

from bert_packed import schema
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.provenance import read_manifest
from data_gen import sample_data
from data_gen.jobs.output import open_output_dir
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.pack_tfrecords import main
from data_gen.verification import compare_files

S = 16
LENGTHS = np.random.default_rng(3).integers(2, S + 1, 80)


@pytest.fixture(scope="module")
def features():
    return make_features(LENGTHS, S)


@pytest.fixture
def input_file(tmp_path, features):
    return write_features(tmp_path / "in.tfrecord", features)


def config(input_file, output_dir, **changes):
    return PackConfig(
        **{"input_file": input_file, "output_dir": str(output_dir), "max_seq_length": S, **changes}
    )


def packs_in(directory):
    """All packs of a directory as one dict of arrays."""
    return read_packs(sorted(str(path) for path in Path(directory).glob("*.tfrecord")))


@pytest.mark.parametrize(("depth", "num_packs"), [(1, 80), (2, 45), ("max", 45)])
def test_every_sequence_is_packed_once_as_the_manifest_says(tmp_path, features, input_file, depth, num_packs):
    out = tmp_path / "out"
    manifest = pack(config(input_file, out, num_shards=4, max_sequences_per_pack=depth))
    assert manifest == read_manifest(out)
    packs = packs_in(out)
    assert Counter(list_packed(packs)) == Counter(list_unpacked(features))
    assert packs[schema.INPUT_MASK].max() == manifest["depth"] <= (80 if depth == "max" else depth)
    assert [entry["name"] for entry in manifest["files"]] == [
        f"packed-0000{i}-of-00004.tfrecord" for i in range(4)
    ]
    # `tests/data_gen/test_manifest_claims.py` shows that no number of the manifest is false then
    files = sorted(str(path) for path in out.glob("*.tfrecord"))
    assert compare_files([input_file], files, "error").is_good
    assert manifest["inputs"][0]["path"] == input_file and manifest["num_sequences"] == 80
    assert -(-LENGTHS.sum() // S) <= manifest["lower_bound"] <= manifest["num_packs"]
    used = np.count_nonzero(packs[schema.MASKED_LM_WEIGHTS], axis=1)
    assert manifest["spec"] == {
        "max_seq_length": S,
        "max_sequences_per_pack": manifest["depth"] if depth == "max" else depth,
        "max_predictions_per_pack": used.max(),
    }
    assert manifest["num_packs"] == num_packs  # pinned


def test_slots_and_predictions_may_be_raised_and_not_lowered(tmp_path, input_file):
    needed = pack(config(input_file, tmp_path / "a"))["spec"]["max_predictions_per_pack"]
    more = {"max_sequences_per_pack": 7, "max_predictions_per_pack": needed + 30}
    assert pack(config(input_file, tmp_path / "b", **more))["spec"] == {"max_seq_length": S, **more}
    assert packs_in(tmp_path / "b")[schema.NEXT_SENTENCE_LABELS].shape[1] == 7
    with pytest.raises(InputError, match=rf"at least {needed}, .*Received: {needed - 1}"):
        pack(config(input_file, tmp_path / "c", max_predictions_per_pack=needed - 1))


def test_few_packs_and_no_predictions(tmp_path):
    features = make_features([S, S, S], S)
    for name in (schema.MASKED_LM_WEIGHTS, schema.MASKED_LM_IDS, schema.MASKED_LM_POSITIONS):
        features[name][:] = 0
    input_file = write_features(tmp_path / "in.tfrecord", features)
    manifest = pack(config(input_file, tmp_path / "out", num_shards=8))
    assert [entry["num_records"] for entry in manifest["files"]] == [1, 1, 1]
    assert packs_in(tmp_path / "out")[schema.MASKED_LM_WEIGHTS].tolist() == [[0]] * 3


def test_overlong_sequences(tmp_path, input_file):
    num_overlong = int(np.count_nonzero(LENGTHS > 10))
    with pytest.raises(InputError, match=r"in\.tfrecord, record \d+: .*at most max_seq_length=10 "):
        pack(config(input_file, tmp_path / "a", max_seq_length=10))
    assert not (tmp_path / "a").exists()
    dropped = pack(config(input_file, tmp_path / "b", max_seq_length=10, overlong="drop"))
    assert dropped["num_overlong"] == {"truncated": 0, "dropped": num_overlong}
    assert dropped["num_sequences"] == 80 - num_overlong
    truncated = pack(config(input_file, tmp_path / "c", max_seq_length=10, overlong="truncate"))
    assert truncated["num_overlong"] == {"truncated": num_overlong, "dropped": 0}
    assert truncated["num_sequences"] == 80
    with pytest.raises(InputError, match="leave a sequence to pack"):
        long_only = write_features(tmp_path / "long.tfrecord", make_features([12, 13], S))
        pack(config(long_only, tmp_path / "d", max_seq_length=10, overlong="drop"))


def test_a_directory_in_use_is_overwritten_on_request(tmp_path, input_file):
    out = tmp_path / "out"
    manifest = pack(config(input_file, out, num_shards=5))
    before = storage.list_names(out)
    with pytest.raises(InputError, match=r"must be empty unless --overwrite\. Received: .*out, which holds"):
        pack(config(input_file, out))
    with pytest.raises(InputError, match="at most max_seq_length"):
        pack(config(input_file, out, max_seq_length=5, overwrite=True))
    assert storage.list_names(out) == before and read_manifest(out) == manifest
    with pytest.raises(InputError, match=r"must not be the directory of an input file\. Received: .*in\.tf"):
        pack(config(input_file, tmp_path, overwrite=True))
    (out / "notes.md").write_text("mine")
    pack(config(input_file, out, num_shards=2, overwrite=True))
    shards = [f"packed-0000{number}-of-00002.tfrecord" for number in range(2)]
    assert storage.list_names(out) == ["manifest.json", "notes.md", *shards]


def test_scans_do_not_fill_a_directory(tmp_path, input_file):
    """Neither those of a run that read what was here, nor what a kill left of them."""
    out = tmp_path / "out"
    out.mkdir()
    scans = [out / ".scans.npz", out / f".scans.npz.{'0' * 32}.partial"]
    for path in [*scans, out / "mine.partial"]:
        path.touch()
    with pytest.raises(InputError, match=r"which holds mine\.partial"):
        pack(config(input_file, out))
    (out / "mine.partial").unlink()
    pack(config(input_file, out, num_shards=2))
    assert not any(path.exists() for path in scans)


def test_a_mistake_leaves_files_that_are_being_moved(tmp_path):
    plan = tmp_path / ".incomplete" / "work" / "publish.json"
    plan.parent.mkdir(parents=True)
    plan.write_text('["packed.tfrecord", "manifest.json"]')
    (plan.parent / "identity.json").write_text("{}")
    (tmp_path / ".incomplete" / "packed.tfrecord").write_text("whole")
    (tmp_path / ".incomplete" / "manifest.json").write_text("{}")
    with pytest.raises(InputError), open_output_dir(tmp_path, False, {}):
        raise InputError
    assert plan.exists()
    with open_output_dir(tmp_path, False, {}):
        pass
    assert storage.list_names(tmp_path) == ["manifest.json", "packed.tfrecord"]


WHOLE = ["packed.tfrecord", "manifest.json"]


@pytest.mark.parametrize(
    ("names", "received"),
    [
        (["../important.txt", *WHOLE], r"'\.\./important\.txt', which is not there"),
        (["work/step.done", *WHOLE], "'work/step.done', which is not there"),
        (["lost.tfrecord", *WHOLE], "'lost.tfrecord', which is not there"),
        ([["packed.tfrecord"], "manifest.json"], r"\['packed\.tfrecord'\], which is not there"),
        (["manifest.json"], "'packed.tfrecord', which is left out"),
        (["packed.tfrecord"], "'manifest.json', which is left out"),
    ],
)
def test_only_files_of_the_run_are_published(tmp_path, names, received):
    """A name from `publish.json` led out of the folder, or lost what it left out."""
    folder, out = tmp_path / "out" / ".incomplete", tmp_path / "out"
    (folder / "work").mkdir(parents=True)
    for name, content in {
        "work/publish.json": json.dumps(names),
        "work/identity.json": "{}",
        "work/step.done": "{}",
        "packed.tfrecord": "whole",
        "manifest.json": '{"kind": "packed"}',
        "../important.txt": "what would be moved",
        "../../important.txt": "mine",
    }.items():
        (folder / name).write_text(content)
    before = all_bytes(tmp_path)
    message = rf"publish\.json must name .* Received: {received}; --overwrite starts over\."
    with pytest.raises(InputError, match=message), open_output_dir(out, False, {}):
        pass
    assert all_bytes(tmp_path) == before
    with open_output_dir(out, True, {}) as given:  # starts over
        assert storage.list_names(folder) == ["work"]
        (folder / "manifest.json").write_text('{"kind": "packed"}')
    assert given.manifest is None and (tmp_path / "important.txt").read_text() == "mine"
    assert storage.list_names(out) == ["important.txt", "manifest.json"]


def test_files_become_visible_together_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError), open_output_dir(out, False, {}) as output:
        Path(output.path("packed.tfrecord")).write_text("half")
        raise InputError
    assert not out.exists()
    stale = out / ".incomplete"
    stale.mkdir(parents=True)
    (stale / "packed-00007-of-00008.tfrecord").write_text("half")  # of a killed run
    with open_output_dir(out, False, {}) as output:
        Path(output.path("packed.tfrecord")).write_text("x")
        output.write_manifest({"kind": "packed"})
        assert storage.list_names(out) == [".incomplete"]
    assert storage.list_names(out) == ["manifest.json", "packed.tfrecord"]
    assert read_manifest(out) == {"kind": "packed"} and read_manifest(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[" * 99_999, "\udcff", "[1]"])
def test_leftovers_without_an_identity_are_removed(tmp_path, content):
    work = tmp_path / "out" / ".incomplete" / "work"
    work.mkdir(parents=True)
    (work / "identity.json").write_text(content, errors="surrogateescape")
    (work / "step.done").write_text("old")
    with open_output_dir(tmp_path / "out", False, {"settings": 1}) as output:
        assert [path.name for path in Path(output.work_folder).iterdir()] == ["identity.json"]


def test_the_manifest_goes_first_and_comes_last(tmp_path, monkeypatch):
    for name in ("a.tfrecord", "z.tfrecord", "manifest.json", "vocab.txt"):
        (tmp_path / name).write_text("old")
    moves = []
    remove, replace = storage.remove, storage.replace
    monkeypatch.setattr(storage, "remove", lambda path: moves.append(Path(path)) or remove(path))
    monkeypatch.setattr(storage, "replace", lambda *of: moves.append(Path(of[1])) or replace(*of))
    with open_output_dir(tmp_path, True, {}) as output:
        Path(output.path("z.tfrecord")).write_text("new")
        output.write_manifest({"kind": "packed"})
        moves.clear()
    names = [path.name for path in moves if path.parent == tmp_path]
    assert names == ["manifest.json", "vocab.txt", "a.tfrecord", "z.tfrecord", "manifest.json"]


def test_command_prints_and_writes_the_metrics(tmp_path, input_file):
    out, table = tmp_path / "out", tmp_path / "table.json"
    sizes = {"max_seq_length": S, "max_sequences_per_pack": 3}
    seen = run(main, PackConfig, input_file=input_file, output_dir=out, json=table, **sizes)
    (row,) = json.loads(table.read_text())
    phases, manifest = row.pop("phases"), read_manifest(out)
    assert list(phases) == ["read sequences", "plan", "sort sequences", "measure packs", "write packs"]
    assert all(seconds > 0 for seconds in phases.values()) and "phases" not in manifest
    assert row["algorithm"] == "cghp" and row["depth asked"] == "3"
    assert row["packs"] == manifest["num_packs"] and row["tokens"] == S * row["packs"]
    assert row["padding"] == row["tokens"] - LENGTHS.sum()
    assert row["efficiency %"] == 100 * manifest["efficiency"]
    assert seen.status == 0 and "packing factor" in seen.out and "phases" not in seen.out


def test_bare_command_packs_both_splits_of_the_sample_corpus(tmp_path, monkeypatch):
    calls = []

    def create(settings):
        calls.append(settings)
        with open_output_dir(settings.output_dir, False, {}) as output:
            for split, count in (("train", 30), ("eval", 10)):
                features = make_features(LENGTHS[:count], settings.max_seq_length)
                write_features(output.path(f"{split}-00000-of-00001.tfrecord"), features)
            output.write_manifest({"kind": "unpacked", "vocab_size": 300, "splits": {"train": {"files": []}}})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sample_data, "create", create)
    seen = run(main, PackConfig, max_seq_length=S)
    assert seen.status == 0 and seen.out.splitlines()[2].startswith("train")
    assert (calls[0].input_file, calls[0].max_seq_length) == ("", S)
    train, held_out = (read_manifest(f"sample_data/packed_{S}/{split}") for split in ("train", "eval"))
    assert (train["num_sequences"], held_out["num_sequences"]) == (30, 10)
    assert train["packing_factor"] > 1 and train["vocab_size"] == 300
    # The instances are there now, and are used again
    other = {"max_seq_length": S, "output_dir": "other", "max_sequences_per_pack": 1}
    assert run(main, PackConfig, **other).status == 0
    assert len(calls) == 1 and read_manifest("other/eval")["num_packs"] == 10
    assert run(main, PackConfig, max_seq_length=S).status == 2  # packs are not replaced unasked


def test_a_mistake_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {"input_file": "none-*.tfrecord", "output_dir": "out"}
    assert_refused(main, PackConfig, "`input_file` must match at least one file", **flags)
    assert list(tmp_path.iterdir()) == []
