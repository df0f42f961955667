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

from bert_packed.reports import learning_curves, planned_runs, taken_runs
from bert_packed.reports.curve_runs import SETS, VARIANTS, make_runs
from bert_packed.reports.kept_runs import is_complete
from bert_packed.reports.learning_curves import CurvesConfig
from bert_packed.reports.planned_runs import command_of
from bert_packed.reports.synthetic_data import VOCAB_SIZE, write_sequences
from bert_packed.reports.taken_runs import take
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


def test_flags_of_all_runs_reach_each_of_them():
    given = {
        "bert_config_file": "bert-mini",
        "max_eval_steps": 7,
        "learning_rate": 0.5,
        "warmup_share": 0.25,
        "beta_1": 0.5,
        "beta_2": 0.75,
        "sequences_per_step": 60,
        "num_sequences": 6000,
    }
    runs = {one.variant: settings_of(one) for one in make_runs(CurvesConfig(**ALL, seeds="7", **given), 2.5)}
    assert len(runs) == len(VARIANTS)
    for name, made in runs.items():
        assert (made.bert_config_file, made.max_eval_steps) == ("bert-mini", 7)
        assert made.num_warmup_steps == made.num_train_steps // 4
        assert made.learning_rate == (1.25 if name == "packed_learning_rate" else 0.5)
        squared = (0.25, 0.5625) if name == "unpacked_twice" else (0.5, 0.75)
        assert (made.beta_1, made.beta_2) == squared
    assert (runs["unpacked_twice"].num_train_steps, runs["unpacked_twice"].num_warmup_steps) == (50, 12)


def test_batches_are_whole_micro_batches_and_their_steps_make_up_for_it():
    config = CurvesConfig(**GIVEN, seeds="1", sequences_per_step=64, micro_batch_size=4, num_sequences=64_000)
    unpacked, packed = (settings_of(one) for one in make_runs(config, 2.3))
    assert (unpacked.train_batch_size, packed.train_batch_size) == (64, 28)
    assert packed.num_train_steps == round(64_000 / 28 / 2.3) and packed.micro_batch_size == 4


@pytest.mark.parametrize(
    ("changes", "packing_factor", "message"),
    [
        (
            {"micro_batch_size": 32},
            3.0,
            "`micro_batch_size` must .* within 5% of sequences_per_step=64.* 96",
        ),
        ({"sequences_per_step": 4}, 2.5, "`sequences_per_step` must let .* 2 packs of 2.5 sequences hold 5"),
    ],
)
def test_updates_that_see_other_numbers_of_sequences_in_packs_are_refused(changes, packing_factor, message):
    config = CurvesConfig(**GIVEN, **{"sequences_per_step": 64, **changes})
    with pytest.raises(InputError, match=message):
        make_runs(config, packing_factor)
    assert make_runs(dataclasses.replace(config, only="unpacked"), packing_factor)


@pytest.mark.parametrize(("num_steps", "rows"), [(100, 10), (101, 10), (109, 10), (9, 9)])
def test_a_log_has_at_most_the_rows_that_are_asked_for(num_steps, rows):
    config = CurvesConfig(**GIVEN, sequences_per_step=10, num_sequences=10 * num_steps, num_points=10)
    made = settings_of(make_runs(config, 2.0)[0])
    assert made.num_train_steps == num_steps
    logged = {*range(made.log_steps, num_steps + 1, made.log_steps), num_steps}
    assert rows - 1 <= len(logged) <= rows
    assert made.eval_steps == made.save_checkpoints_steps == made.log_steps


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


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("--output_dir=elsewhere", "output_dir"),
        ("--learning_rate=1", "learning_rate"),
        ("--ablation=no_position_reset", "ablation"),
        ("--packing_correction=betas", "packing_correction"),
        ("--overwrite", "overwrite"),
        ("--initial_batch_size=64 --batch_warmup_steps=4", "initial_batch_size"),
    ],
)
def test_more_flags_do_not_change_what_a_variant_is(more, name):
    one = make_runs(CurvesConfig(**GIVEN, run_flags=more), 2.0)[0]
    with pytest.raises(InputError, match=f"`run_flags` must leave {name} as it is for unpacked-seed1"):
        planned_runs.settings_of(one, "o")


def test_more_flags_that_no_shell_reads_are_told():
    one = make_runs(CurvesConfig(**GIVEN, run_flags="--vocab_file='x"), 2.0)[0]
    with pytest.raises(InputError, match=r"`run_flags` must be flags as in a shell.*No closing quotation"):
        planned_runs.settings_of(one, "o")
    one = make_runs(CurvesConfig(**GIVEN, run_flags="--objective=causal_lm"), 2.0)[0]
    with pytest.raises(InputError, match="`run_flags` must give an objective with masked tokens"):
        planned_runs.settings_of(one, "o")


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
    # as runs are whose log has other intervals
    (folder / "run.json").write_text(json.dumps({"flags": {**one.flags, "log_steps": 7, "eval_steps": 7}}))
    assert is_complete(one, tmp_path)
    (folder / "run.json").write_text(json.dumps({"flags": {**one.flags, "random_seed": 2}}))
    assert not is_complete(one, tmp_path)
    for damaged in ("[]", '{"flags": []}', "{", "null"):
        (folder / "run.json").write_text(damaged)
        assert not is_complete(one, tmp_path)


def script(monkeypatch, tmp_path, text):
    """Let a Python script stand in for `run_pretraining.py`."""
    (tmp_path / "run_pretraining.py").write_text(text)
    monkeypatch.setattr(planned_runs, "TOP", tmp_path)


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


def test_a_signal_stops_the_set_though_the_run_came_to_its_end(monkeypatch, tmp_path):
    """The stand-in minds no signal, as a run in its last evaluation."""
    text = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("came", flush=True))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(1)
"""
    script(monkeypatch, tmp_path, text)
    assert take(a_run(), tmp_path / "runs") == 143
    assert (tmp_path / "runs" / "packed-seed1.log").read_text() == "came\n"


def test_a_run_that_has_begun_goes_on_with_its_intervals(monkeypatch, tmp_path):
    """As the command, which refuses others."""
    taken = []
    monkeypatch.setattr(taken_runs, "take", lambda one, folder: taken.append(one.flags) or 1)
    one = make_runs(CurvesConfig(**GIVEN), 2.0)[0]
    assert taken_runs.take_all([one], tmp_path) == 1
    (tmp_path / one.name).mkdir()
    kept = {**one.flags, "log_steps": 3, "eval_steps": 4, "learning_rate": 5.0}
    (tmp_path / one.name / "run.json").write_text(json.dumps({"flags": kept}))
    assert taken_runs.take_all([one], tmp_path) == 1
    assert taken == [one.flags, {**one.flags, "log_steps": 3, "eval_steps": 4}]


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


def test_ablations_are_those_of_the_training_command():
    """Each is a variant by its own name, and one that `--ablation` takes."""
    names = ("no_attention_mask", "no_position_reset", "no_next_sentence", "separator_only")
    assert SETS["ablations"] == ("packed", *names)
    config = CurvesConfig(**GIVEN, sets="ablations", seeds="1")
    assert tuple(settings_of(one).ablation for one in make_runs(config, 2.0)) == ("", *names)
