"""Learning curves of runs in one table and one picture, from their logs, seeds as bands.

python -m benchmarks.run_curves --run_dirs='runs/static*,runs/dynamic*' --picture=curves.png
python -m benchmarks.run_curves --run_dirs=my/vectors --figures=spearman --over=hours --picture=vectors.png
"""

import dataclasses
import glob
import re
import statistics
import sys
from pathlib import Path

import numpy as np

from benchmarks.runner import COLORS, Settings, new_figure, save_picture, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import read_json

LOGS = {"training": "metrics.csv", "held out": "eval_metrics.csv"}


@dataclasses.dataclass(frozen=True)
class CurvesConfig(Settings):
    """Reads the output directories of pre-training and fine-tuning. Runs in folders NAME-seed1,
    NAME-seed2, ... are seeds of one variant NAME; any other folder is a variant with one run.

    The table has for each variant the last figures of its complete runs, mean, least and most over the
    seeds. The picture has a row for each figure over --over, in training and held out if both have it; runs
    that are still under way, or were stopped, are drawn as far as they are. Hours are those of training steps
    alone, without compiling, evaluating and saving.
    """

    run_dirs: str = setting("", "output directories of runs: comma-separated paths or globs", required=True)
    figures: str = setting("mlm_loss", "columns of metrics.csv or eval_metrics.csv, comma-separated")
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
    # Keys of `LOGS` have points with `step`, `sequences`, `hours` (None where not known) and the figures
    points: dict[str, list[dict]]


def read_run(folder, figures):
    """Read the logs of a run: `LoggedRun`.

    `sequences` is the expected number: single packs hold more or fewer.

    Raises:
        InputError: the folder is no run's, its log of training has no row, or a log lacks a figure.
    """
    from bert_packed.runs.run_directory import RUN_FILE
    from bert_packed.training.metrics_log import read_rows

    record = read_json(folder / RUN_FILE)
    flags, factor = record["flags"], record["data"].get("packing_factor")
    # A batch that grows is another number of sequences at each step
    grows = flags.get("batch_warmup_steps")
    per_step = None if grows or not factor else factor * flags["train_batch_size"]
    per_step = record.get("sequences_per_step", per_step)  # of fine-tuning, whose batch has no packs
    # Scores of fine-tuning have no loss
    logs = {data: read_rows(folder / log) for data, log in LOGS.items()}
    rows = {data: [row for row in logged if row.get("loss", True)] for data, logged in logs.items()}
    if not rows["training"]:
        raise InputError(
            f"`run_dirs` must hold runs with rows in metrics.csv. Received: {folder}, without any."
        )
    hours = _hours(rows["training"], per_step)
    columns = [name for logged in rows.values() if logged for name in logged[0]]
    if missing := [name for name in figures if name not in columns]:
        raise InputError(
            f"`figures` must be columns of the logs in {folder}: {', '.join(dict.fromkeys(columns))}. "
            f"Received: {missing[0]}."
        )
    points = {}
    for data, logged in rows.items():
        points[data] = [
            {
                "step": int(row["step"]),
                "sequences": per_step and per_step * int(row["step"]),
                # Evaluations may lie between the rows of training
                "hours": float(np.interp(int(row["step"]), [*hours], [*hours.values()])) if hours else None,
                **{name: float(row[name]) for name in figures if row.get(name)},
            }
            for row in logged
        ]
    last = {data: of_data[-1]["step"] for data, of_data in points.items() if of_data}
    # The held-out log counts too: a run killed in its last evaluation is not complete
    num_steps = flags.get("num_train_steps", record.get("num_train_steps"))
    is_complete = set(last.values()) == {num_steps}
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


def summary_rows(runs, figures):
    """Last figures of the complete runs of each variant: rows of a table."""
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
                points = [one.points[data][-1] for one in complete if one.points[data]]
                last = [point[name] for point in points if name in point]
                row |= {
                    f"{data} {name}": statistics.fmean(last) if last else None,
                    f"{data} {name}, least": min(last, default=None),
                    f"{data} {name}, most": max(last, default=None),
                }
        rows.append(row)
    return rows


def bands(runs, data, over, figure):
    """Curves by variant: lists of (x, mean, least, most) over the seeds that have come to a step."""
    found = {}
    for one in runs:
        for point in one.points[data]:
            if point[over] is not None and figure in point:
                # Steps are the keys rather than x: sequences and hours of two seeds are never quite equal
                of_step = found.setdefault(one.variant, {}).setdefault(point["step"], [])
                of_step.append((point[over], point[figure]))
    curves = {}
    for variant, by_step in found.items():
        columns = [tuple(zip(*pairs, strict=True)) for _, pairs in sorted(by_step.items())]
        curves[variant] = [(statistics.fmean(x), statistics.fmean(y), min(y), max(y)) for x, y in columns]
    return curves


def draw(runs, figures, panels, path):
    """Draw a row of panels, (key of `LOGS`, "step", "sequences" or "hours"), for each figure, as PNG."""
    # Scores are held out alone
    panels = [
        (data, over)
        for data, over in panels
        if any(name in point for one in runs for point in one.points[data] for name in figures)
    ]
    figure, grid = new_figure(len(panels), len(figures), size=(3.6, 2.6))
    for name, row in zip(figures, grid, strict=True):
        for (data, over), axes in zip(panels, row, strict=True):
            draw_curves(axes, bands(runs, data, over, name))
            axes.set(title=data, xlabel=over, ylabel=name.replace("_", " ").replace("mlm ", "masked-LM "))
    save_picture(figure, path)


def draw_curves(axes, curves):
    """Draw lines with bands: dict from a label to a list of (x, y, least, most)."""
    # Packed and unpacked have their colors in every picture; the others take the next ones
    others = [label for label in curves if label not in COLORS]
    colors = COLORS | {label: f"C{number}" for number, label in enumerate(others, 2)}
    for label, points in curves.items():
        x, y, least, most = zip(*points, strict=True)
        axes.plot(x, y, color=colors[label], linewidth=1, label=label)
        axes.fill_between(x, least, most, color=colors[label], alpha=0.2, linewidth=0)
    if len(curves) > 1:
        axes.legend()


if __name__ == "__main__":
    sys.exit(run(main, CurvesConfig))
