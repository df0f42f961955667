"""Checkpoints: whole or absent, exact, and pruned."""

import dataclasses
import os
import shutil
import types

import numpy as np
import pytest
from packs import packed_and_unpacked
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tiny import CONFIG, make_engine

from bert_packed.checkpoints import checkpoint
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.training.optimization import Lamb

STATE = {"interval": {"mlm_loss": 0.1}, "evaluation_due": False}
WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.1)


def training_engine(config=WITH_DROPOUT, seed=1):
    return make_engine(config=config, seed=seed, optimizer=Lamb(0.01))


def snapshot(engine):
    return {name: v.numpy().copy() for name, v in {**engine.weights(), **engine.training_state()}.items()}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """Every variable differs from a new engine's, as after a step, which would have to be compiled."""
    engine, folder = training_engine(), tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    for variables in (engine.weights(), engine.training_state()):
        for variable in variables.values():
            values = variable.numpy()
            more = rng.integers(1, 9, values.shape) if values.dtype.kind in "iu" else rng.random(values.shape)
            variable.assign(values + more.astype(values.dtype))
    checkpoint.save_checkpoint(folder, 1, engine, WITH_DROPOUT, STATE)
    return engine, folder


@pytest.fixture
def trained(trained_once, tmp_path):
    """An engine after one step, and a folder with its checkpoint that a test may damage."""
    engine, folder = trained_once
    return engine, shutil.copytree(folder, tmp_path / "run")


def names_of(folder):
    return [path.name for path in checkpoint.list_checkpoints(folder)]


def killed(*_):
    raise KeyboardInterrupt


def test_round_trip_is_exact(trained):
    engine, folder = trained
    other = training_engine(seed=2)
    assert checkpoint.restore_checkpoint(folder / "checkpoint-1", other) == {"step": 1, **STATE}
    before, after = snapshot(engine), snapshot(other)
    assert before.keys() == after.keys()
    assert before["dropout_seed/0"].tolist() != after["dropout_seed/1"].tolist()
    for name, values in before.items():
        assert values.dtype == after[name].dtype and values.shape == after[name].shape
        np.testing.assert_array_equal(values, after[name], err_msg=name)
    fresh = snapshot(training_engine(seed=2))
    assert [name for name, values in after.items() if np.array_equal(values, fresh[name])] == []
    # The next gradients, dropout included, are the same
    batch = packed_and_unpacked(1)[0]
    gradients = [[np.asarray(g) for g in one.gradients(batch)[0]] for one in (engine, other)]
    for one, same in zip(*gradients, strict=True):
        np.testing.assert_array_equal(one, same)


def test_whole_numbers_are_stored_alike_by_every_backend(trained):
    stored = load_file(trained[1] / "checkpoint-1" / checkpoint.TRAINING)
    whole = {name: values for name, values in stored.items() if values.dtype.kind in "iu"}
    assert whole.keys() >= {"lamb/iteration", "dropout_seed/0"}
    assert {values.dtype for values in whole.values()} == {np.dtype(np.int64)}
    assert stored["lamb/iteration"].shape == () and stored["dropout_seed/0"].shape == (2,)
    narrow = types.SimpleNamespace(numpy=lambda: np.arange(2, dtype=np.int32))  # as JAX holds a seed
    checkpoint.save_weights(trained[1] / "jax", {"seed": narrow}, CONFIG)
    assert load_file(trained[1] / "jax" / checkpoint.WEIGHTS)["seed"].dtype == np.int64


def test_the_last_k_are_kept_in_order_of_steps(trained_once, tmp_path):
    engine, _ = trained_once
    for step in (9, 10, 100):
        checkpoint.save_checkpoint(tmp_path, step, engine, WITH_DROPOUT, {})
    checkpoint.prune_checkpoints(tmp_path, 2)
    assert names_of(tmp_path) == ["checkpoint-10", "checkpoint-100"]


@pytest.mark.parametrize(("kind", "value"), [("weights", np.nan), ("training_state", np.inf)])
def test_what_is_not_finite_costs_no_good_checkpoint(tmp_path, kind, value):
    engine = training_engine()
    checkpoint.save_checkpoint(tmp_path, 1, engine, WITH_DROPOUT, {})
    variables = getattr(engine, kind)()
    name, variable = next((n, v) for n, v in variables.items() if len(v.shape) == 2)
    values = np.zeros(variable.shape, np.float32)
    values[-1, -1] = value  # one of many
    variable.assign(values)
    with pytest.raises(InputError, match=f"checkpoint-2 is not written: .*Received: {value} in {name}"):
        checkpoint.save_checkpoint(tmp_path, 2, engine, WITH_DROPOUT, {})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_killed_save_leaves_no_checkpoint(trained_once, tmp_path, monkeypatch):
    engine, _ = trained_once
    checkpoint.save_checkpoint(tmp_path, 1, engine, WITH_DROPOUT, {})
    monkeypatch.setattr(storage, "flush_to_disk", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_checkpoint(tmp_path, 2, engine, WITH_DROPOUT, {})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    (tmp_path / "checkpoint-2.partial" / "left").mkdir(parents=True)  # by a kill that no program survives
    assert names_of(tmp_path) == ["checkpoint-1"]
    checkpoint.save_checkpoint(tmp_path, 2, engine, WITH_DROPOUT, {})
    assert names_of(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert not list(tmp_path.glob("*.partial"))


def test_a_killed_removal_leaves_no_checkpoint(trained_once, tmp_path, monkeypatch):
    engine, _ = trained_once
    for step in (1, 2):
        checkpoint.save_checkpoint(tmp_path, step, engine, WITH_DROPOUT, {})
    monkeypatch.setattr(storage.shutil, "rmtree", lambda path, **_: killed() if path.exists() else None)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.prune_checkpoints(tmp_path, 1)
    assert names_of(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_tensors_may_be_read_by_whom_the_umask_lets(tmp_path, umask):
    before = os.umask(umask)
    try:
        checkpoint.write_tensors({"a": np.zeros(3)}, tmp_path / "a.safetensors")
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["a"], np.zeros(3))


def test_full_disk_is_an_operating_system_error(trained_once, tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="could not be written: I/O error: No space left on device"):
        checkpoint.save_checkpoint(tmp_path, 1, trained_once[0], WITH_DROPOUT, {})
