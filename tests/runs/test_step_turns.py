"""Steps of several processes are taken in turns, whatever becomes of one of them; and the real process takes
the steps of a run's engine."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import MAX_SEQ_LENGTH, write_data

from bert_packed.runs import pretraining, step_turns, timed_step
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.runs.step_turns import TimedStep, time_steps

ROOT = Path(__file__).resolve().parents[2]
CONFIG = TrainConfig(input_file="a", output_dir="b", train_batch_size=6)
# Keeps to the protocol of `timed_step`, and does what `ACT` says; who steps when stands in `LOG`
STAND_IN = """
import json, os, sys, time
act, name = os.environ["ACT"], os.environ["NAME"]
assert "--train_batch_size=6" in open(sys.argv[1].partition("=")[2]).read().split()
def note(word):
    with open(os.environ["LOG"], "a") as file:
        file.write(f"{name} {word}\\n")
def answer(**what):
    print(json.dumps(what), flush=True)
note("started")
if act == "unknown":
    sys.exit("stand_in.py: error: Unknown flag")
print("7", flush=True)
print("a library greets", flush=True)
answer(on_cpu=os.environ["ON_CPU"] == "True")
if act == "hangs":
    time.sleep(60)
answer(ready=True)
for number, _ in enumerate(sys.stdin):
    if act == "dies" and number == 2:
        os.kill(os.getpid(), 9)
    note("steps")
    answer(seconds=float(act) * (number + 1) if act[0].isdigit() else 1.0)
note("ended")
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Function from acts by name, and arguments of `time_steps`, to what it gave and who did what when."""
    script, log = tmp_path / "stand_in.py", tmp_path / "log"
    script.write_text(STAND_IN)
    monkeypatch.setattr(step_turns, "COMMAND", (sys.executable, str(script)))

    def run(acts, *arguments, on_cpu=True, **keywords):
        steps = {
            name: TimedStep(CONFIG, {"ACT": act, "NAME": name, "LOG": str(log), "ON_CPU": str(on_cpu)})
            for name, act in acts.items()
        }
        found = time_steps(steps, *arguments, **keywords)
        return found, log.read_text().split("\n")[:-1]

    return run


def test_turns_go_round_and_back(play):
    found, log = play({"a": "1.0", "b": "0.5"}, 3)
    assert found == step_turns.StepTimes(True, {"a": [1.0, 2.0, 3.0], "b": [0.5, 1.0, 1.5]}, {})
    assert [line for line in log if "steps" in line] == [f"{name} steps" for name in "abbaab"]


def test_who_ends_is_left_out_with_its_reason(play):
    found, _ = play({"a": "1.0", "b": "unknown", "c": "dies", "d": "2.0"}, 4)
    assert found.seconds == {"a": [1, 2, 3, 4], "d": [2, 4, 6, 8]}
    assert found.failed == {"b": "stand_in.py: error: Unknown flag", "c": "killed by signal 9"}


def test_a_first_that_does_not_start_ends_it(play):
    found, log = play({"a": "unknown", "b": "1.0"}, 4)
    assert found == step_turns.StepTimes(None, {}, {"a": "stand_in.py: error: Unknown flag"})
    assert log == ["a started"]


def test_on_what_is_no_cpu_nothing_else_is_started(play):
    found, log = play({"a": "1.0", "b": "1.0"}, 4, only_on_cpu=True, on_cpu=False)
    assert found == step_turns.StepTimes(False, {}, {})
    assert "b started" not in log
    found, _ = play({"a": "1.0"}, 1, on_cpu=False)
    assert found.seconds == {"a": [1.0]}


def test_who_hangs_is_ended(play):
    found, _ = play({"a": "1.0", "b": "hangs", "c": "1.0"}, 2, seconds_to_be_ready=6)
    assert found.seconds == {"a": [1.0, 2.0], "c": [1.0, 2.0]}
    assert found.failed == {"b": "not ready after 6 s"}


def test_turns_end_with_the_time(play, monkeypatch):
    monkeypatch.setattr(step_turns.time, "monotonic", iter([0, 20, 30]).__next__)
    found, _ = play({"a": "1.0", "b": "1.0"}, 99, most_seconds=25)
    assert {name: len(its) for name, its in found.seconds.items()} == {"a": 7, "b": 7}


@pytest.mark.parametrize("act", ["hangs", "1.0"])
def test_nobody_is_left_when_it_is_interrupted(play, monkeypatch, act):
    processes = []

    def interrupt(*_):
        raise KeyboardInterrupt

    real = subprocess.Popen

    def start(*arguments, **keywords):
        processes.append(real(*arguments, **keywords))
        return processes[-1]

    monkeypatch.setattr(step_turns.subprocess, "Popen", start)
    if act == "hangs":  # while threads wait for them
        monkeypatch.setattr(step_turns, "list", interrupt, raising=False)
    else:
        monkeypatch.setattr(step_turns, "_take_turns", interrupt)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play({"a": "1.0", "b": act}, 2)
    assert time.monotonic() - begin < 30  # who hangs does so for a minute
    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)


def test_who_started_it_may_be_killed(tmp_path, uncompiled):
    """Its steps end with the lines that tell it to step."""
    write_data(tmp_path)
    answers = io.StringIO()
    assert timed_step.main(real_config(tmp_path), [], answers) is None
    assert [json.loads(line) for line in answers.getvalue().splitlines()][1:] == [{"ready": True}]


def test_who_is_killed_leaves_nobody(tmp_path):
    """Its steps end with the pipe that tells them to step, whoever was started after them."""
    script, log = tmp_path / "stand_in.py", tmp_path / "log"
    script.write_text(STAND_IN)
    code = (
        "import os, signal, sys, test_step_turns as t\n"
        f"t.step_turns.COMMAND = (sys.executable, {str(script)!r})\n"
        "t.step_turns._take_turns = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"environment = {{'ACT': '1.0', 'ON_CPU': 'True', 'LOG': {str(log)!r}}}\n"
        "steps = {name: t.TimedStep(t.CONFIG, {**environment, 'NAME': name}) for name in 'ab'}\n"
        "t.time_steps(steps, 2)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "runs")])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == -9
    limit = time.monotonic() + 60
    while log.read_text().count("ended") < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)


def real_config(folder, **changes):
    return TrainConfig(
        input_file=f"{folder}/packed-*.tfrecord",
        output_dir="-",
        bert_config_file=f"{folder}/bert_config.json",
        train_batch_size=4,
        micro_batch_size=2,
        **changes,
    )


@pytest.mark.both_backends
def test_a_step_is_one_of_the_run(tmp_path, monkeypatch, uncompiled):
    write_data(tmp_path)
    engines, taken, real = [], [], pretraining.build_engine

    def build(config, model_config, data):
        engines.append((config, real(config, model_config, data)))
        engine = engines[-1][1]
        step = engine.train_step

        def train_step(batch):
            before = np.array(engine.model.trainable_variables[0])
            time.sleep(0.05)
            sums = step(batch)
            taken.append((batch, not np.array_equal(before, engine.model.trainable_variables[0])))
            return sums

        engine.train_step = train_step
        return engine

    monkeypatch.setattr(pretraining, "build_engine", build)
    answers = io.StringIO()
    config = real_config(tmp_path, remat=True, hidden_dropout_prob=0.25, ablation="no_position_reset")
    timed_step.main(config, ["\n"] * 3, answers)
    platform, ready, *steps = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert (platform, ready) == ({"on_cpu": True}, {"ready": True})
    ((given, engine),) = engines
    assert given == config and engine._micro_batch_size == 2 and engine.model.bert.remat
    assert engine.model.config.hidden_dropout_prob == 0.25
    assert engine.model.config.ablation_no_position_reset
    assert len(taken) == 5 and len(steps) == 3  # two before it is ready
    assert all(list(step) == ["seconds"] and 0.05 < step["seconds"] < 60 for step in steps)
    for batch, moved in taken:
        assert moved
        assert batch["token_ids"].shape == (4, MAX_SEQ_LENGTH)
        assert (batch["sequence_ids"].max(axis=1) > 1).any()  # packs, not padding
        assert batch["prediction_ids"].any()


@pytest.mark.slow
@pytest.mark.both_backends
def test_real_processes_take_real_steps(tmp_path, monkeypatch):
    """In another working directory, with a module there that would hide one of Python's."""
    write_data(tmp_path)
    (tmp_path / "types.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(real_config(tmp_path), num_train_steps=77)
    own = os.environ.get("XLA_FLAGS", "")
    found = time_steps(
        {
            "as it is": TimedStep(config, {}),
            "unknown": TimedStep(config, {"XLA_FLAGS": f"{own} --xla_no_such_flag=1"}),
        },
        2,
        only_on_cpu=True,
    )
    assert len(found.seconds["as it is"]) == 2 and min(found.seconds["as it is"]) > 0
    assert "xla_no_such_flag" in found.failed["unknown"]
