"""What is made of the logs of learning curves: points, bands, targets, the table and the picture."""

import csv

import pytest
from curve_logs import a_run, write_log

from benchmarks import curve_picture, curve_tables
from benchmarks.curve_tables import common_target, curves_of, reached, read_points, summary_rows


def point(variant, seed, step, accuracy, data="eval", hours=None, loss=1.0):
    return {
        "variant": variant,
        "seed": seed,
        "data": data,
        "step": step,
        "sequences": 10.0 * step,
        "hours": step / 100 if hours is None else hours,
        "mlm_loss": loss,
        "mlm_accuracy": accuracy,
    }


def test_points_are_the_logs_over_sequences_and_hours(tmp_path):
    rows = [(1, 9, 8.0, 0.1, ""), (2, 9, 7.0, 0.2, 5), (3, "", "", "", ""), (4, 9, 6.0, 0.3, 20)]
    write_log(tmp_path / "packed-seed1" / "metrics.csv", rows)
    write_log(tmp_path / "packed-seed1" / "eval_metrics.csv", [(2, 9, 7.5, 0.15, "")])
    points = read_points([a_run(), a_run("unpacked")], tmp_path)
    assert [(p["data"], p["step"], p["sequences"], p["mlm_loss"]) for p in points] == [
        ("train", 1, 10, 8.0),
        ("train", 2, 20, 7.0),
        ("train", 4, 40, 6.0),
        ("eval", 2, 20, 7.5),
    ]
    # what was not timed went at the median of 5 and 20: 0.8 s, 2 s, 0.8 s, 0.5 s
    seconds = [3600 * p["hours"] for p in points]
    assert seconds == pytest.approx([0.8, 2.8, 4.1, 2.8])
    curve_tables.write_points(tmp_path / "curves.csv", points)
    with (tmp_path / "curves.csv").open() as file:
        back = list(csv.DictReader(file))
    assert [float(row["mlm_accuracy"]) for row in back] == [0.1, 0.2, 0.3, 0.15]


def test_bands_hold_all_seeds_of_a_step():
    points = [point("packed", 1, 1, 0.1), point("packed", 1, 2, 0.3), point("packed", 2, 1, 0.2)]
    points += [point("unpacked", 1, 1, 0.4), point("packed", 1, 1, 0.9, "train")]
    assert curves_of(points, "eval", "sequences", "mlm_accuracy") == {
        "packed": [(10.0, pytest.approx(0.15), 0.1, 0.2), (20.0, 0.3, 0.3, 0.3)],
        "unpacked": [(10.0, 0.4, 0.4, 0.4)],
    }


def test_a_target_is_reached_between_evaluations():
    points = [
        point("packed", 1, step, accuracy) for step, accuracy in ((1, 0.1), (2, 0.2), (4, 0.4), (5, 0.3))
    ]
    packed, other = a_run("packed", 1), a_run("packed", 2)
    assert reached(points, packed, 0.3, "sequences") == pytest.approx(30)
    assert reached(points, packed, 0.2, "hours") == pytest.approx(0.02)
    assert reached(points, packed, 0.5, "sequences") is None
    assert reached(points, packed, 0.05, "sequences") is None  # somewhere before the first
    assert reached(points, other, 0.3, "sequences") is None


def test_the_common_target_is_one_that_all_complete_runs_come_to():
    runs = [a_run("packed", 1, 2), a_run("packed", 2, 2), a_run("unpacked", 1, 2)]
    runs += [a_run("no_attention_mask", 1, 1)]
    points = [point("packed", 1, 1, 0.4), point("packed", 1, 2, 0.3)]
    points += [point("unpacked", 1, 1, 0.6), point("no_attention_mask", 1, 1, 0.1)]
    assert common_target(runs, points) is None  # unpacked is under way
    points += [point("unpacked", 1, 2, 0.6), point("packed", 2, 1, 0.2)]  # and so is the second seed
    assert common_target(runs, points) == pytest.approx(0.95 * 0.4)
    points += [point("packed", 2, 2, 0.35)]
    assert common_target(runs, points) == pytest.approx(0.95 * 0.35)


def test_the_table_has_the_spread_of_complete_seeds_and_the_cost_of_the_target():
    runs = [a_run("unpacked", 1), a_run("unpacked", 2), a_run("packed", 1), a_run("packed", 2)]
    points = [point("unpacked", seed, step, 0.1 * step) for seed in (1, 2) for step in (1, 2, 3)]
    points += [point("packed", 1, step, 0.2 * step) for step in (1, 2, 3)]
    points += [point("packed", 2, step, 0.3 * step, loss=9.0) for step in (0, 1)]  # there, not complete
    unpacked, packed = summary_rows(runs, points, 0.25)
    assert (unpacked["seeds complete"], packed["seeds complete"], packed["of"]) == (2, 1, 2)
    assert packed["held-out mlm_accuracy"] == pytest.approx(0.6) and packed["mlm_loss, most"] == 1.0
    assert unpacked["sequences to target"] == pytest.approx(25)
    assert packed["sequences to target"] == pytest.approx(12.5)
    assert packed["of unpacked's sequences"] == pytest.approx(0.5)
    assert packed["hours to target"] == pytest.approx(0.0125)
    assert (unpacked["seeds at target"], packed["seeds at target"]) == (2, 1)
    nothing = summary_rows(runs[:1], [], None)[0]
    assert nothing["held-out mlm_loss"] is None and nothing["seeds complete"] == 0


def test_what_a_target_took_is_told_only_where_all_complete_seeds_came_to_it():
    """The mean over those that came would make the variant that failed more often the faster one."""
    runs = [a_run("unpacked", 1), a_run("packed", 1), a_run("packed", 2)]
    points = [point("unpacked", 1, step, 0.1 * step) for step in (1, 2, 3)]
    points += [point("packed", 1, step, 0.2 * step) for step in (1, 2, 3)]
    points += [point("packed", 2, step, 0.05 * step) for step in (1, 2, 3)]
    unpacked, packed = summary_rows(runs, points, 0.25)
    assert (packed["seeds complete"], packed["seeds at target"]) == (2, 1)
    names = ("sequences to target", "hours to target", "of unpacked's sequences")
    assert [packed[name] for name in names] == [None, None, None]
    assert unpacked["sequences to target"] == pytest.approx(25)


def test_lines_and_bands_are_drawn_of_the_sets_variants(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **named: (drawn.append(self), save(self, *args, **named))
    )
    points = [
        point(name, seed, step, 0.1 * step * seed)
        for name in ("packed", "unpacked", "packed_betas")
        for seed in (1, 2)
        for step in (1, 2)
    ]
    assert curve_picture.draw(points, ("unpacked", "packed"), tmp_path / "p.png")
    axes = drawn[0].axes
    assert len(axes) == 4  # loss and accuracy, held out, over sequences and hours
    accuracy = axes[2]
    assert accuracy.get_ylabel() == "mlm_accuracy" and accuracy.get_xlabel() == "sequences"
    lines = {line.get_label(): line.get_xydata().tolist() for line in accuracy.lines}
    assert list(lines) == ["unpacked", "packed"]
    assert lines["packed"] == [pytest.approx([10, 0.15]), pytest.approx([20, 0.3])]
    band = accuracy.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (pytest.approx(0.1), pytest.approx(0.4))
    assert not curve_picture.draw(points, ("no_attention_mask",), tmp_path / "p.png")


def test_a_picture_that_is_not_finished_leaves_the_one_before_it(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def fail(self, path, **_):
        with open(path, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", fail)
    path = tmp_path / "p.png"
    path.write_bytes(b"whole")
    with pytest.raises(KeyboardInterrupt):
        curve_picture.draw([point("packed", 1, 1, 0.1)], ("packed",), path)
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]
