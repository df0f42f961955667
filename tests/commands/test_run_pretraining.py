"""The training command as a user runs it: results, resuming after kill -9 and SIGTERM, what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from packs import batch_of, random_packs
from pretraining_command import arguments, read_rows, run, write_all, write_batch
from safetensors.numpy import load_file
from tiny import MAX_SEQ_LENGTH, write_data

from bert_packed.runs import pretraining
from bert_packed.runs.run_directory import LOCK_FILE
from bert_packed.training.engines.tensorflow import TensorFlowEngine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


def start(*arguments):
    """The command in a new process."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run_pretraining.py"), *arguments],
        env=environment,
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


def assert_same_run(one, other):
    """Equal weights, optimizer and dropout state, and logged figures, bit for bit."""
    newest = [
        sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name[11:]))[-1] for folder in (one, other)
    ]
    assert newest[0].name == newest[1].name
    for name in ("model.safetensors", "training.safetensors"):
        got, want = (load_file(folder / name) for folder in newest)
        assert got.keys() == want.keys()
        for key, values in want.items():
            assert np.array_equal(got[key], values), key
    for name in ("metrics.csv", "eval_metrics.csv"):
        assert read_rows(one / name) == read_rows(other / name)


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "uninterrupted"
    assert run(*arguments(data, folder, profile_steps="9,10")) == 0
    return folder


def test_a_run_leaves_what_it_says(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names >= {"metrics.csv", "eval_metrics.csv", "tensorboard", "resolved.flags", "run.json"}
    # 7, 14, 21 and the last; three are kept
    assert {name for name in names if name.startswith("checkpoint")} == {
        "checkpoint-14",
        "checkpoint-21",
        "checkpoint-24",
    }
    rows = read_rows(uninterrupted / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 20, 24]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert all(float(row["gradient_norm"]) > 0 and 0 < float(row["packing_efficiency"]) <= 1 for row in rows)
    assert list(uninterrupted.glob("tensorboard/profile/plugins/profile/*/*.xplane.pb"))
    assert [int(row["step"]) for row in read_rows(uninterrupted / "eval_metrics.csv")] == [10, 20, 24]


def test_complete_run_says_so_and_reports(data, uninterrupted, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert run(*arguments(data, uninterrupted), f"--json={report}") == 0
    assert "the run is complete" in capsys.readouterr().out
    assert [row["step"] for row in json.loads(report.read_text())["metrics"]] == [24, 24]


@pytest.mark.slow
def test_a_stopped_and_then_killed_run_continues_bit_for_bit(data, uninterrupted, tmp_path):
    # One process each: the very start of a process must not matter either
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

    # A checkpoint every second step: there is one to continue from, wherever the kill hits
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
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(data, uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    damaged = folder / "checkpoint-24" / "training.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert run(*arguments(data, folder)) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if " is damaged, " in line]
    assert line.startswith("checkpoint-24 is damaged, now checkpoint-24.damaged; checkpoint-21 is next: ")
    assert f"{damaged} must have the SHA-256" in line
    assert f"continues from {folder}/checkpoint-21" in text
    assert_same_run(folder, uninterrupted)
    assert not (folder / "checkpoint-24.damaged").exists()  # its step is there again, and good


def contents(folder):
    """Every byte but the lock's."""
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE
    }


def test_where_every_checkpoint_is_damaged_nothing_is_removed(data, uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    for path in folder.glob("checkpoint-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    before = contents(folder)
    assert run(*arguments(data, folder)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Of 3 checkpoints" in error
    assert f"{folder}/checkpoint-24/model.safetensors must have the SHA-256" in error
    assert contents(folder) == before


def test_evaluation_that_a_kill_cut_off_is_made(data, uninterrupted, tmp_path):
    """Killed between the save of a step and its evaluation: the row is there in the end, once."""
    folder = tmp_path / "cut"
    shutil.copytree(uninterrupted, folder)
    rows = (folder / "eval_metrics.csv").read_text().splitlines(keepends=True)
    for left in (rows[:-1], rows):  # before its row was written, and after
        (folder / "eval_metrics.csv").write_text("".join(left))
        assert run(*arguments(data, folder)) == 0
        assert read_rows(folder / "eval_metrics.csv") == read_rows(uninterrupted / "eval_metrics.csv")


@pytest.mark.usefixtures("uncompiled")
def test_packed_against_unpacked_is_reported(data, tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(3)
    sequences = [[sequence] for pack in random_packs(rng, 12, MAX_SEQ_LENGTH) for sequence in pack]
    write_batch(tmp_path / "unpacked.tfrecord", batch_of(sequences, MAX_SEQ_LENGTH, 1, 8))
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data")
    monkeypatch.setattr(pretraining, "NUM_TIMED_STEPS", 1)
    report = tmp_path / "report.json"
    promise = {"num_sequences": 30, "num_packs": 15, "files": [], "histogram": {"lengths": [6]}}
    command = arguments(
        tmp_path / "data",
        tmp_path / "run",
        eval_input_file="",
        eval_steps=0,
        bert_config_file=data / "bert_config.json",
        unpacked_input_file=tmp_path / "unpacked.tfrecord",
        json=report,
        num_train_steps=2,
        micro_batch_size=0,
    )
    assert run(*command) == 2  # no manifest says how many sequences a pack holds
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({"kind": "packed", **promise}))
    assert run(*command, "--overwrite") == 0
    content = json.loads(report.read_text())
    assert [row["data"] for row in content["metrics"]] == ["train"]
    unpacked, packed = content["speed"]
    assert (unpacked["packing_factor"], packed["packing_factor"]) == (1, 2)
    expected = 2 * unpacked["seconds_per_step"] / packed["seconds_per_step"]
    assert packed["speed_up"] == pytest.approx(expected) and unpacked["speed_up"] == 1

    # Whatever befalls the comparison, the finished run's report is out
    def fail(error):
        def compare(*_):
            raise error

        return compare

    damaged = tmp_path / "unpacked.tfrecord"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    for error, status, message in (
        (None, 3, "unpacked.tfrecord, record 42: the record is truncated or corrupt"),
        (MemoryError("out of memory\nin a step"), 3, "could not be compared: out of memory in a step"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        if error:
            monkeypatch.setattr(pretraining.Run, "compare_speeds", fail(error))
        report.unlink()
        capsys.readouterr()
        assert run(*command) == status
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.count("\n") == 1
        assert "train" in printed.out
        assert json.loads(report.read_text()) == {"metrics": content["metrics"], "speed": []}


@pytest.mark.usefixtures("uncompiled")
def test_init_checkpoint(data, uninterrupted, tmp_path, capsys):
    assert run(*arguments(data, tmp_path / "run", init_checkpoint=uninterrupted, num_train_steps=1)) == 0
    assert f"of {uninterrupted}/checkpoint-24" in capsys.readouterr().out
    first = read_rows(tmp_path / "run" / "metrics.csv")[0]
    assert float(first["loss"]) < float(read_rows(uninterrupted / "metrics.csv")[0]["loss"])


@pytest.mark.usefixtures("uncompiled")
def test_a_second_phase_keeps_the_moments_and_continues_bit_for_bit(data, uninterrupted, tmp_path, capsys):
    second = {"init_checkpoint": uninterrupted, "keep_optimizer_state": True, "log_steps": 1}
    steps = {"num_train_steps": 4, "save_checkpoints_steps": 2, "eval_input_file": "", "eval_steps": 0}
    command = arguments(data, tmp_path / "whole", **second, **steps)
    assert run(*command) == 0
    assert "its optimizer's moments, of 24 steps, are kept" in capsys.readouterr().out
    part = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(part / "checkpoint-4")
    assert run(*arguments(data, part, **second, **steps)) == 0
    assert f"continues from {part}/checkpoint-2" in capsys.readouterr().out
    assert_same_run(part, tmp_path / "whole")
    assert load_file(part / "checkpoint-4" / "training.safetensors")["lamb/iteration"] == 24 + 4
    # the schedule is of this phase: warm-up of two steps, then down
    rates = [float(row["learning_rate"]) for row in read_rows(part / "metrics.csv")]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.005])


@pytest.mark.usefixtures("uncompiled")
def test_weights_that_an_update_makes_nan_are_never_saved(data, tmp_path, capsys, monkeypatch):
    """The loss of that step is finite, and --keep_checkpoint_max would remove the last good one."""
    train_step = TensorFlowEngine.train_step

    def planted(engine, batch, wants_stop):
        sums = train_step(engine, batch, wants_stop)
        if int(engine.optimizer.iterations.numpy()) == 3:
            bias = engine.weights()["bert/layer_0/attention/query/bias"]
            bias.assign(np.full(bias.shape, np.nan))
        return sums

    monkeypatch.setattr(TensorFlowEngine, "train_step", planted)
    run_flags = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 1, "num_train_steps": 3}
    assert run(*arguments(data, tmp_path / "run", **run_flags)) == 2
    error = capsys.readouterr().err
    assert "checkpoint-3 is not written" in error and error.count("\n") == 1
    assert f"start from {tmp_path}/run/checkpoint-2, the last good checkpoint" in error
    (saved,) = tmp_path.glob("run/checkpoint-*")
    assert saved.name == "checkpoint-2"
    for name in ("model.safetensors", "training.safetensors"):
        assert all(np.isfinite(values).all() for values in load_file(saved / name).values())


@pytest.mark.usefixtures("uncompiled")
def test_a_step_that_is_not_finite_is_left_out_and_its_records_are_told(data, tmp_path, capsys, monkeypatch):
    train_step = TensorFlowEngine.train_step
    tokens = []

    def planted(engine, batch, wants_stop):
        if int(engine.optimizer.iterations.numpy()) == 1:
            tokens.extend(batch["token_ids"].tolist())
            batch = {
                **batch,
                "slot_weights": np.where(batch["slot_weights"] > 0, np.inf, 0).astype("float32"),
            }
        return train_step(engine, batch, wants_stop)

    monkeypatch.setattr(TensorFlowEngine, "train_step", planted)
    folder = tmp_path / "run"
    assert run(*arguments(data, folder, num_train_steps=3, log_steps=1)) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert line.startswith("step 2 is left out, the weights stay: ")
    assert [row["skipped_steps"] for row in read_rows(folder / "metrics.csv")] == ["0", "1", "0"]
    assert [bool(row["loss"]) for row in read_rows(folder / "metrics.csv")] == [True, False, True]
    told = json.loads((folder / "skipped_steps.0.jsonl").read_text())
    assert told["step"] == 2 and "nsp_loss inf" in told["not_finite"]
    found = []
    for path, numbers in told["packs"].items():
        assert f"{path} {', '.join(map(str, numbers))}" in line
        packs = [
            tf.train.Example.FromString(record.numpy()).features.feature["input_ids"].int64_list.value
            for record in tf.data.TFRecordDataset(path)
        ]
        found += [list(packs[number - 1]) for number in numbers]
    assert sorted(found) == sorted(tokens)
    # the directory is still a run's own
    assert run(*arguments(data, folder, num_train_steps=3, log_steps=1)) == 0


def test_a_mistake_costs_an_earlier_run_nothing(data, uninterrupted, tmp_path, capsys):
    """With --overwrite the earlier run goes only when the new one is known to start."""
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    for change, message in (
        ({"init_checkpoint": f"{folder}/checkpoint-24"}, "`init_checkpoint` must be outside `output_dir`"),
        ({"init_checkpoint": f"{data}/none"}, "`init_checkpoint` must be a folder"),
        ({"input_file": f"{data}/none*"}, "must match at least one file"),
    ):
        assert run(*arguments(data, folder, **change), "--overwrite") == 2
        assert message in capsys.readouterr().err
        assert_same_run(folder, uninterrupted)


def test_other_flags_inputs_or_models_are_refused(data, uninterrupted, tmp_path, capsys):
    content = json.loads((data / "bert_config.json").read_text())
    (tmp_path / "relu.json").write_text(json.dumps({**content, "hidden_act": "relu"}))
    changes = {
        "learning_rate": 0.02,
        "eval_input_file": f"{data}/packed-0.tfrecord",
        "bert_config_file": tmp_path / "relu.json",
    }
    assert run(*arguments(data, uninterrupted, **changes)) == 2
    error = capsys.readouterr().err
    for named in (
        "learning_rate 0.01 -> 0.02",
        f"eval_input_file {data}/packed-0.tfrecord",
        "hidden_act of the model 'gelu' -> 'relu'",
    ):
        assert named in error
