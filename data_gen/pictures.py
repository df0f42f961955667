"""Plots of the dry run: histogram of lengths, and efficiency by depth."""

import math

import numpy as np

from bert_packed.core.storage import write_whole


def draw_histogram(histogram, max_seq_length, path):
    """Draw a histogram of lengths, int64 `[L]`, as a PNG; the title has the padding without packing."""
    figure, axes = _new_figure()
    num_sequences = sum(histogram.tolist())
    clipped = np.minimum(np.arange(1.0, len(histogram) + 1), max_seq_length)
    padding = 1 - np.dot(histogram, clipped) / (num_sequences * max_seq_length)
    plot_lengths(axes, histogram)
    axes.axvline(max_seq_length, color="tab:red", linewidth=1, label=f"length {max_seq_length}")
    axes.set(title=f"{num_sequences:,} sequences; {padding:.1%} of the tokens are padding without packing")
    axes.legend(loc="upper right")  # "best" would search all lengths for free space
    _save(figure, path)


def draw_efficiency(rows, path):
    """Draw efficiency by depth, from rows of `dry_run.try_choices`, as a PNG with a line for each length."""
    figure, axes = _new_figure()
    points = {}
    for row in rows:
        label = f"{row['max_seq_length']} tokens{', cuts text' if row['tokens_cut'] else ''}"
        points.setdefault(label, {})[row["max_sequences_per_pack"]] = row["efficiency"]
    positions = plot_efficiency(axes, points)
    for recommended in (row for row in rows if row["recommended"]):  # one, or none
        x, y = positions[recommended["max_sequences_per_pack"]], 100 * recommended["efficiency"]
        axes.plot(x, y, "o", markersize=14, fillstyle="none", color="black", label="recommended")
    axes.set(title=f"Efficiency by depth, {rows[0]['algorithm']}")
    axes.legend(loc="lower right")
    _save(figure, path)


def plot_lengths(axes, histogram):
    """Plot a histogram, int64 `[L]`."""
    # As one outline: a bar for each of many lengths takes minutes
    axes.stairs(histogram, np.arange(len(histogram) + 1) + 0.5, fill=True, color="tab:blue")
    axes.set(xlabel="tokens in a sequence", ylabel="sequences")
    if histogram.max() > 50 * max(np.median(histogram[histogram > 0]), 1):
        axes.set_yscale("log")  # one bar of truncated sequences would flatten all others


def plot_efficiency(axes, points):
    """Plot efficiency by depth; returns a dict from depth to its position on the x axis.

    `points` is a dict from the label of a line to a dict from depth, an integer or "max", to efficiency in
    0..1; a line may lack depths.
    """
    depths = {depth for line in points.values() for depth in line}
    ordered = sorted(depths, key=lambda depth: math.inf if depth == "max" else depth)
    positions = {depth: index for index, depth in enumerate(ordered)}
    for label, line in points.items():
        places = [positions[depth] for depth in line]
        axes.plot(places, [100 * efficiency for efficiency in line.values()], marker="o", label=label)
    axes.set_xticks(range(len(ordered)), [str(depth) for depth in ordered])
    axes.set(xlabel="most sequences in a pack", ylabel="efficiency: tokens that are not padding, %")
    axes.grid(alpha=0.3)
    return positions


def _new_figure():
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.subplots()


def _save(figure, path):
    with write_whole(path) as partial:
        figure.savefig(partial, dpi=100, format="png", metadata={"Software": None})
