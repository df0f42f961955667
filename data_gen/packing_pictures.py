"""The two pictures of a dry run: how long the sequences are, and what depth buys."""

import os

import numpy as np


def draw_histogram(histogram, max_seq_length, path):
    """Draw the lengths with the share of padding that packing would remove.

    Args:
        histogram: int64 `[L]`.
        max_seq_length: S, drawn as a line.
        path: PNG to write.
    """
    figure, axes = _new_figure()
    lengths = np.arange(1, len(histogram) + 1)
    axes.bar(lengths, histogram, width=1.0, color="tab:blue")
    axes.axvline(max_seq_length, color="tab:red", linewidth=1, label=f"length {max_seq_length}")
    clipped = np.minimum(lengths, max_seq_length)
    padding = 1 - np.dot(histogram, clipped) / (histogram.sum() * max_seq_length)
    axes.set(
        xlabel="tokens in a sequence",
        ylabel="sequences",
        title=f"{histogram.sum():,} sequences; {padding:.1%} of the tokens are padding without packing",
    )
    if histogram.max() > 50 * max(np.median(histogram[histogram > 0]), 1):
        axes.set_yscale("log")  # one bar of truncated sequences would flatten all others
    axes.legend()
    _save(figure, path)


def draw_efficiency(rows, path):
    """Draw efficiency by depth, a line for each length.

    Args:
        rows: As `dry_run.try_choices` returns them.
        path: PNG to write.
    """
    figure, axes = _new_figure()
    for length in sorted({row["max_seq_length"] for row in rows}):
        of_length = [row for row in rows if row["max_seq_length"] == length]
        depths = [str(row["max_sequences_per_pack"]) for row in of_length]
        axes.plot(
            depths, [100 * row["efficiency"] for row in of_length], marker="o", label=f"{length} tokens"
        )
    for row in rows:
        if row["recommended"]:
            point = (str(row["max_sequences_per_pack"]), 100 * row["efficiency"])
            axes.plot(*point, "o", markersize=14, fillstyle="none", color="black", label="recommended")
    axes.set(
        xlabel="most sequences in a pack",
        ylabel="efficiency: tokens that are not padding, %",
        title=f"Efficiency by depth, {rows[0]['algorithm']}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def _new_figure():
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.subplots()


def _save(figure, path):
    partial = f"{path}.partial"
    figure.savefig(partial, dpi=100, format="png", metadata={"Software": None})
    os.replace(partial, path)
