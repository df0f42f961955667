"""The training command as a user runs it: results, continuing after a loss, steps that are not finite."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from packs import batch_of, random_packs
from pretraining_command import (
    arguments,
    assert_refused,
    assert_same_run,
    flags_of,
    pretrain,
    read_rows,
    write_all,
    write_batch,
)
from safetensors.numpy import load_file
from tiny import MAX_SEQ_LENGTH, manifest_of
from unpacked_records import read_records

from bert_packed.records.examples import Example
from bert_packed.runs import pretraining
from bert_packed.runs.run_directory import LOCK_FILE
from bert_packed.training.engines import ENGINES

pytestmark = pytest.mark.usefixtures("uncompiled_file")
ROOT = Path(__file__).resolve().parents[2]
SHORT = {"num_train_steps": 8, "save_checkpoints_steps": 3, "eval_steps": 5, "log_steps": 3}
SHORT["keep_checkpoint_max"] = 2
ALONE = {"eval_input_file": "", "eval_steps": 0}
PHASE = {"num_train_steps": 4, "save_checkpoints_steps": 2, "log_steps": 1, **ALONE}
RUNS = {
    "plain": SHORT,
    "epochs": {**PHASE, "num_train_epochs": 1},
    "second phase": {**PHASE, "init_checkpoint": "{plain}", "keep_optimizer_state": True},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Function from the name of a run to flags, folder and output of one that nothing befell."""
    made = {}

    def find(name):
        if name not in made:
            places = {"plain": find("plain")[1]} if name != "plain" else {}
            changes = {key: str(value).format(**places) for key, value in RUNS[name].items()}
            folder = tmp_path_factory.mktemp("run") / "whole"
            flags = flags_of(data, folder, **changes)
            if "num_train_epochs" in flags:
                del flags["num_train_steps"]
            seen = pretrain(**flags)
            assert seen.status == 0, seen.error
            made[name] = flags, folder, seen.out
        return made[name]

    return find


@pytest.fixture
def uninterrupted(whole):
    return whole("plain")[1]


def test_a_run_leaves_what_it_says(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names >= {"metrics.csv", "eval_metrics.csv", "tensorboard", "resolved.flags", "run.json"}
    # 3, 6 and 8 are saved, of which two are kept
    assert {name for name in names if name.startswith("checkpoint")} == {"checkpoint-6", "checkpoint-8"}
    rows = read_rows(uninterrupted / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [3, 6, 8]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert all(float(row["gradient_norm"]) > 0 and 0 < float(row["packing_efficiency"]) <= 1 for row in rows)
    assert [int(row["step"]) for row in read_rows(uninterrupted / "eval_metrics.csv")] == [5, 8]


def lose_the_last(folder, last):
    shutil.rmtree(folder / f"checkpoint-{last}")


def damage_the_last(folder, last):
    path = folder / f"checkpoint-{last}" / "training.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_the_evaluation(folder, last):
    """Killed between the save of a step and its evaluation."""
    rows = (folder / "eval_metrics.csv").read_text().splitlines(keepends=True)
    (folder / "eval_metrics.csv").write_text("".join(rows[:-1]))


CONTINUED, COMPLETE = "continues from {run}/checkpoint-{before}\n", "the run is complete"
DAMAGED = "checkpoint-{last} is damaged, now checkpoint-{last}.damaged; checkpoint-{before} is next: "
MOMENTS = [
    ("plain", lose_the_last, 8, [CONTINUED]),
    ("plain", damage_the_last, 8, [CONTINUED, DAMAGED, "training.safetensors must have the SHA-256"]),
    ("plain", lose_the_evaluation, 8, [COMPLETE]),
    ("plain", lambda *_: None, 8, [COMPLETE]),
    ("epochs", lambda *_: None, 4, [COMPLETE]),
    ("second phase", lose_the_last, 4, [CONTINUED]),
]


@pytest.mark.parametrize(("name", "befall", "last", "messages"), MOMENTS)
def test_a_run_continues_bit_for_bit(whole, tmp_path, name, befall, last, messages):
    flags, uninterrupted, _ = whole(name)
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    before = last - 2
    befall(folder, last)
    seen = pretrain(**{**flags, "output_dir": folder, "json": tmp_path / "report.json"})
    assert seen.status == 0, seen.error
    for message in messages:
        assert message.format(run=folder, last=last, before=before) in seen.out
    assert_same_run(folder, uninterrupted)
    assert not list(folder.glob("*.damaged"))  # the step is there again, and good
    steps = [row["step"] for row in json.loads((tmp_path / "report.json").read_text())["metrics"]]
    assert steps == [last] * (2 if name == "plain" else 1)


def test_steps_are_those_of_epochs_and_may_be_given(whole, tmp_path):
    flags, uninterrupted, _ = whole("epochs")
    recorded = json.loads((uninterrupted / "run.json").read_text())["flags"]
    # 15 packs make four steps of 4
    assert (recorded["num_train_steps"], recorded["num_train_epochs"]) == (4, 0)
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    changes = {"output_dir": folder, "num_train_epochs": 0, "num_train_steps": 4}
    assert COMPLETE in pretrain(**{**flags, **changes}).out


def contents(folder):
    """Every byte but the lock's."""
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE
    }


def test_a_mistake_costs_an_earlier_run_nothing(data, whole, tmp_path):
    """The earlier run goes by --overwrite only when the new one is known to start."""
    flags, uninterrupted, _ = whole("plain")
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    content = json.loads((data / "bert_config.json").read_text())
    (tmp_path / "relu.json").write_text(json.dumps({**content, "hidden_act": "relu"}))
    inside = f"{folder}/checkpoint-8"
    before = contents(folder)
    for changes, message in (
        ({"init_checkpoint": inside, "overwrite": True}, "`init_checkpoint` must be outside `output_dir`"),
        ({"init_checkpoint": f"{data}/none", "overwrite": True}, "`init_checkpoint` must be a folder"),
        ({"input_file": f"{data}/none*", "overwrite": True}, "must match at least one file"),
        ({"learning_rate": 0.02}, "learning_rate 0.01 -> 0.02"),
        ({"eval_input_file": f"{data}/packed-0.tfrecord"}, f"eval_input_file {data}/packed-0.tfrecord"),
        ({"bert_config_file": tmp_path / "relu.json"}, "hidden_act of the model 'gelu' -> 'relu'"),
    ):
        assert_refused(message, **{**flags, "output_dir": folder, **changes})
        assert contents(folder) == before
    for path in folder.glob("checkpoint-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    before = contents(folder)
    message = f"{folder}/checkpoint-8/model.safetensors must have the SHA-256"
    assert_refused(message, **{**flags, "output_dir": folder})
    assert contents(folder) == before


def start(*arguments):
    """The command in a new process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run_pretraining.py"), *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder, step, process):
    """Wait until a process has logged a step."""
    while process.poll() is None:
        rows = read_rows(folder / "metrics.csv")
        if rows and int(rows[-1]["step"]) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"ended before step {step}: {process.communicate()}")


@pytest.mark.slow
def test_a_stopped_and_then_killed_run_continues(data, tmp_path):
    """One process each, of compiled steps: the very start of a process must not matter either."""
    undisturbed = start(*arguments(data, tmp_path / "whole"))
    assert undisturbed.communicate() and undisturbed.returncode == 0
    folder = tmp_path / "run"
    # No checkpoint is due before the end: the one found is the signal's
    process = start(*arguments(data, folder, save_checkpoints_steps=1000))
    wait_for_step(folder, 5, process)
    process.terminate()
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stops as soon as a step is over" in err and "stopped after saving" in err
    (saved,) = folder.glob("checkpoint-*")
    assert 5 <= int(saved.name[11:]) < 15

    # Every second step has a checkpoint, to continue from wherever the kill hits
    command = arguments(data, folder, save_checkpoints_steps=2)
    process = start(*command)
    wait_for_step(folder, 15, process)
    process.kill()
    out, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert f"continues from {saved}\n" in out

    process = start(*command)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert f"continues from {folder}/checkpoint-" in out and f"from {saved}\n" not in out
    assert "compiled   1 training program" in out or "the run is complete" in out
    assert_same_run(folder, tmp_path / "whole")


def fail(error):
    def compare(*_):
        raise error

    return compare


def test_packed_against_unpacked_is_reported(data, tmp_path, monkeypatch):
    rng = np.random.default_rng(3)
    sequences = [[sequence] for pack in random_packs(rng, 12, MAX_SEQ_LENGTH) for sequence in pack]
    unpacked_file, report = tmp_path / "unpacked.tfrecord", tmp_path / "report.json"
    write_batch(unpacked_file, batch_of(sequences, MAX_SEQ_LENGTH, 1, 8))
    packs = shutil.copytree(data, tmp_path / "data")
    monkeypatch.setattr(pretraining, "NUM_TIMED_STEPS", 1)
    changes = {**ALONE, "num_train_steps": 2, "micro_batch_size": 0}
    flags = flags_of(packs, tmp_path / "run", unpacked_input_file=unpacked_file, json=report, **changes)
    assert pretrain(**flags).status == 2  # no manifest says how many sequences a pack holds
    (packs / "manifest.json").write_text(json.dumps(manifest_of(num_sequences=30)))
    assert pretrain(**flags, overwrite=True).status == 0
    content = json.loads(report.read_text())
    assert [row["data"] for row in content["metrics"]] == ["train"]
    unpacked, packed = content["speed"]
    assert (unpacked["packing_factor"], packed["packing_factor"]) == (1, 2)
    expected = 2 * unpacked["seconds_per_step"] / packed["seconds_per_step"]
    assert packed["speed_up"] == pytest.approx(expected) and unpacked["speed_up"] == 1

    # The finished run's report is out, even if the comparison fails
    unpacked_file.write_bytes(unpacked_file.read_bytes()[:-9])
    for error, status, message in (
        (None, 3, "unpacked.tfrecord, record 42: the record is truncated or corrupt"),
        (MemoryError("out of memory\nin a step"), 3, "could not be compared: out of memory in a step"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        if error:
            monkeypatch.setattr(pretraining.Run, "compare_speeds", fail(error))
        report.unlink()
        seen = pretrain(**flags)
        assert seen.status == status
        assert message in seen.error and seen.error.count("\n") == 1 and "train" in seen.out
        assert json.loads(report.read_text()) == {"metrics": content["metrics"], "speed": []}


@pytest.fixture
def plant(monkeypatch):
    """Function that lets another one start the steps: `start(start_step, engine, batch, wants_stop)`."""
    module, name = ENGINES[keras.backend.backend()]
    engine = getattr(importlib.import_module(module), name)
    start_step = engine.start_step

    def replace(start):
        monkeypatch.setattr(engine, "start_step", lambda *of: start(start_step, *of))

    return replace


def test_weights_that_are_not_finite_are_never_saved(data, tmp_path, plant):
    """The loss of that step is finite, and --keep_checkpoint_max would remove the last good one."""

    def start(start_step, engine, batch, wants_stop):
        sums = start_step(engine, batch, wants_stop)
        engine.write_back()
        if int(engine.optimizer.iterations.numpy()) == 3:
            bias = engine.weights()["bert/layer_0/attention/query/bias"]
            bias.assign(np.full(bias.shape, np.nan))
        return sums

    plant(start)
    changes = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 1, "num_train_steps": 3, **ALONE}
    seen = pretrain(**flags_of(data, tmp_path / "run", **changes))
    assert seen.status == 2 and "checkpoint-3 is not written" in seen.error and seen.error.count("\n") == 1
    assert f"start from {tmp_path}/run/checkpoint-2, the last good checkpoint" in seen.error
    (saved,) = tmp_path.glob("run/checkpoint-*")
    assert saved.name == "checkpoint-2"
    for name in ("model.safetensors", "training.safetensors"):
        assert all(np.isfinite(values).all() for values in load_file(saved / name).values())


def test_a_step_that_is_not_finite_is_left_out(data, tmp_path, plant):
    """Its records are named."""
    tokens = []

    def start(start_step, engine, batch, wants_stop):
        engine.write_back()
        if int(engine.optimizer.iterations.numpy()) == 1:
            tokens.extend(batch["token_ids"].tolist())
            weights = np.where(batch["slot_weights"] > 0, np.inf, 0).astype("float32")
            batch = {**batch, "slot_weights": weights}
        return start_step(engine, batch, wants_stop)

    plant(start)
    folder = tmp_path / "run"
    flags = flags_of(data, folder, num_train_steps=3, log_steps=1, **ALONE)
    seen = pretrain(**flags)
    (line,) = [line for line in seen.error.splitlines() if "left out" in line]
    assert seen.status == 0 and line.startswith("step 2 is left out, the weights stay: ")
    rows = read_rows(folder / "metrics.csv")
    assert [row["skipped_steps"] for row in rows] == ["0", "1", "0"]
    assert [bool(row["loss"]) for row in rows] == [True, False, True]
    told = json.loads((folder / "skipped_steps.0.jsonl").read_text())
    assert told["step"] == 2 and "nsp_loss inf" in told["not_finite"]
    found = []
    for path, numbers in told["packs"].items():
        assert f"{path} {', '.join(map(str, numbers))}" in line
        packs = [
            Example.FromString(record).features.feature["input_ids"].int64_list.value
            for record in read_records(path)
        ]
        found += [list(packs[number - 1]) for number in numbers]
    assert sorted(found) == sorted(tokens)
    assert pretrain(**flags).status == 0  # the directory is still this run's
