"""Pictures of benchmarks: grouped bars, lines with bands, and PNG files that appear whole."""

from pathlib import Path

from bert_packed.core.storage import make_folder, write_whole

BAR = 0.8  # of the room of a group of bars
# Of each thing the same in every picture
COLORS = {
    "packed": "C0",
    "unpacked": "C1",
    "padding-free": "seagreen",
    "sorted by length": "0.45",
    "padded": "0.65",
    "keras-hub": "plum",
    "optimus2d": "C0",
    "megatron1d": "C1",
}


def new_figure(columns, rows=1, size=(4.2, 3.2)):
    """A figure with a grid of axes of a size in inches each: the figure, and a list of rows of axes."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save_picture(figure, path, dpi=90):
    """Write a PNG, whatever `path` ends in, that appears under its name only when complete."""
    make_folder(Path(path).absolute().parent)
    with write_whole(str(path)) as partial:
        figure.savefig(partial, dpi=dpi, format="png")


def draw_bars(axes, rows, label, columns, horizontal=True):
    """Draw a group of bars for each row under its `label`, a bar for each column; None is no bar.

    `columns` is a dict from the name of a column to its label in the legend.
    """
    width = BAR / len(columns)
    for number, (column, title) in enumerate(columns.items()):
        # The bars of a group lie around the place of its label
        places = [place + (number + 0.5) * width - BAR / 2 for place in range(len(rows))]
        values = [row[column] or 0 for row in rows]
        (axes.barh if horizontal else axes.bar)(places, values, width, label=title, color=COLORS.get(title))
    labels = [str(row[label]) for row in rows]
    if horizontal:
        axes.set_yticks(range(len(rows)), labels)
        axes.invert_yaxis()
    else:
        axes.set_xticks(range(len(rows)), labels)
    if len(columns) > 1:
        axes.legend(fontsize="small")


def draw_amounts(axes, amounts):
    """Draw a bar with its number for each label: dict from label to (a key of `COLORS`, value)."""
    kinds, values = zip(*amounts.values(), strict=True)
    bars = axes.barh([*amounts], values, BAR, color=[COLORS[kind] for kind in kinds])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.margins(x=0.15)  # room for the number of the longest
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(axes, curves):
    """Draw lines with bands: dict from a label to a list of (x, y, least, most)."""
    # Packed and unpacked have their colors in every picture; the rest takes the next ones
    others = [label for label in curves if label not in COLORS]
    colors = COLORS | {label: f"C{number}" for number, label in enumerate(others, 2)}
    for label, points in curves.items():
        x, y, least, most = zip(*points, strict=True)
        axes.plot(x, y, color=colors[label], linewidth=1, label=label)
        axes.fill_between(x, least, most, color=colors[label], alpha=0.2, linewidth=0)
    if len(curves) > 1:
        axes.legend(fontsize="small")
