"""The comparison of fine-tuning runs: its arithmetic, and runs that do not compare."""

import json
import shutil

import pytest

from benchmarks.finetuning_comparison import DEPTH, DESCRIPTION, SPEED, ComparisonConfig, main
from bert_packed.core.command_line import run


def write_run(folder, speeds, f1, checksum="a", **flags):
    folder.mkdir(parents=True)
    record = {
        "flags": {"output_dir": str(folder), "overwrite": False, **flags},
        "inputs": {"train_file": [{"path": "squad.json", "sha256": checksum}]},
        "segments": [{"first_step": 0, "backend": "tensorflow"}],
        "packing_factor": 1.0 if flags[DEPTH] == 1 else 1.5 + flags["random_seed"] ** 2 / 8,
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "eval_results.json").write_text(json.dumps({"exact_match": f1 / 2, "f1": f1}))
    rows = [f"{step},{speed}\n" for step, speed in enumerate(speeds, 1)]
    (folder / "metrics.csv").write_text("step,sequences_per_second\n" + "".join(rows))
    return folder


@pytest.fixture
def runs(tmp_path):
    for seed, f1 in ((1, 60.0), (2, 62.0), (3, 67.0)):
        flags = {"random_seed": seed, "learning_rate": 1e-4}
        write_run(tmp_path / f"packed-{seed}", [5, 8, 8], f1, max_sequences_per_pack="max", **flags)
        write_run(tmp_path / f"single-{seed}", [1, 4, 4], f1 + 1, max_sequences_per_pack=1, **flags)
    return tmp_path


def rewrite(folder, **changes):
    flags = json.loads((folder / "run.json").read_text())["flags"]
    shutil.rmtree(folder)
    write_run(folder, [4], 50, **{**flags, **changes})


def compare(runs, **flags):
    flags = {"packed": runs / "packed-*", "unpacked": runs / "single-*", **flags}
    argv = ["comparison", *(f"--{name}={value}" for name, value in flags.items())]
    return run(main, ComparisonConfig, DESCRIPTION, argv)


def test_scores_and_speed(runs, capsys):
    assert compare(runs, json=runs / "table.json") == 0
    exact, f1 = json.loads((runs / "table.json").read_text())
    assert (exact["score"], exact["packed"]) == ("exact_match", 31.5)
    assert [f1[name] for name in ("packed", "packed, least", "packed, most")] == [63, 60, 67]
    assert [f1[name] for name in ("unpacked", "unpacked, least", "unpacked, most")] == [64, 61, 68]
    printed = capsys.readouterr().out
    # 1.625, 2 and 2.625
    assert "3 seeds, packing factor 2.083" in printed
    # medians of all rows
    assert "sequences/s 8.000 packed, 4.000 unpacked;" in printed
    assert "wall time of a step packed / unpacked 0.500" in printed


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda runs: (runs / "packed-1" / "eval_results.json").unlink(), "packed-1, without eval_results"),
        (lambda runs: (runs / "single-2" / "run.json").write_text("{"), "run.json must be complete JSON"),
        (lambda runs: (runs / "single-2" / "metrics.csv").unlink(), "must hold a row with sequences_per"),
        (lambda runs: (runs / "single-2" / "run.json").write_text("[]"), "another program's (TypeError"),
        (lambda runs: (runs / "single-2" / "run.json").write_text("{}"), "another program's (KeyError"),
        (
            lambda runs: (runs / "single-2" / "metrics.csv").write_text(f"step,{SPEED}\n1,fast\n"),
            "another program's (ValueError",
        ),
        (lambda runs: rewrite(runs / "single-2", learning_rate=2e-4), "`learning_rate` must be that of"),
        (lambda runs: rewrite(runs / "packed-3", learning_rate=2e-4), "`learning_rate` must be that of"),
        (lambda runs: rewrite(runs / "single-2", checksum="b"), "`inputs` must be that of"),
        (
            lambda runs: rewrite(runs / "packed-2", max_sequences_per_pack=1),
            "`packed` must match runs whose max_sequences_per_pack is more than 1",
        ),
        (
            lambda runs: rewrite(runs / "single-2", max_sequences_per_pack="max"),
            "`unpacked` must match runs whose max_sequences_per_pack is 1",
        ),
        (
            lambda runs: shutil.rmtree(runs / "single-2"),
            "random_seed of `packed`, [1, 2, 3]. Received: [1, 3]",
        ),
        (
            lambda runs: (runs / "single-2" / "eval_results.json").write_text('{"accuracy": 1}'),
            "`scores` must be that of",
        ),
    ],
)
def test_runs_that_do_not_compare(runs, capsys, spoil, message):
    spoil(runs)
    assert compare(runs) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_flags_that_change_nothing_may_differ(runs):
    rewrite(runs / "single-2", overwrite=True)
    assert compare(runs) == 0


def test_a_pattern_without_a_run(runs, capsys):
    assert compare(runs, packed=runs / "nothing-*") == 2
    assert "`packed` must match output directories" in capsys.readouterr().err
    assert compare(runs, packed="") == 2
    assert "Received: nothing" in capsys.readouterr().err
