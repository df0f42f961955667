"""Curves are what runs logged, seeds as bands."""

import pytest
from benchmark_command import is_png, run_benchmark, tables_of

from benchmarks.run_curves import LoggedRun, bands, read_run, summary_rows
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json

FIGURES = ["mlm_loss", "mlm_accuracy"]


def write_run(folder, training, held_out=(), num_steps=3, batch=5, factor=2.0, **flags):
    """Write what a run leaves: rows are (step, loss, accuracy, sequences per second)."""
    folder.mkdir(parents=True)
    flags |= {"num_train_steps": num_steps, "train_batch_size": batch}
    write_json(folder / "run.json", {"flags": flags, "data": {"packing_factor": factor}})
    for log, rows in (("metrics.csv", training), ("eval_metrics.csv", held_out)):
        lines = ["step,loss,mlm_loss,mlm_accuracy,sequences_per_second"]
        lines += [f"{step},9.0,{loss},{accuracy},{speed}" for step, loss, accuracy, speed in rows]
        if rows:
            (folder / log).write_text("\n".join(lines) + "\n")
    return folder


def logged(variant, accuracies, is_complete=True):
    """A run with held-out accuracies at steps 1, 2, ..."""
    points = [
        {"step": step, "sequences": 10 * step, "hours": step / 100, "mlm_loss": 1.0, "mlm_accuracy": one}
        for step, one in enumerate(accuracies, start=1)
    ]
    return LoggedRun(variant, is_complete, {"training": points, "held out": points})


def test_points_are_the_logs_over_sequences_and_hours(tmp_path):
    rows = [(1, 8.0, 0.1, ""), (2, 7.0, 0.2, 5), (4, 6.0, 0.3, 20)]
    evaluated = [(2, 7.5, 0.15, ""), (3, 7.0, 0.2, "")]  # the second between two rows
    folder = write_run(tmp_path / "packed-seed1", rows, evaluated, num_steps=4)
    with (folder / "metrics.csv").open("a") as file:
        file.write("5,,,,\n")  # a row of steps that were all left out
    one = read_run(folder, FIGURES)
    assert one.variant == "packed" and not one.is_complete  # step 4 is not evaluated
    points = one.points["training"]
    found = [(point["step"], point["sequences"], point["mlm_loss"]) for point in points]
    assert found == [(1, 10, 8.0), (2, 20, 7.0), (4, 40, 6.0)]
    # steps that were not timed count at the median of 5 and 20: 0.8 s, 2 s, 1 s
    assert [3600 * p["hours"] for p in points] == pytest.approx([0.8, 2.8, 3.8])
    held_out, between = one.points["held out"]
    assert 3600 * held_out["hours"] == pytest.approx(2.8) and held_out["mlm_accuracy"] == 0.15
    assert 3600 * between["hours"] == pytest.approx(3.3)


def test_sequences_are_unknown_if_batches_grow_or_no_manifest_is(tmp_path):
    rows = [(3, 8.0, 0.1, 5)]
    for name, flags in (("a", {"batch_warmup_steps": 2}), ("b", {"factor": None})):
        one = read_run(write_run(tmp_path / name, rows, **flags), ["mlm_loss"])
        assert one.is_complete and one.points["training"][0]["sequences"] is None
        assert bands([one], "training", "sequences", "mlm_loss") == {}
        assert bands([one], "training", "step", "mlm_loss") == {name: [(3, 8.0, 8.0, 8.0)]}


def test_bands_hold_all_seeds_of_a_step():
    runs = [logged("packed", [0.1, 0.3]), logged("packed", [0.2]), logged("unpacked", [0.4])]
    assert bands(runs, "held out", "sequences", "mlm_accuracy") == {
        "packed": [(10, pytest.approx(0.15), 0.1, 0.2), (20, 0.3, 0.3, 0.3)],
        "unpacked": [(10, 0.4, 0.4, 0.4)],
    }


def test_the_table_has_the_spread_of_complete_runs():
    runs = [logged("unpacked", [0.1, 0.2, 0.3])] * 2
    runs += [logged("packed", [0.2, 0.4, 0.6]), logged("packed", [0.9], False)]
    unpacked, packed = summary_rows(runs, FIGURES)
    assert (unpacked["complete"], packed["complete"], packed["runs"]) == (2, 1, 2)
    assert packed["held out mlm_accuracy, most"] == 0.6 and packed["training mlm_loss"] == 1.0
    assert (packed["sequences"], packed["hours"], packed["step"]) == (30, 0.03, 3)
    (nothing,) = summary_rows([logged("a", [0.3], False)], FIGURES)
    assert nothing["held out mlm_loss"] is None


def test_the_command(tmp_path):
    for name in ("one-seed1", "one-seed2", "two"):
        write_run(tmp_path / "runs" / name, [(1, 3.0, 0.1, 5), (3, 2.5, 0.2, 5)], [(3, 2.75, 0.2, "")])
    flags = {"run_dirs": f"{tmp_path}/runs/one*,{tmp_path}/runs/two", "picture": tmp_path / "a" / "p.pdf"}
    flags["over"] = "hours"
    one, two = tables_of("run_curves", tmp_path, **flags)["runs"]
    assert (one["variant"], one["complete"], two["variant"]) == ("one", 2, "two")
    assert one["training mlm_loss"] == 2.5 and two["held out mlm_loss"] == 2.75
    assert is_png(tmp_path / "a" / "p.pdf")


def test_scores_of_a_fine_tuning(tmp_path):
    """Only evaluations have them; a step has a known number of sequences."""
    folder = write_run(tmp_path / "vectors", [(2, 3.0, 0.1, 40), (4, 2.5, 0.2, 40)])
    record = {"flags": {"train_batch_size": 5}, "data": {}, "packing_factor": 3.0}
    write_json(folder / "run.json", {**record, "sequences_per_step": 10, "num_train_steps": 4})
    (folder / "eval_metrics.csv").write_text("step,spearman\n2,40.5\n4,50.25\n")
    one = read_run(folder, ["spearman"])
    assert one.is_complete
    assert [point["spearman"] for point in one.points["held out"]] == [40.5, 50.25]
    assert [3600 * point["hours"] for point in one.points["held out"]] == pytest.approx([0.5, 1])
    (row,) = summary_rows([one], ["spearman"])
    assert row["held out spearman"] == 50.25 and row["training spearman"] is None
    flags = {"run_dirs": folder, "figures": "spearman", "over": "hours", "picture": tmp_path / "p.png"}
    tables_of("run_curves", tmp_path, **flags)
    assert is_png(tmp_path / "p.png")


def test_mistakes(tmp_path, capsys):
    folder = write_run(tmp_path / "one", [(1, 3.0, 0.1, 5)])
    with pytest.raises(InputError, match=r"`figures` must be columns of .*Received: f1"):
        read_run(folder, ["f1"])
    with pytest.raises(InputError, match=r"must hold runs with rows in metrics.csv. Received: .*two"):
        read_run(write_run(tmp_path / "two", []), ["loss"])
    assert run_benchmark("run_curves", run_dirs=tmp_path / "three") == 2
    assert "three" in capsys.readouterr().err
