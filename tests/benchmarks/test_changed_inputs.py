"""Runs whose files were made anew under their old names are told, and do not count."""

import hashlib
import json

import pytest
from curve_logs import a_run, write_log

from benchmarks.changed_inputs import find_changed_input
from benchmarks.kept_runs import comparable, is_complete, note_scoring
from benchmarks.planned_runs import SQUAD, Run


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_records(folder, contents):
    """Files and the manifest that lists them, as packing leaves both; returns their glob."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in contents.items():
        (folder / name).write_text(content)
    entries = [{"name": name, "num_records": 1, "sha256": sha256(folder / name)} for name in contents]
    (folder / "manifest.json").write_text(json.dumps({"kind": "packed", "files": entries}))
    return str(folder / "*.tfrecord")


@pytest.fixture
def run(tmp_path):
    """A pre-training that has come to its end, on two files and a held-out one."""
    train = write_records(tmp_path / "train", {"a.tfrecord": "one", "b.tfrecord": "two"})
    held_out = write_records(tmp_path / "eval", {"c.tfrecord": "three"})
    one = a_run()
    one.flags.update(input_file=train, eval_input_file=held_out)
    inputs = {
        name: [{"path": str(path), "sha256": sha256(path), "num_records": 1} for path in folder.glob("*.tf*")]
        for name, folder in (("input_file", tmp_path / "train"), ("eval_input_file", tmp_path / "eval"))
    }
    folder = tmp_path / one.name
    for log in ("metrics.csv", "eval_metrics.csv"):
        write_log(folder / log, [(3, 9, 8.0, 0.1, "")])
    (folder / "run.json").write_text(json.dumps({"flags": one.flags, "inputs": inputs}))
    return one


def told(run, folder):
    """The files of a run that `comparable` tells of; it keeps the run where there are none."""
    lines = []
    kept = comparable([run], folder, lines.append)
    assert bool(kept) != bool(lines) and is_complete(run, folder) == bool(kept)
    return lines


@pytest.mark.parametrize(
    ("folder", "contents", "changed"),
    [
        ("train", {"a.tfrecord": "one", "b.tfrecord": "other"}, "b.tfrecord"),
        ("eval", {"c.tfrecord": "other"}, "c.tfrecord"),
        ("train", {"a.tfrecord": "one", "b.tfrecord": "two", "d.tfrecord": "new"}, "d.tfrecord"),
        ("train", {"a.tfrecord": "one"}, "b.tfrecord"),
        ("train", {"a.tfrecord": "one", "b.tfrecord": "two"}, None),  # packed anew to the same bytes
        ("eval", {}, None),  # gone
    ],
)
def test_records_that_were_made_anew_leave_a_run_out(run, tmp_path, folder, contents, changed):
    assert told(run, tmp_path) == []
    write_records(tmp_path / folder, contents)
    lines = changed and [
        f"{run.name} is left out: {tmp_path / folder / changed} is not what it was when the run was made"
    ]
    assert told(run, tmp_path) == (lines or [])


def test_what_began_from_a_run_is_left_out_with_it(run, tmp_path):
    later = Run("later", 1, {**run.flags, "init_checkpoint": str(tmp_path / run.name)}, 10.0)
    folder = tmp_path / later.name
    for log in ("metrics.csv", "eval_metrics.csv"):
        write_log(folder / log, [(3, 9, 8.0, 0.1, "")])
    (folder / "run.json").write_text(json.dumps({"flags": later.flags}))
    assert told(later, tmp_path) == []
    write_records(tmp_path / "train", {"a.tfrecord": "other", "b.tfrecord": "two"})
    (line,) = told(later, tmp_path)
    assert line.startswith("later-seed1 is left out: ") and "a.tfrecord is not what it was" in line


def test_records_without_a_manifest_are_not_read(run, tmp_path):
    (tmp_path / "train" / "manifest.json").unlink()
    (tmp_path / "train" / "a.tfrecord").write_text("other")
    assert find_changed_input(tmp_path / run.name) is None


@pytest.mark.parametrize("inputs", [None, [], {}])
def test_a_run_that_tells_of_no_files_has_no_changed_ones(run, tmp_path, inputs):
    path = tmp_path / run.name / "run.json"
    path.write_text(json.dumps({"flags": run.flags, "inputs": inputs, "data": inputs}))
    write_records(tmp_path / "train", {"new.tfrecord": "new"})
    assert find_changed_input(tmp_path / run.name) is None


@pytest.mark.parametrize("same", [False, True])
def test_questions_and_vocabulary_that_were_changed_in_place_leave_their_scores_out(tmp_path, same):
    names = ("train_file", "predict_file", "vocab_file")
    files = {name: tmp_path / name for name in names}
    if same:
        files["predict_file"] = files["train_file"]
    for path in files.values():
        path.write_text("content")
    flags = {name: str(path) for name, path in files.items()} | {"bert_config_file": "bert-tiny"}
    one = Run("squad", 1, flags, 0.0, program=SQUAD)
    folder = tmp_path / one.name
    folder.mkdir()
    found = {
        "flags": {**flags, "random_seed": 12345},
        "inputs": {"train_file": [{"path": flags["train_file"], "sha256": sha256(files["train_file"])}]},
        "data": {"vocab_sha256": sha256(files["vocab_file"])},
    }
    (folder / "run.json").write_text(json.dumps(found))
    note_scoring(one, tmp_path)
    (folder / "eval_results.json").write_text("{}")
    assert told(one, tmp_path) == []
    for path in files.values():
        path.write_text("other")
        assert told(one, tmp_path) == [
            f"squad-seed1 is left out: {path} is not what it was when the run was made"
        ]
        path.write_text("content")
        assert told(one, tmp_path) == []
    files["predict_file"].write_text("other")
    note_scoring(one, tmp_path)  # before they are answered
    assert not is_complete(one, tmp_path)
    (folder / "eval_results.json").unlink()
    (folder / "eval_results.json").write_text("{}")
    assert bool(told(one, tmp_path)) == same  # of the training all the same
