"""Command line: learning curves of several runs in one picture, from their logs.

python -m benchmarks.run_curves --run_dirs=runs/static,runs/dynamic --picture=curves.png
"""

import dataclasses
import sys
from pathlib import Path

from benchmarks.saved_picture import save_picture
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError, check_settings, setting

LOGS = {"train": "metrics.csv", "eval": "eval_metrics.csv"}
DESCRIPTION = """
Draws a figure of several runs of run_pretraining.py over their steps, in training and held out, and prints
the last of each. Runs that are still under way, or were stopped, are drawn as far as they are.
"""


@dataclasses.dataclass(frozen=True)
class CurvesConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    run_dirs: str = setting(
        "", "output directories of runs, comma-separated; a curve is called as its folder"
    )
    figure: str = setting("mlm_loss", "column of metrics.csv and eval_metrics.csv")
    picture: str = setting("", "also draw the curves to this file, as PNG")
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        if not self.run_dirs:
            raise InputError("`run_dirs` must be given. Received: nothing.")


def main(config):
    """Read, print and draw."""
    folders = [Path(name) for name in config.run_dirs.split(",")]
    curves = read_curves(folders, config.figure)
    rows = [
        {"run": name, "data": data, "step": points[-1][0], config.figure: points[-1][1]}
        for (data, name), points in curves.items()
    ]
    print_table(rows, config.json)
    if config.picture:
        draw(curves, config.figure, config.picture)


def read_curves(folders, figure):
    """The points of each run's curves.

    Args:
        folders: Paths of output directories.
        figure: Column of their logs.

    Returns:
        Dict from (`train` or `eval`, name of the run) to a list of (step, value), of what is logged.

    Raises:
        InputError: two runs have one name, a folder has no log, or no log has that column.
    """
    # TensorBoard: not for --help
    from bert_packed.training.metrics_log import read_rows

    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise InputError(f"`run_dirs` must be folders of different names. Received: {', '.join(names)}.")
    curves = {}
    for data, log in LOGS.items():
        for name, folder in zip(names, folders, strict=True):
            rows = read_rows(folder / log)
            if rows and figure not in rows[0]:
                raise InputError(
                    f"`figure` must be a column of {folder / log}: {', '.join(rows[0])}. Received: {figure}."
                )
            points = [(int(row["step"]), float(row[figure])) for row in rows if row[figure]]
            if points:
                curves[data, name] = points
            elif data == "train":
                raise InputError(
                    f"`run_dirs` must hold runs with rows in {log}. Received: {folder}, without any."
                )
    return curves


def draw(curves, figure, path):
    """Draw curves as PNG: a panel for each kind of data, a line for each run.

    Args:
        curves: Of `read_curves`.
        figure: Name of the figure.
        path: Of the PNG.
    """
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    kinds = [data for data in LOGS if any(data == one for one, _ in curves)]
    picture = Figure(figsize=(4.2 * len(kinds), 3.2), layout="constrained")
    panels = picture.subplots(1, len(kinds), squeeze=False)[0]
    for panel, data in zip(panels, kinds, strict=True):
        for (its_data, name), points in curves.items():
            if its_data == data:
                panel.plot(*zip(*points, strict=True), label=name, linewidth=1)
        panel.set(title={"train": "training", "eval": "held out"}[data], xlabel="step", ylabel=figure)
        panel.legend()
    save_picture(picture, path)


if __name__ == "__main__":
    sys.exit(run(main, CurvesConfig, DESCRIPTION))
