"""Learning curves: what is taken, drawn and told of a set of runs, stopped ones among them."""

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
from curve_logs import write_log
from tiny import CONFIG

from benchmarks import learning_curves, planned_runs, taken_runs
from benchmarks.learning_curves import CurvesConfig
from benchmarks.synthetic_data import VOCAB_SIZE, write_sequences
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

ROOT = Path(__file__).resolve().parents[2]
GIVEN = {"packed_file": "p", "unpacked_file": "u", "eval_file": "e", "output_dir": "o"}
TIMED = ("sequences_per_second", "tokens_per_second", "data_wait_share", "model_flop_utilisation")


def command(*flags):
    return run(
        learning_curves.main, CurvesConfig, learning_curves.DESCRIPTION, ["learning_curves", *map(str, flags)]
    )


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


def finish(one, folder):
    """Leave what a run leaves that came to its end; 0, as `take`."""
    last = one.flags["num_train_steps"]
    path = Path(folder) / one.name
    path.mkdir(parents=True, exist_ok=True)
    for log in ("metrics.csv", "eval_metrics.csv"):
        write_log(path / log, [(last // 2, 9, 8.0, 0.1, 5), (last, 9, 7.0, 0.2, 5)])
    kept = dataclasses.asdict(planned_runs.settings_of(one, folder))
    (path / "run.json").write_text(json.dumps({"flags": kept}))
    return 0


def test_only_what_is_not_complete_is_taken_and_all_is_drawn(records, monkeypatch, tmp_path, capsys):
    """Without training: logs as runs leave them."""
    taken = []

    def finish_or_stop(one, folder):
        taken.append((one.name, one.more_flags))
        return 143 if one.name == "unpacked-seed2" else finish(one, folder)

    monkeypatch.setattr(taken_runs, "take", finish_or_stop)
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


def drawn(folder):
    """(variant, seed, least and most sequences) of the curves in curves.csv: set."""
    with (folder / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["variant"], row["seed"]) for row in rows}
    return {
        (*key, max(float(row["sequences"]) for row in rows if (row["variant"], row["seed"]) == key))
        for key in found
    }


def test_a_part_is_taken_and_the_whole_is_drawn(records, monkeypatch, tmp_path):
    """A second process that takes one variant or seed leaves the others' curves where they are drawn."""
    monkeypatch.setattr(taken_runs, "take", finish)
    folder = tmp_path / "all"
    flags = as_flags(**records, output_dir=folder, num_sequences=80, sequences_per_step=8)
    table = tmp_path / "table.json"
    assert command(*flags, "--seeds=1,3", f"--json={table}") == 0
    whole = {(variant, seed) for variant in ("unpacked", "packed") for seed in "13"}
    assert {key[:2] for key in drawn(folder)} == whole
    before = (folder / "same_sequences.png").read_bytes()
    assert command(*flags, "--seeds=1", "--only=packed", f"--json={table}") == 0
    assert {key[:2] for key in drawn(folder)} == whole
    assert (folder / "same_sequences.png").read_bytes() == before
    rows = json.loads(table.read_text())["runs"]
    assert [(row["variant"], row["seeds complete"], row["of"]) for row in rows] == [
        ("unpacked", 2, 2),
        ("packed", 2, 2),
    ]
    assert command(*flags, "--seeds=2", "--only=unpacked") == 0  # a new one, beside them
    assert {key[:2] for key in drawn(folder)} == whole | {("unpacked", "2")}
    assert not (folder / "packed-seed2").exists()


def test_runs_made_under_other_flags_are_named_and_left_out(records, monkeypatch, tmp_path, capsys):
    """Their steps stand for other numbers of sequences."""
    monkeypatch.setattr(taken_runs, "take", finish)
    folder = tmp_path / "all"
    flags = as_flags(**records, output_dir=folder, num_sequences=80, seeds=1)
    assert command(*flags, "--sequences_per_step=8") == 0
    assert {key[2] for key in drawn(folder)} == {80.0}
    capsys.readouterr()
    assert command(*flags, "--sequences_per_step=16", "--draw_only") == 0
    assert drawn(folder) == set()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    for line, name, batch in zip(told, ("unpacked", "packed"), (8, 6), strict=True):
        assert line.startswith(f"{name}-seed1 is left out: its run.json has train_batch_size={batch}, ")
    assert command(*flags, "--sequences_per_step=8", "--draw_only") == 0 and len(drawn(folder)) == 2


def test_a_target_that_is_given_is_the_one_that_is_told(records, monkeypatch, tmp_path):
    monkeypatch.setattr(taken_runs, "take", finish)
    flags = as_flags(**records, output_dir=tmp_path / "all", num_sequences=80, sequences_per_step=8, seeds=1)
    table = tmp_path / "table.json"
    assert command(*flags, "--target_accuracy=0.15", f"--json={table}") == 0
    found = json.loads(table.read_text())
    assert found["target accuracy"] == 0.15
    # half way between the evaluations at 40 and at 80 sequences
    assert [row["sequences to target"] for row in found["runs"]] == [pytest.approx(60)] * 2


def test_what_is_there_is_drawn_when_a_run_fails(records, monkeypatch, tmp_path, capsys):
    def fail(one, folder):
        finish(one, folder)
        raise InputError("every run must end well. Received: a stand-in.")

    monkeypatch.setattr(taken_runs, "take", fail)
    flags = as_flags(**records, output_dir=tmp_path / "all", num_sequences=80, sequences_per_step=8)
    assert command(*flags) == 2
    assert "a stand-in" in capsys.readouterr().err
    assert {key[:2] for key in drawn(tmp_path / "all")} == {("unpacked", "1")}
    assert (tmp_path / "all" / "same_sequences.png").exists()


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
    line = [sys.executable, "-m", "benchmarks.learning_curves"]
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
            "`micro_batch_size` must divide `sequences_per_step`",
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


def test_packs_and_rows_may_differ_in_length_but_not_in_sequences(records, tmp_path, capsys):
    def make(name, **changes):
        paths = write_sequences(tmp_path / f"{name}_sequences", 60, 32, num_files=1, **changes)
        (tmp_path / name).mkdir()
        sizes = {"max_seq_length": 40, "max_sequences_per_pack": 1, "num_shards": 1}
        pack(PackConfig(input_file=paths[0], output_dir=str(tmp_path / name), **sizes))
        return f"{tmp_path / name}/*.tfrecord"

    flags = {**records, "output_dir": tmp_path / "all", "print_commands": True}
    assert command(*as_flags(**{**flags, "unpacked_file": make("longer")})) == 0
    told = capsys.readouterr().err
    assert "packed_file has packs of 32 tokens, unpacked_file rows of 40: hours do not compare" in told
    assert command(*as_flags(**{**flags, "unpacked_file": make("others", seed=99)})) == 2
    told = capsys.readouterr().err
    assert "`unpacked_file` must hold the 60 sequences of packed_file at depth 1. Received: " in told
    assert "tokens, where packed_file has " in told


def test_a_pattern_that_matches_nothing_is_told_by_its_flag(records, tmp_path, capsys):
    for name in ("packed_file", "unpacked_file", "eval_file"):
        flags = {**records, "output_dir": tmp_path / "all", name: f"{tmp_path}/none-*"}
        assert command(*as_flags(**flags)) == 2
        assert f"`{name}` must match at least one file" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_records_without_next_sentences_serve_their_objective(records, tmp_path, capsys):
    flags = {**records, "output_dir": tmp_path / "all", "print_commands": True}
    for name in ("packed_file", "unpacked_file", "eval_file"):
        source = Path(records[name]).parent
        folder = tmp_path / name
        folder.mkdir()
        for path in source.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        manifest = json.loads((folder / "manifest.json").read_text()) | {"objective": "mlm"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        flags[name] = f"{folder}/*.tfrecord"
    assert command(*as_flags(**flags)) == 2
    assert "`packed_file` must hold next-sentence labels" in capsys.readouterr().err
    assert command(*as_flags(**flags, run_flags="--objective=mlm")) == 0
