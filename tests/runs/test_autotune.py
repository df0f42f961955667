"""When a run measures XLA's ways, which it takes, and that it has them again when it continues."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from pretraining_command import arguments, run, write_all
from tiny import CONFIG

from bert_packed.config import load_model_config
from bert_packed.runs import autotune, run_directory, xla_ways
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.runs.step_turns import StepTimes
from bert_packed.runs.xla_ways import DEFAULT, NO_YNNPACK, WAYS, WIDE_VECTORS
from data_gen.schema import PackSpec

ROOT = Path(__file__).resolve().parents[2]
LONG = {"num_train_steps": 10**11, "num_warmup_steps": 0}  # of a tiny model
DATA = types.SimpleNamespace(train=types.SimpleNamespace(spec=PackSpec(512, 3, 85), num_rows=0))
HERE = {"cpu": "a CPU", "cores": 2, "backend": "tensorflow", "versions": {"keras": "3"}}
WIDE = WAYS[WIDE_VECTORS]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A CPU with wide vectors, and no flags of the tests' own."""
    # In this module alone: the tests' programs keep theirs
    stand_in = types.SimpleNamespace(environ={"XLA_FLAGS": ""}, path=os.path)
    monkeypatch.setattr(autotune, "os", stand_in)
    monkeypatch.setattr(xla_ways, "has_wide_vectors", lambda: True)
    monkeypatch.setattr(autotune, "cpu_name", lambda: HERE["cpu"])
    monkeypatch.setattr(autotune, "num_cores", lambda: HERE["cores"])
    monkeypatch.setattr(autotune, "PACKAGES", dict.fromkeys(("tensorflow", "jax"), ("keras",)))
    monkeypatch.setattr(keras, "__version__", "3")


@pytest.fixture
def timed(monkeypatch):
    """What was to be timed; steps take 1 s, or 0.5 s with wide vectors."""
    calls = []

    def time_steps(steps, num_turns, most_seconds, only_on_cpu, seconds_to_be_ready):
        calls.append(steps)
        assert only_on_cpu and num_turns >= 6 and most_seconds and seconds_to_be_ready
        return StepTimes(True, {n: [0.5 if n == WIDE_VECTORS else 1.0] * num_turns for n in steps}, {})

    monkeypatch.setattr(autotune, "time_steps", time_steps)
    return calls


def choose(folder, latest=None, backend="tensorflow", tell=lambda _: None, **flags):
    config = TrainConfig(input_file="a", output_dir=str(folder), **{**LONG, **flags})
    return autotune.choose_flags(config, CONFIG, DATA, folder, latest, backend, tell)


def continued(folder, *segments):
    """A run's folder with these segments on record: its checkpoint at step 7."""
    (folder / run_directory.RUN_FILE).write_text(json.dumps({"segments": list(segments)}))
    return folder / "checkpoint-7"


def test_the_fastest_is_set_and_told(tmp_path, timed):
    told = []
    found = choose(tmp_path, tell=told.append)
    assert autotune.os.environ["XLA_FLAGS"] == found["xla_flags"] == WIDE
    assert found["machine"] == HERE
    assert list(timed[0]) == [DEFAULT, WIDE_VECTORS]
    assert [step.environment for step in timed[0].values()] == [{"XLA_FLAGS": ""}, {"XLA_FLAGS": WIDE}]
    assert [row["times as long"] for row in found["xla_ways"]] == [1.0, 0.5]
    assert "vectors of 512 bits: 0.50 of the time (0.50 to 0.50, 11 turns)" in told[-1]


def test_jax_is_tried_without_its_own_products_too(tmp_path, timed, monkeypatch):
    choose(tmp_path, backend="jax")
    autotune.os.environ["XLA_FLAGS"] = ""
    monkeypatch.setattr(xla_ways, "has_wide_vectors", lambda: False)
    choose(tmp_path, backend="jax")
    assert [list(steps) for steps in timed] == [[DEFAULT, WIDE_VECTORS, NO_YNNPACK], [DEFAULT, NO_YNNPACK]]


@pytest.mark.parametrize(
    "flags",
    [
        {"autotune": False},
        {"distribution": "mirrored"},
        {"layout": "optimus2d", "mesh": "2,2"},
    ],
)
def test_nothing_is_measured(tmp_path, timed, flags):
    assert choose(tmp_path, **flags) == {"xla_flags": ""}
    assert timed == [] and autotune.os.environ["XLA_FLAGS"] == ""


def test_packs_of_rows_are_not_measured(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(DATA.train, "num_rows", 16)
    assert choose(tmp_path) == {"xla_flags": ""}
    assert timed == []


def test_a_short_run_stays_as_it_is_by_choice(tmp_path, timed):
    assert choose(tmp_path, num_train_steps=100) == {"machine": HERE, "xla_flags": "", "xla_ways": []}
    assert timed == []


def test_flags_of_the_environment_stay(tmp_path, timed, monkeypatch):
    autotune.os.environ["XLA_FLAGS"] = "--mine"
    assert choose(tmp_path) == {"xla_flags": "--mine"}
    assert timed == [] and autotune.os.environ["XLA_FLAGS"] == "--mine"


def test_where_there_is_nothing_to_try_nothing_is_started(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(xla_ways, "has_wide_vectors", lambda: False)
    assert choose(tmp_path)["xla_flags"] == ""
    assert timed == []


@pytest.mark.parametrize("flags", [WIDE, ""])
def test_a_run_continues_as_it_was_on_this_machine(tmp_path, timed, flags):
    other = {**HERE, "cpu": "another"}
    latest = continued(
        tmp_path,
        {"machine": HERE, "xla_flags": "--older"},
        {"machine": HERE, "xla_flags": flags},
        {"machine": other, "xla_flags": "--others"},
        {"xla_flags": "--of the environment, once"},
    )
    told = []
    assert choose(tmp_path, latest, tell=told.append) == {"machine": HERE, "xla_flags": flags, "xla_ways": []}
    assert timed == [] and autotune.os.environ["XLA_FLAGS"] == flags
    assert len(told) == bool(flags)


@pytest.mark.parametrize(
    "change", [{"cpu": "another"}, {"cores": 4}, {"backend": "jax"}, {"versions": {"keras": "4"}}]
)
def test_on_another_machine_it_measures_anew(tmp_path, timed, change):
    latest = continued(tmp_path, {"machine": {**HERE, **change}, "xla_flags": "--others"})
    assert choose(tmp_path, latest)["xla_flags"] == WIDE
    assert len(timed) == 1


def test_a_run_of_before_there_was_a_choice_stays_as_it_is(tmp_path, timed):
    for segments in ([], [{"backend": "tensorflow"}], [{"xla_flags": "--of the environment"}]):
        assert choose(tmp_path, continued(tmp_path, *segments)) == {"xla_flags": ""}
    assert timed == []


def test_what_is_left_of_a_run_counts(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(autotune, "_numpy_rate", lambda: 1e9)
    one = autotune._expected_seconds(TrainConfig(input_file="a", output_dir="b", **LONG), CONFIG, DATA, 0)
    steps = int(autotune.LEAST_RUN_SECONDS / one * LONG["num_train_steps"]) + 1  # half an hour
    latest = continued(tmp_path, {"machine": {**HERE, "cpu": "another"}, "xla_flags": ""})
    for extra, measured in ((6, 0), (7, 1)):  # 7 are done
        choose(tmp_path, latest, num_train_steps=steps + extra)
        autotune.os.environ["XLA_FLAGS"] = ""
        assert len(timed) == measured, extra


def test_numpys_rate_is_work_over_the_least_time(monkeypatch):
    times = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: next(times))
    assert autotune._numpy_rate(size=8, repeats=3) == 2 * 8**3 / 0.5


@pytest.mark.parametrize(
    ("on_cpu", "seconds", "failed"),
    [
        (False, {}, {}),
        (None, {}, {DEFAULT: "why"}),
        (True, {WIDE_VECTORS: [0.5] * 6}, {DEFAULT: "why"}),
        (True, {DEFAULT: [1.0] * 5, WIDE_VECTORS: [0.5] * 5}, {}),
    ],
)
def test_without_enough_times_as_it_is_nothing_is_chosen(tmp_path, monkeypatch, on_cpu, seconds, failed):
    monkeypatch.setattr(autotune, "time_steps", lambda *_: StepTimes(on_cpu, seconds, failed))
    told = []
    assert choose(tmp_path, tell=told.append)["xla_flags"] == ""
    assert any("was not timed: why" in line for line in told) == bool(failed)
    assert told[-1] == "xla        as it is" + (": this is no CPU" if on_cpu is False else "")


def test_a_full_disk_is_no_reason_not_to_train(tmp_path, monkeypatch):
    def time_steps(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(autotune, "time_steps", time_steps)
    told = []
    assert choose(tmp_path, tell=told.append)["xla_flags"] == ""
    assert "No space left on device" in told[-1]


def test_a_way_that_ends_is_told_and_left_out(tmp_path, monkeypatch):
    found = StepTimes(True, {DEFAULT: [1.0] * 6}, {WIDE_VECTORS: "Unknown flag"})
    monkeypatch.setattr(autotune, "time_steps", lambda *_: found)
    told = []
    chosen = choose(tmp_path, tell=told.append)
    assert chosen["xla_flags"] == "" and chosen["xla_ways"][1]["times as long"] is None
    assert told[1:] == [
        "xla        vectors of 512 bits was not timed: Unknown flag",
        "xla        as it is: none of them is clearly faster here",
    ]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.9] * 9, "b"),
        ([0.98] * 9, "a"),  # surely faster, by too little
        ([0.8] * 5 + [1.1] * 4, "a"),  # by its median faster, and not surely
        ([0.8] * 8 + [1.1], "b"),  # one slow turn of nine is outside of the interval
        ([1.2] * 9, "a"),
    ],
)
def test_another_way_must_be_clearly_faster(ratios, expected):
    seconds = {"a": [2.0] * 9, "b": [2 * ratio for ratio in ratios]}
    rows = xla_ways.way_rows(seconds)
    assert autotune.fastest(rows)["XLA_FLAGS"] == expected
    assert rows[1]["step, s"] == 2 * np.median(ratios)
    assert rows[1]["times as long"] == pytest.approx(np.median(ratios))


def test_the_fastest_of_several_is_taken():
    seconds = {"a": [1.0] * 6, "b": [0.8] * 6, "c": [0.7] * 6, "d": []}
    assert autotune.fastest(xla_ways.way_rows(seconds))["XLA_FLAGS"] == "c"


@pytest.mark.parametrize(("model", "packs"), [("bert-base", 2), ("mamba-tiny", 2)])
def test_the_trial_is_a_small_step_of_the_run(tmp_path, model, packs):
    objective = {"objective": "causal_lm"} if "mamba" in model else {}
    config = TrainConfig(
        input_file="a",
        output_dir="b",
        bert_config_file=model,
        train_batch_size=64,
        micro_batch_size=32,
        **objective,
        optimizer="adam",
        dtype="mixed_bfloat16",
        remat=True,
        max_grad_norm=0.0,
        mlm_loss="per_token",
        lm_loss="per_sequence",
        attention="dense",
        init_checkpoint="c",
        eval_input_file="d",
        eval_steps=3,
        export_every=4,
    )
    whole = load_model_config(model, 1234)
    whole = dataclasses.replace(whole, ablation_no_position_reset=True)
    if "bert" in model:
        whole = dataclasses.replace(whole, hidden_dropout_prob=0.3)
    trial = autotune.trial_config(config, whole, DATA, str(tmp_path))
    blocks = dataclasses.replace(whole, num_hidden_layers=2)
    assert load_model_config(trial.bert_config_file) == blocks
    assert trial == TrainConfig(
        input_file="a",
        output_dir="-",
        bert_config_file=trial.bert_config_file,
        train_batch_size=packs,
        **objective,
        optimizer="adam",
        dtype="mixed_bfloat16",
        remat=True,
        max_grad_norm=0.0,
        mlm_loss="per_token",
        lm_loss="per_sequence",
        attention="dense",
        autotune=False,
    )


def test_the_trial_is_no_larger_than_the_step(tmp_path):
    long = types.SimpleNamespace(train=types.SimpleNamespace(spec=PackSpec(8192, 3, 85), num_rows=0))
    config = TrainConfig(input_file="a", output_dir="b", train_batch_size=3)
    assert (
        autotune.trial_config(
            dataclasses.replace(config, train_batch_size=1), CONFIG, DATA, str(tmp_path)
        ).train_batch_size
        == 1
    )
    assert autotune.trial_config(config, CONFIG, long, str(tmp_path)).train_batch_size == 1


def test_a_run_keeps_what_it_chose_and_has_it_again(tmp_path, monkeypatch, timed, capsys, uncompiled):
    """The command itself; whether flags reach XLA another test sees."""
    monkeypatch.setattr(autotune, "LEAST_RUN_SECONDS", 0)
    (tmp_path / "data").mkdir()
    write_all(tmp_path / "data")
    flags = {"num_train_steps": 2, "eval_steps": 0, "save_checkpoints_steps": 1}
    assert run(*arguments(tmp_path / "data", tmp_path / "run", **flags)) == 0
    (segment,) = run_directory.read_segments(tmp_path / "run")
    assert segment["machine"]["cpu"] == "a CPU"
    assert segment["xla_flags"] == WIDE and [row["XLA_FLAGS"] for row in segment["xla_ways"]]
    assert "autotune" in capsys.readouterr().out and len(timed) == 1
    # the checkpoint of step 2 goes, and the run continues from that of step 1
    for path in (tmp_path / "run" / "checkpoint-2").iterdir():
        path.unlink()
    (tmp_path / "run" / "checkpoint-2").rmdir()
    autotune.os.environ["XLA_FLAGS"] = ""
    assert run(*arguments(tmp_path / "data", tmp_path / "run", **flags)) == 0
    assert len(timed) == 1 and autotune.os.environ["XLA_FLAGS"] == WIDE
    assert [one["xla_flags"] for one in run_directory.read_segments(tmp_path / "run")] == [WIDE, WIDE]


@pytest.mark.slow
@pytest.mark.both_backends
def test_the_flags_reach_xla(tmp_path):
    """A flag that no XLA knows, chosen as the fastest, ends the process that would compile with it."""
    write_all(tmp_path)
    script = tmp_path / "command.py"
    script.write_text(
        "from bert_packed.runs import autotune\n"
        "from bert_packed.runs.step_turns import StepTimes\n"
        "autotune.LEAST_RUN_SECONDS = 0\n"
        "autotune.ways_to_try = lambda backend: ['as it is', 'no YNNPACK']\n"
        "autotune.WAYS['no YNNPACK'] = '--xla_no_such_flag=1'\n"
        "autotune.time_steps = lambda steps, *_: StepTimes(\n"
        "    True, {name: [1.0 - i / 2] * 6 for i, name in enumerate(steps)}, {}\n"
        ")\n"
        "import run_pretraining\n"
        "raise SystemExit(run_pretraining.command())\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), *arguments(tmp_path, tmp_path / "run")]
    done = subprocess.run(
        command,
        env={**os.environ, "XLA_FLAGS": "", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in done.stderr
