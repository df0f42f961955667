"""A damaged newest checkpoint is seen, named and put aside; the run goes on from the one before."""

import functools
import itertools
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import CONFIG, make_engine

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING, QUESTION_ANSWERING
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.checkpoints.checkpoint import FILES, check_checkpoint, list_checkpoints, prune_checkpoints
from bert_packed.core.settings import InputError
from bert_packed.runs import run_directory
from bert_packed.runs.run_directory import find_whole_checkpoint
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.optimization import Lamb

STATE = {"interval": {"a": 0.5}, "evaluation_due": False}  # as the training loop saves it


@pytest.fixture(scope="module")
def engine():
    return make_engine(optimizer=Lamb(0.01))


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in (2, 4, 6):
        checkpoint.save_checkpoint(folder, step, engine, CONFIG, STATE)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def flip(path, place=0.5):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def empty(path):
    path.write_bytes(b"")


def content_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checksums_are_those_of_other_programs(folder):
    path = folder / "checkpoint-6"
    listed = (path / checkpoint.CHECKSUMS).read_text()
    assert sorted(line.split()[1] for line in listed.splitlines()) == sorted(FILES)
    command = ["sha256sum", "--check", "--strict", "--quiet", checkpoint.CHECKSUMS]
    assert subprocess.run(command, cwd=path).returncode == 0
    check_checkpoint(path)
    flip(path / checkpoint.TRAINING)
    assert subprocess.run(command, cwd=path, capture_output=True).returncode == 1


FLIPS = [functools.partial(flip, place=place) for place in (0, 0.3, 0.5, 0.8, 0.999)]


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *itertools.product([*FLIPS, cut, empty], [*FILES, checkpoint.CHECKSUMS]),
        *((pathlib.Path.unlink, name) for name in FILES),
    ],
)
def test_any_damage_to_any_file_is_seen(folder, name, damage):
    path = folder / "checkpoint-6" / name
    damage(path)
    with pytest.raises(InputError) as caught:
        check_checkpoint(path.parent)
    assert str(path) in str(caught.value) or name == checkpoint.CHECKSUMS
    assert "\n" not in str(caught.value)


def test_a_damaged_list_of_checksums_is_refused(folder):
    path = folder / "checkpoint-6" / checkpoint.CHECKSUMS
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    shorter = [b"".join(lines[:place] + lines[place + 1 :]) for place in range(len(FILES))]
    other = f"{checkpoint.storage.file_sha256(folder / 'checkpoint-4' / checkpoint.STATE)}  ../checkpoint-4/"
    elsewhere = whole + other.encode() + checkpoint.STATE.encode() + b"\n"
    # No byte of the list has the eighth bit: with one flipped, it is no UTF-8
    no_text = [bytes([*whole[:place], whole[place] ^ 128, *whole[place + 1 :]]) for place in (0, 40, 68)]
    assert len(lines) == len(FILES)
    for content in (*shorter, elsewhere, *no_text):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"{checkpoint.CHECKSUMS} must list "):
            checkpoint.check_checksums(path.parent, FILES)
    path.write_bytes(whole)
    assert checkpoint.check_checksums(path.parent, FILES)


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.MODEL_CONFIG])
def test_nothing_starts_from_a_damaged_one(folder, engine, name):
    """The last bits of a weight and a rate of dropout: shapes and names are right, numbers finite."""
    path = folder / "checkpoint-6" / name
    if name == checkpoint.WEIGHTS:
        flip(path, 0.99)
    else:
        path.write_text(path.read_text().replace('"hidden_dropout_prob": 0.0', '"hidden_dropout_prob": 0.1'))
    task = named_weights(build_model(QUESTION_ANSWERING, CONFIG, num_outputs=2, seed=0))
    for weights, head in ((engine.weights(), PRETRAINING), (task, QUESTION_ANSWERING)):
        before = {name: variable.numpy() for name, variable in weights.items()}
        for given in (path.parent, folder):
            with pytest.raises(InputError, match=f"{re.escape(str(path))} must have the SHA-256"):
                starting_weights.load(given, weights, CONFIG, head)
        for variable in weights:
            np.testing.assert_array_equal(weights[variable].numpy(), before[variable])


def test_a_start_reads_no_state_of_an_optimizer(folder, engine):
    flip(folder / "checkpoint-6" / checkpoint.TRAINING)
    found = starting_weights.load(folder, engine.weights(), CONFIG)
    assert found.path == folder / "checkpoint-6"


def test_visible_damage_is_found_without_checksums(folder):
    path = folder / "checkpoint-6"
    (path / checkpoint.CHECKSUMS).unlink()
    check_checkpoint(path)
    for name in (checkpoint.WEIGHTS, checkpoint.TRAINING, checkpoint.STATE):
        for damage in (cut, empty):
            whole = (path / name).read_bytes()
            damage(path / name)
            with pytest.raises(InputError, match=r"must be (a complete|JSON)") as caught:
                check_checkpoint(path)
            assert str(path / name) in str(caught.value)
            (path / name).write_bytes(whole)
    tensors = load_file(path / checkpoint.WEIGHTS)
    key = next(iter(tensors))
    save_file({**tensors, key: np.full_like(tensors[key], np.inf)}, path / checkpoint.WEIGHTS)
    with pytest.raises(InputError, match=f"Received: inf in {key}"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({}, "`step` must be 6, as the folder's name. Received: None"),
        ([], "must hold a JSON object. Received: list"),
        ({**STATE, "step": 7}, "`step` must be 6, as the folder's name. Received: 7"),
        ({**STATE, "step": "6"}, "`step` must be 6, as the folder's name. Received: '6'"),
        ({"step": 6}, "`interval` must be an object of numbers. Received: None"),
        ({**STATE, "step": 6, "interval": {"a": "x"}}, "`interval` must be an object of numbers"),
        ({**STATE, "step": 6, "watched": [1]}, r"`watched` must be an object of numbers. Received: \[1\]"),
        ({**STATE, "step": 6, "num_skipped": "x"}, "`num_skipped` must be a whole number. Received: 'x'"),
        ({**STATE, "step": 6, "evaluation_due": 0}, "`evaluation_due` must be true or false. Received: 0"),
    ],
)
def test_a_state_that_no_loop_saved_is_refused(folder, engine, damage, message):
    """It has no checksums, or somebody made them fit; taken for a start it would cost the log."""
    path = folder / "checkpoint-6" / checkpoint.STATE
    path.write_text(json.dumps(damage))
    (path.parent / checkpoint.CHECKSUMS).unlink()
    for read in (check_checkpoint, lambda path: checkpoint.restore_checkpoint(path, engine)):
        with pytest.raises(InputError, match=f"^{path}:? {message}") as caught:
            read(path.parent)
        assert "\n" not in str(caught.value)


def test_the_newest_whole_checkpoint_is_found(folder):
    before, lines = content_of(folder), []
    assert find_whole_checkpoint(folder, lines.append) == folder / "checkpoint-6"
    assert lines == [] and content_of(folder) == before
    flip(folder / "checkpoint-6" / checkpoint.WEIGHTS)
    cut(folder / "checkpoint-4" / checkpoint.STATE)
    damaged = {name: content_of(folder / name) for name in ("checkpoint-6", "checkpoint-4")}
    assert find_whole_checkpoint(folder, lines.append) == folder / "checkpoint-2"
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-2"]
    for name, content in damaged.items():
        assert content_of(folder / f"{name}.damaged") == content
    assert len(lines) == 2 and all("\n" not in line for line in lines)
    for line, step, name in zip(lines, (6, 4), (checkpoint.WEIGHTS, checkpoint.STATE), strict=True):
        assert line.startswith(
            f"checkpoint-{step} is damaged, now checkpoint-{step}.damaged; checkpoint-2 is"
        )
        assert f"{folder}/checkpoint-{step}/{name} must have the SHA-256" in line
    run_directory.check_own(saved_run(folder))


def saved_run(folder):
    (folder / run_directory.RUN_FILE).write_text("{}")
    return folder


def test_without_a_whole_checkpoint_nothing_changes(folder):
    for step in (2, 4, 6):
        empty(folder / f"checkpoint-{step}" / checkpoint.TRAINING)
    before, lines = content_of(folder), []
    with pytest.raises(InputError, match=r"--overwrite starts again\. .*checkpoint-6/training.* Of 3 check"):
        find_whole_checkpoint(folder, lines.append)
    assert content_of(folder) == before and lines == []


@pytest.mark.parametrize(
    ("number", "message", "is_damage"), [(5, "Input/output error", True), (13, "Permission denied", False)]
)
def test_a_bad_disk_is_damage_and_no_permission_is_not(folder, monkeypatch, number, message, is_damage):
    sha256, lines = checkpoint.storage.file_sha256, []

    def fail(path):
        if path.parent.name == "checkpoint-6":
            raise OSError(number, message, str(path))
        return sha256(path)

    monkeypatch.setattr(checkpoint.storage, "file_sha256", fail)
    if is_damage:
        assert find_whole_checkpoint(folder, lines.append) == folder / "checkpoint-4"
        assert message in lines[0]
    else:
        with pytest.raises(PermissionError):
            find_whole_checkpoint(folder, lines.append)
        assert len(list_checkpoints(folder)) == 3


def test_a_damaged_one_goes_when_its_step_is_saved_again(folder, engine):
    for _ in range(2):  # a step that is damaged twice has two names
        flip(folder / "checkpoint-6" / checkpoint.WEIGHTS)
        assert find_whole_checkpoint(folder, lambda _: None) == folder / "checkpoint-4"
        checkpoint.save_checkpoint(folder, 5, engine, CONFIG, {})
        prune_checkpoints(folder, 2)
        assert names(folder)[:2] == ["checkpoint-4", "checkpoint-5"]  # damaged ones are not counted
        shutil.rmtree(folder / "checkpoint-5")
        checkpoint.save_checkpoint(folder, 6, engine, CONFIG, {})
    # Both stay until the new one has given a finite loss
    assert names(folder)[1:] == ["checkpoint-6", "checkpoint-6.damaged", "checkpoint-6.damaged-2"]
    assert json.loads((folder / "checkpoint-6" / checkpoint.STATE).read_text()) == {"step": 6}
    run_directory.check_own(saved_run(folder))
    prune_checkpoints(folder, 9)
    assert names(folder) == ["checkpoint-4", "checkpoint-6", run_directory.RUN_FILE]


def names(folder):
    return sorted(path.name for path in folder.iterdir())
