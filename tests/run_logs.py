"""Content of a run's log."""

import csv


def losses_of(folder):
    """The losses in the training log of a run: list of floats."""
    with (folder / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
