"""Learning curves: which runs there are, what their logs say, and runs that are stopped and gone on with."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from curve_logs import a_run, write_log
from tiny import CONFIG

from bert_packed.reports import curve_runs, learning_curves, taken_runs
from bert_packed.reports.curve_runs import SETS, VARIANTS, make_runs
from bert_packed.reports.learning_curves import CurvesConfig
from bert_packed.reports.synthetic_data import VOCAB_SIZE, write_sequences
from bert_packed.reports.taken_runs import command_of, is_complete, take
from bert_packed.runs.pretraining_config import TrainConfig
from data_gen.assembly.pack_config import PackConfig
from data_gen.assembly.pack_job import pack
from data_gen.cli.command_line import parse, run
from data_gen.cli.settings import InputError

ROOT = Path(__file__).resolve().parents[2]
GIVEN = {"packed_file": "p", "unpacked_file": "u", "eval_file": "e", "output_dir": "o"}
ALL = {**GIVEN, "sets": ",".join(SETS)}
TIMED = ("sequences_per_second", "tokens_per_second", "data_wait_share", "model_flop_utilisation")


def command(*flags):
    return run(
        learning_curves.main, CurvesConfig, learning_curves.DESCRIPTION, ["learning_curves", *map(str, flags)]
    )


def settings_of(one):
    """The `TrainConfig` that a run's command line means."""
    return parse(TrainConfig, command_of(one, "o")[1:])


def test_each_variant_is_what_it_is_called():
    config = CurvesConfig(**ALL, seeds="7", sequences_per_step=60, num_sequences=6000, num_points=10)
    runs = {one.variant: one for one in make_runs(config, 2.5)}
    assert list(runs) == list(VARIANTS) and len(VARIANTS) == 10
    made = {name: settings_of(one) for name, one in runs.items()}
    base = made["unpacked"]
    assert (base.train_batch_size, base.num_train_steps, base.num_warmup_steps) == (60, 100, 10)
    assert (base.input_file, base.eval_input_file, base.output_dir) == ("u", "e", "o/unpacked-seed7")
    assert (base.eval_steps, base.log_steps, base.save_checkpoints_steps) == (10, 10, 10)

    def changes(name, of="unpacked"):
        old, new = dataclasses.asdict(made[of]), dataclasses.asdict(made[name])
        return {key: new[key] for key in new if new[key] != old[key] and key != "output_dir"}

    assert changes("packed") == {"input_file": "p", "train_batch_size": 24}
    fewer = {"num_train_steps": 40, "num_warmup_steps": 4}
    points = dict.fromkeys(("eval_steps", "log_steps", "save_checkpoints_steps"), 4)
    assert changes("packed_same_batch") == {"input_file": "p", **fewer, **points}
    assert changes("packed_betas", "packed_same_batch") == {"packing_correction": "betas"}
    assert changes("packed_learning_rate", "packed_same_batch") == {"learning_rate": 2.5 * 5e-3}
    half = {"num_train_steps": 50, "num_warmup_steps": 5}
    assert changes("unpacked_twice") == {
        "train_batch_size": 120,
        "beta_1": pytest.approx(0.81),
        "beta_2": pytest.approx(0.998001),
        **half,
        **dict.fromkeys(points, 5),
    }
    for name in SETS["ablations"][1:]:
        assert changes(name, "packed") == {"ablation": name}
    assert not any(made[name].ablation for name in made if name not in SETS["ablations"][1:])
    for name, one in runs.items():  # as many sequences for each
        assert one.sequences_per_step * made[name].num_train_steps == pytest.approx(6000)


def test_batches_are_whole_micro_batches_and_their_steps_make_up_for_it():
    config = CurvesConfig(
        **GIVEN, seeds="1", sequences_per_step=64, micro_batch_size=16, num_sequences=64_000
    )
    unpacked, packed = (settings_of(one) for one in make_runs(config, 2.3))
    assert (unpacked.train_batch_size, packed.train_batch_size) == (64, 32)
    assert packed.num_train_steps == round(64_000 / 32 / 2.3) and packed.micro_batch_size == 16


def test_seed_comes_after_seed_and_more_flags_last():
    config = CurvesConfig(**GIVEN, seeds="3,5", only="packed,unpacked")
    more = "--masking=dynamic --vocab_file='my words.txt'"
    runs = make_runs(dataclasses.replace(config, run_flags=more), 2.0)
    assert [one.name for one in runs] == [
        "unpacked-seed3",
        "packed-seed3",
        "unpacked-seed5",
        "packed-seed5",
    ]
    assert [settings_of(one).random_seed for one in runs] == [3, 3, 5, 5]
    line = command_of(runs[0], "o")
    assert line[0] == sys.executable and Path(line[1]) == ROOT / "run_pretraining.py"
    assert line[-2:] == ["--masking=dynamic", "--vocab_file=my words.txt"]


def test_a_run_is_complete_with_its_last_rows_under_its_flags(tmp_path):
    one, folder = a_run(), tmp_path / "packed-seed1"
    assert not is_complete(one, tmp_path)
    for log in ("metrics.csv", "eval_metrics.csv"):
        write_log(folder / log, [(3, 9, 8.0, 0.1, "")])
    assert not is_complete(one, tmp_path)
    (folder / "run.json").write_text(json.dumps({"flags": dict(one.flags)}))
    assert is_complete(one, tmp_path)
    write_log(folder / "eval_metrics.csv", [(2, 9, 8.0, 0.1, "")])
    assert not is_complete(one, tmp_path)
    write_log(folder / "eval_metrics.csv", [(3, 9, 8.0, 0.1, "")])
    assert is_complete(a_run(more_flags="--keep_checkpoint_max=5"), tmp_path)  # on which nothing depends
    assert not is_complete(a_run(more_flags="--masking=dynamic"), tmp_path)
    (folder / "run.json").write_text(json.dumps({"flags": {**one.flags, "random_seed": 2}}))
    assert not is_complete(one, tmp_path)


def script(monkeypatch, tmp_path, text):
    """Let a Python script stand in for `run_pretraining.py`."""
    (tmp_path / "run_pretraining.py").write_text(text)
    monkeypatch.setattr(taken_runs, "TOP", tmp_path)


def test_what_a_command_says_is_kept_and_its_failure_told(monkeypatch, tmp_path):
    script(monkeypatch, tmp_path, "import sys\nprint('started', sys.argv[-1])\n")
    assert take(a_run(more_flags="--dtype=float32"), tmp_path / "runs") == 0
    assert take(a_run(more_flags="--dtype=float32"), tmp_path / "runs") == 0
    log = tmp_path / "runs" / "packed-seed1.log"
    assert log.read_text() == 2 * "started --dtype=float32\n"
    script(monkeypatch, tmp_path, "import sys\nsys.exit('no such file')\n")
    with pytest.raises(InputError, match=r"status 1 of packed-seed1; .*\.log ends with: no such file"):
        take(a_run(), tmp_path / "runs")
    script(monkeypatch, tmp_path, "import sys\nsys.exit(130)\n")
    assert take(a_run(), tmp_path / "runs") == 130
    script(monkeypatch, tmp_path, "import os\nos.kill(os.getpid(), 15)\n")
    assert take(a_run(), tmp_path / "runs") == 143


def test_a_signal_is_handed_on_and_handlers_come_back(monkeypatch, tmp_path):
    """The stand-in asks for the signal, and says which it got."""
    text = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    script(monkeypatch, tmp_path, text)
    before = signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    assert take(a_run(), tmp_path / "runs") == 143
    assert time.monotonic() - start < 30
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The flags of records packed and unpacked, and of a model for them."""
    folder = tmp_path_factory.mktemp("curves")
    paths = write_sequences(folder / "sequences", 60, 32, num_files=1)
    for name, depth in (("packed", "max"), ("unpacked", 1)):
        (folder / name).mkdir()
        pack(
            PackConfig(
                input_file=paths[0],
                output_dir=str(folder / name),
                max_seq_length=32,
                max_sequences_per_pack=depth,
                num_shards=1,
            )
        )
    model = dataclasses.replace(
        CONFIG,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        max_position_embeddings=32,
        hidden_dropout_prob=0.1,
    )
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(model)))
    return {
        "packed_file": f"{folder}/packed/*.tfrecord",
        "unpacked_file": f"{folder}/unpacked/*.tfrecord",
        "eval_file": f"{folder}/unpacked/*.tfrecord",
        "bert_config_file": f"{folder}/bert_config.json",
    }


def as_flags(**values):
    return [f"--{name}={value}" for name, value in values.items()]


def test_only_what_is_not_complete_is_taken_and_all_is_drawn(records, monkeypatch, tmp_path, capsys):
    """Without training: logs as runs leave them."""
    taken = []

    def finish(one, folder):
        taken.append((one.name, one.more_flags))
        if one.name == "unpacked-seed2":
            return 143
        last = one.flags["num_train_steps"]
        for log in ("metrics.csv", "eval_metrics.csv"):
            path = Path(folder) / one.name / log
            path.parent.mkdir(parents=True, exist_ok=True)
            write_log(path, [(last // 2, 9, 8.0, 0.1, 5), (last, 9, 7.0, 0.2, 5)])
        (path.parent / "run.json").write_text(json.dumps({"flags": one.flags}))
        return 0

    monkeypatch.setattr(taken_runs, "take", finish)
    flags = as_flags(
        **records,
        output_dir=tmp_path / "all",
        seeds="1,2",
        num_sequences=80,
        sequences_per_step=8,
        run_flags="--dtype=float32",
        json=tmp_path / "table.json",
    )
    assert command(*flags, "--draw_only") == 0
    assert not taken and not (tmp_path / "all" / "same_sequences.png").exists()
    assert command(*flags) == 143
    names = ["unpacked-seed1", "packed-seed1", "unpacked-seed2"]  # and none after it
    assert taken == [(name, "--dtype=float32") for name in names]
    assert command(*flags) == 143
    assert [name for name, _ in taken[3:]] == ["unpacked-seed2"]
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["target accuracy"] == pytest.approx(0.19)
    assert [(row["variant"], row["seeds complete"]) for row in table["runs"]] == [
        ("unpacked", 1),
        ("packed", 1),
    ]
    assert (tmp_path / "all" / "same_sequences.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "all" / "curves.csv").read_text().splitlines()) == 1 + 2 * 4
    capsys.readouterr()
    assert command(*flags, "--print_commands") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and all("run_pretraining.py" in line for line in printed)


@pytest.mark.slow
def test_stopped_curves_go_on_to_what_they_would_have_been(records, tmp_path):
    """Real runs: SIGTERM in the middle of the first, then the same command, against one left alone."""
    values = {
        **records,
        "seeds": "1",
        "num_sequences": 2400,
        "sequences_per_step": 8,
        "num_points": 6,
        "max_eval_steps": 2,
    }
    line = [sys.executable, "-m", "bert_packed.reports.learning_curves"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"

    def start(folder):
        flags = as_flags(**values, output_dir=folder)
        return subprocess.Popen([*line, *flags], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)

    assert start(whole).wait(600) == 0
    process = start(stopped)
    log = stopped / "unpacked-seed1" / "metrics.csv"
    deadline = time.monotonic() + 300
    while not (log.exists() and len(log.read_text().splitlines()) > 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    half = (stopped / "curves.csv").read_text().splitlines()
    assert 1 < len(half) < len((whole / "curves.csv").read_text().splitlines())
    assert not (stopped / "packed-seed1").exists()
    assert start(stopped).wait(600) == 0
    segments = json.loads((stopped / "unpacked-seed1" / "run.json").read_text())["segments"]
    assert len(segments) == 2 and segments[1]["first_step"] > 0
    for name in ("unpacked-seed1", "packed-seed1"):
        for file in ("metrics.csv", "eval_metrics.csv"):
            logs = [(folder / name / file).read_text().splitlines() for folder in (whole, stopped)]
            rows = [list(csv.DictReader(lines)) for lines in logs]
            for row in (*rows[0], *rows[1]):
                for column in TIMED:
                    row.pop(column, None)
            assert len(rows[0]) == 6 and rows[0] == rows[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_file": ""}, "`eval_file` must be given"),
        ({"sets": "same"}, "`sets` must be different ones of same_sequences, same_batch, ablations"),
        ({"only": "packed_betas"}, "`only` must be of `sets`=same_sequences"),
        ({"only": "x"}, "`only` must be different ones of unpacked, packed"),
        ({"seeds": "1,01"}, "`seeds` must be different whole numbers"),
        (
            {"sequences_per_step": 10, "micro_batch_size": 4},
            "`micro_batch_size` must divide sequences_per_step",
        ),
    ],
)
def test_mistakes_in_flags_are_told(changes, message):
    with pytest.raises(InputError, match=message):
        CurvesConfig(**{**GIVEN, **changes})


def test_a_mistake_in_the_flags_of_runs_shows_before_the_first(records, tmp_path, capsys):
    flags = as_flags(**records, output_dir=tmp_path / "all", run_flags="--masking=never")
    assert command(*flags) == 2
    assert "masking" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_data_that_are_not_the_same_are_refused(records, tmp_path, capsys):
    flags = {**records, "output_dir": tmp_path / "all"}
    assert command(*as_flags(**{**flags, "unpacked_file": flags["packed_file"]})) == 2
    assert "`unpacked_file` must hold the 60 sequences of packed_file at depth 1" in capsys.readouterr().err
    lonely = tmp_path / "lonely.tfrecord"
    lonely.write_bytes(next(Path(records["packed_file"]).parent.glob("*.tfrecord")).read_bytes())
    assert command(*as_flags(**{**flags, "packed_file": lonely})) == 2
    assert "`packed_file` must have manifest.json beside it" in capsys.readouterr().err


def test_ablations_are_those_of_the_training_command():
    from bert_packed.config import ABLATIONS

    assert curve_runs.SETS["ablations"] == ("packed", *ABLATIONS)
