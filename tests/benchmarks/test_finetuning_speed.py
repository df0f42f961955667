"""The comparison of fine-tuning runs: its arithmetic, and runs that do not compare."""

import json
import shutil

import pytest
from benchmark_command import run_benchmark, tables_of

from benchmarks.finetuning import DEPTH, SPEED


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


@pytest.fixture
def runs(tmp_path):
    for seed, f1 in ((1, 60.0), (2, 62.0), (3, 67.0)):
        flags = {"random_seed": seed, "learning_rate": 1e-4}
        write_run(tmp_path / f"packed-{seed}", [5, 8, 8], f1, max_sequences_per_pack="max", **flags)
        write_run(tmp_path / f"single-{seed}", [1, 4, 4], f1 + 1, max_sequences_per_pack=1, **flags)
    return tmp_path


def patterns(runs):
    return {"packed": runs / "packed-*", "unpacked": runs / "single-*"}


def rewrite(folder, **changes):
    flags = json.loads((folder / "run.json").read_text())["flags"]
    shutil.rmtree(folder)
    write_run(folder, [1, 4, 4], 63, **{**flags, **changes})


def test_scores_and_speed(runs):
    rewrite(runs / "single-2", overwrite=True)  # a flag that changes nothing
    tables = tables_of("finetuning", runs, **patterns(runs))
    exact, f1 = tables["scores"]
    assert (exact["score"], exact["packed"]) == ("exact_match", 31.5)
    assert [f1[name] for name in ("packed", "packed, least", "packed, most")] == [63, 60, 67]
    assert [f1[name] for name in ("unpacked", "unpacked, least", "unpacked, most")] == [64, 61, 68]
    (speed,) = tables["speed"]
    assert speed["seeds"] == 3 and speed["packing factor"] == pytest.approx((1.625 + 2 + 2.625) / 3)
    # Speeds are medians of all rows
    assert (speed["packed, sequences/s"], speed["unpacked, sequences/s"]) == (8, 4)
    assert speed["time of a step, packed / unpacked"] == 0.5


def spoilt(name, file, text):
    return lambda runs: (runs / name / file).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda runs: (runs / "single-2" / "metrics.csv").unlink(),
            "metrics.csv without sequences_per_second",
        ),
        (spoilt("single-2", "metrics.csv", f"step,{SPEED}\n1,fast\n"), "line 2: a row must have"),
        (spoilt("single-2", "eval_results.json", '{"accuracy": 1}'), "`scores` must be that of"),
        (lambda runs: rewrite(runs / "single-2", learning_rate=2e-4), "`learning_rate` must be that of"),
        (lambda runs: rewrite(runs / "single-2", checksum="b"), "`inputs` must be that of"),
        (
            lambda runs: rewrite(runs / "single-2", max_sequences_per_pack="max"),
            "`unpacked` must match runs whose max_sequences_per_pack is 1",
        ),
        (lambda runs: shutil.rmtree(runs / "single-2"), "`packed`, [1, 2, 3]. Received: [1, 3]"),
    ],
)
def test_runs_that_do_not_compare(runs, capsys, spoil, message):
    spoil(runs)
    assert run_benchmark("finetuning", **patterns(runs)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
