"""Learning curves of runs in one table and one picture, from their logs, seeds as bands.

python -m benchmarks.run_curves --run_dirs='runs/static*,runs/dynamic*' --picture=curves.png
"""

import dataclasses
import glob
import re
import statistics
import sys
from pathlib import Path

import numpy as np

from benchmarks.results import Settings, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import read_json

LOGS = {"training": "metrics.csv", "held out": "eval_metrics.csv"}
ACCURACY = "mlm_accuracy"


@dataclasses.dataclass(frozen=True)
class CurvesConfig(Settings):
    """Reads the output directories of run_pretraining.py. Runs in folders NAME-seed1, NAME-seed2, ... are
    seeds of one variant NAME; any other folder is a variant with one run.

    The table has for each variant the last figures of its complete runs, mean, least and most over the
    seeds. The picture has a row for each figure over --over, in training and held out; runs that are
    still under way, or were stopped, are drawn as far as they are. Hours are those of training steps
    alone, without compiling, evaluating and saving.
    """

    run_dirs: str = setting("", "output directories of runs: comma-separated paths or globs", required=True)
    figures: str = setting("mlm_loss", "columns of metrics.csv and eval_metrics.csv, comma-separated")
    picture: str = setting("", "also draw the curves into this PNG")
    over: str = setting("step", "what the curves are drawn over", choices=("step", "sequences", "hours"))


def main(config):
    """Read, print, write and draw."""
    patterns = config.run_dirs.split(",")
    folders = [Path(path) for one in patterns for path in sorted(glob.glob(one)) or [one]]
    figures = config.figures.split(",")
    runs = [read_run(folder, figures) for folder in folders]
    show("run_curves", config, {"runs": summary_rows(runs, figures)})
    if config.picture:
        draw(runs, figures, [(data, config.over) for data in LOGS], config.picture)


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """The logged figures of a run."""

    variant: str  # name of the folder without its seed
    is_complete: bool  # whether its last step is logged, and evaluated if any is
    # From a key of `LOGS`: `step`, `sequences` and `hours` (None where they are not known), and the figures
    points: dict[str, list[dict]]


def read_run(folder, figures):
    """Read the logs of a run: `LoggedRun`, with `ACCURACY` where it is there.

    `sequences` is the expected number: single packs hold more or fewer.

    Raises:
        InputError: the folder is no run's, its log of training has no row, or a log lacks a figure.
    """
    from bert_packed.runs.run_directory import RUN_FILE
    from bert_packed.training.metrics_log import read_rows

    record = read_json(folder / RUN_FILE)
    flags, factor = record["flags"], record["data"]["packing_factor"]
    # A batch that grows is another number of sequences at each step
    grows = flags.get("batch_warmup_steps")
    per_step = None if grows or not factor else factor * flags["train_batch_size"]
    rows = {data: [row for row in read_rows(folder / log) if row["loss"]] for data, log in LOGS.items()}
    if not rows["training"]:
        raise InputError(
            f"`run_dirs` must hold runs with rows in metrics.csv. Received: {folder}, without any."
        )
    hours = _hours(rows["training"], per_step)
    points = {}
    for data, logged in rows.items():
        missing = [name for name in figures if logged and name not in logged[0]]
        if missing:
            columns = ", ".join(logged[0])
            raise InputError(
                f"`figures` must be columns of {folder / LOGS[data]}: {columns}. Received: {missing[0]}."
            )
        points[data] = [
            {
                "step": int(row["step"]),
                "sequences": per_step and per_step * int(row["step"]),
                # Evaluations may lie between the rows of training
                "hours": float(np.interp(int(row["step"]), [*hours], [*hours.values()])) if hours else None,
                **{name: float(row[name]) for name in {*figures, ACCURACY} & row.keys() if row[name]},
            }
            for row in logged
        ]
    last = {data: of_data[-1]["step"] for data, of_data in points.items() if of_data}
    # The held-out log counts too: a run killed in its last evaluation is not complete
    is_complete = set(last.values()) == {flags["num_train_steps"]}
    return LoggedRun(re.sub(r"-seed\d+$", "", folder.resolve().name), is_complete, points)


def _hours(rows, sequences_per_step):
    """Hours of training until each row of a log: dict by rising step; {} where no row has a speed."""
    speeds = [float(row["sequences_per_second"]) for row in rows if row.get("sequences_per_second")]
    if not speeds or not sequences_per_step:
        return {}
    usual, seconds, before, hours = statistics.median(speeds), 0.0, 0, {}
    for row in rows:
        step = int(row["step"])
        # Steps that were not timed, the first of a process that was killed soon, took as long as others
        speed = float(row.get("sequences_per_second") or usual)
        seconds += (step - before) * sequences_per_step / speed
        hours[step], before = seconds / 3600, step
    return hours


def summary_rows(runs, figures, target=0.0):
    """Last figures of the complete runs of each variant, and the cost of a target: rows of a table."""
    rows = []
    for variant in dict.fromkeys(one.variant for one in runs):
        of_variant = [one for one in runs if one.variant == variant]
        complete = [one for one in of_variant if one.is_complete]
        row = {"variant": variant, "runs": len(of_variant), "complete": len(complete)}
        row["step"] = max(one.points["training"][-1]["step"] for one in of_variant)
        for name in ("sequences", "hours"):
            last = [one.points["training"][-1][name] for one in complete]
            row[name] = statistics.fmean(last) if last and None not in last else None
        for name in figures:
            for data in LOGS:
                last = [one.points[data][-1][name] for one in complete if one.points[data]]
                row |= {
                    f"{data} {name}": statistics.fmean(last) if last else None,
                    f"{data} {name}, least": min(last, default=None),
                    f"{data} {name}, most": max(last, default=None),
                }
        if target:
            row |= _target_row(complete, target)
        rows.append(row)
    return rows


def _target_row(complete, target):
    """Sequences and hours until a target: columns of a table.

    The mean over those that came to it would make the variant that failed more often the faster one.
    """
    row = {}
    for over in ("sequences", "hours"):
        taken = [reached(one.points["held out"], target, over) for one in complete]
        at_target = [value for value in taken if value is not None]
        row.setdefault("runs at target", len(at_target))
        all_came = bool(complete) and len(at_target) == len(complete)
        # Over all or none: a mean over the faster runs alone would flatter a variant that often fails
        row[f"{over} to target"] = statistics.fmean(at_target) if all_came else None
    return row


def reached(points, target, over):
    """Sequences, or hours, until held-out accuracy first was at a target: float.

    Between two evaluations the accuracy is taken to rise evenly. None where it has not come to it, or was
    there at the first evaluation already.
    """
    before = None
    for point in points:
        if point[ACCURACY] >= target:
            if before is None or before[over] is None or point[over] is None:
                return None
            share = (target - before[ACCURACY]) / (point[ACCURACY] - before[ACCURACY])
            return before[over] + share * (point[over] - before[over])
        before = point
    return None


def common_target(runs):
    """A held-out accuracy that all complete runs come to: 0.95 of the least of their best; 0 without any."""
    best = [max(point[ACCURACY] for point in one.points["held out"]) for one in runs if one.is_complete]
    return 0.95 * min(best, default=0.0)


def bands(runs, data, over, figure):
    """Curves with their bands: the seeds of a variant share their steps.

    Returns:
        Dict from variant to a list of (x, mean, least, most) over the seeds that have come to a step.
    """
    found = {}
    for one in runs:
        for point in one.points[data]:
            if point[over] is not None:
                # By step, not by x: sequences and hours of two seeds are never quite equal
                of_step = found.setdefault(one.variant, {}).setdefault(point["step"], [])
                of_step.append((point[over], point[figure]))
    curves = {}
    for variant, by_step in found.items():
        columns = [tuple(zip(*pairs, strict=True)) for _, pairs in sorted(by_step.items())]
        curves[variant] = [(statistics.fmean(x), statistics.fmean(y), min(y), max(y)) for x, y in columns]
    return curves


def draw(runs, figures, panels, path):
    """Draw a row of panels, (key of `LOGS`, "step", "sequences" or "hours"), for each figure, as PNG."""
    from benchmarks.pictures import draw_curves, new_figure, save_picture

    figure, grid = new_figure(len(panels), len(figures), size=(4.0, 2.8))
    for name, row in zip(figures, grid, strict=True):
        for (data, over), axes in zip(panels, row, strict=True):
            draw_curves(axes, bands(runs, data, over, name))
            axes.set(title=data, xlabel=over, ylabel=name)
    save_picture(figure, path)


if __name__ == "__main__":
    sys.exit(run(main, CurvesConfig))
