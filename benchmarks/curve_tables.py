"""What runs have logged so far, over sequences seen and over time, and how many sequences a target took."""

import csv
import statistics
from pathlib import Path

from benchmarks.curve_runs import PACKED, UNPACKED
from benchmarks.run_curves import LOGS
from bert_packed.core.files import write_whole

FIGURES = ("mlm_loss", "mlm_accuracy")
COLUMNS = ("variant", "seed", "data", "step", "sequences", "hours", *FIGURES)


def read_points(runs, folder):
    """All points of all curves: list of dicts of `COLUMNS`.

    `sequences` is what the steps are expected to have seen: packs hold more or fewer. `hours` are those of
    training steps alone, without compiling, evaluating and saving.

    Args:
        runs: List of `planned_runs.Run`; one that has not begun has no points.
        folder: That their output directories lie in.
    """
    from bert_packed.training.metrics_log import read_rows

    points = []
    for run in runs:
        rows = {data: read_rows(Path(folder) / run.name / log) for data, log in LOGS.items()}
        hours = _hours_by_step(rows["train"], run.sequences_per_step)
        for data, logged in rows.items():
            for row in logged:
                if not row["loss"]:  # of steps that were all left out
                    continue
                step = int(row["step"])
                points.append(
                    {
                        "variant": run.variant,
                        "seed": run.seed,
                        "data": data,
                        "step": step,
                        "sequences": step * run.sequences_per_step,
                        "hours": hours.get(step),
                        **{name: float(row[name]) for name in FIGURES},
                    }
                )
    return points


def _hours_by_step(rows, sequences_per_step):
    """Hours of training until each row of a log: dict by step.

    A row whose steps were not timed, the first of a process that is killed soon, took as long as others.
    """
    speeds = [float(row["sequences_per_second"]) for row in rows if row.get("sequences_per_second")]
    if not speeds:
        return {}
    usual, seconds, before, hours = statistics.median(speeds), 0.0, 0, {}
    for row in rows:
        step = int(row["step"])
        speed = float(row.get("sequences_per_second") or usual)
        seconds += (step - before) * sequences_per_step / speed
        hours[step], before = seconds / 3600, step
    return hours


def write_points(path, points):
    """Write points as CSV, whole, whoever else writes them."""
    with write_whole(str(path)) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)


def curves_of(points, data, over, figure):
    """Curves with their bands: the seeds of a variant share their steps.

    Args:
        points: Of `read_points`.
        data: `train` or `eval`.
        over: `sequences` or `hours`.
        figure: One of `FIGURES`.

    Returns:
        Dict from variant to a list of (x, mean, least, most) over the seeds that have come so far, x their
        mean.
    """
    found = {}
    for point in points:
        if point["data"] == data and point[over] is not None:
            of_variant = found.setdefault(point["variant"], {})
            of_variant.setdefault(point["step"], []).append((point[over], point[figure]))
    return {
        variant: [
            (
                statistics.fmean(x for x, _ in pairs),
                statistics.fmean(y for _, y in pairs),
                min(y for _, y in pairs),
                max(y for _, y in pairs),
            )
            for _, pairs in sorted(of_variant.items())
        ]
        for variant, of_variant in found.items()
    }


def common_target(runs, points):
    """A held-out accuracy that all packed and unpacked runs come to: 0.95 of the least of their best.

    Args:
        runs: List of `planned_runs.Run`.
        points: Of `read_points`, of these.

    Returns:
        Float, of complete runs; None where one of both kinds has none.
    """
    complete = complete_runs([run for run in runs if run.variant in (PACKED, UNPACKED)], points)
    if {run.variant for run in complete} != {PACKED, UNPACKED}:
        return None
    best = [max(point["mlm_accuracy"] for point in _held_out(points, run)) for run in complete]
    return 0.95 * min(best)


def complete_runs(runs, points):
    """Those runs whose last step has been evaluated; arguments as of `common_target`."""
    found = []
    for run in runs:
        held_out = _held_out(points, run)
        if held_out and held_out[-1]["step"] == run.flags["num_train_steps"]:
            found.append(run)
    return found


def _held_out(points, run):
    return [
        point
        for point in points
        if (point["variant"], point["seed"], point["data"]) == (run.variant, run.seed, "eval")
    ]


def reached(points, run, target, over):
    """Sequences, or hours, until a run's held-out accuracy first was at a target: float.

    Between two evaluations the accuracy is taken to rise evenly; None where it has not come so far, or was
    there at the first evaluation already.
    """
    before = None
    for point in _held_out(points, run):
        if point["mlm_accuracy"] >= target:
            if before is None or before[over] is None or point[over] is None:
                return None
            share = (target - before["mlm_accuracy"]) / (point["mlm_accuracy"] - before["mlm_accuracy"])
            return before[over] + share * (point[over] - before[over])
        before = point
    return None


def summary_rows(runs, points, target):
    """What each variant has come to: rows of a table.

    Figures are of complete runs; what a target took is told where all of these came to it.

    Args:
        runs: List of `planned_runs.Run`.
        points: Of `read_points`, of these.
        target: Held-out accuracy; None for none.
    """
    rows = []
    for variant in dict.fromkeys(run.variant for run in runs):
        of_variant = [run for run in runs if run.variant == variant]
        complete = complete_runs(of_variant, points)
        row = {"variant": variant, "seeds complete": len(complete), "of": len(of_variant)}
        row["sequences"] = max(
            (point["sequences"] for run in of_variant for point in _held_out(points, run)), default=None
        )
        last = [_held_out(points, run)[-1] for run in complete]
        for name in FIGURES:
            values = [point[name] for point in last]
            row |= {
                f"held-out {name}": statistics.fmean(values) if values else None,
                f"{name}, least": min(values, default=None),
                f"{name}, most": max(values, default=None),
            }
        for over in ("sequences", "hours"):
            taken = [reached(points, run, target, over) for run in complete] if target else []
            taken = [value for value in taken if value is not None]
            if over == "sequences":
                row["seeds at target"] = len(taken)
            all_came = taken and len(taken) == len(complete)
            row[f"{over} to target"] = statistics.fmean(taken) if all_came else None
        rows.append(row)
    baseline = next((row["sequences to target"] for row in rows if row["variant"] == UNPACKED), None)
    for row in rows:
        taken = row["sequences to target"]
        row["of unpacked's sequences"] = taken / baseline if taken and baseline else None
    return rows
