"""How much is padding, and how fast each way trains: the picture."""

from matplotlib.figure import Figure  # not pyplot: no display, no global state

from benchmarks.saved_picture import save_picture

BAR = 0.38


def draw(tables, path):
    """Draw what was measured, as PNG: padding rates beside print, and real tokens/s of steps and operators.

    Args:
        tables: Dict from `padding`, `training` and `operators`, each of which may be missing, to rows as
            `packmamba` prints them.
        path: Of the PNG.
    """
    drawn = [name for name in ("padding", "training", "operators") if name in tables]
    figure = Figure(figsize=(4.2 * max(1, len(drawn)), 3.2), layout="constrained")
    for number, name in enumerate(drawn, start=1):
        axes = figure.add_subplot(1, len(drawn), number)
        if name == "padding":
            _draw_padding(axes, tables[name])
        else:
            _draw_speed(axes, tables[name], name)
    save_picture(figure, path)


def _draw_padding(axes, rows):
    places = range(len(rows))
    axes.barh([place - BAR / 2 for place in places], [row["padding, %"] for row in rows], BAR, label="here")
    printed = [row["PackMamba, %"] or 0 for row in rows]
    axes.barh([place + BAR / 2 for place in places], printed, BAR, label="PackMamba")
    axes.set_yticks(places, [row["way"] for row in rows])
    axes.invert_yaxis()
    axes.set(title="Padding, %")
    axes.legend(loc="lower right")


def _draw_speed(axes, rows, name):
    labels = [", ".join(row[part] for part in ("operator", "pass", "way") if part in row) for row in rows]
    axes.barh(labels, [row["real tokens/s"] for row in rows])
    axes.invert_yaxis()
    axes.set(title=f"{name}: real tokens/s")
    if name == "operators":  # a convolution is a hundred times as fast as a scan
        axes.set_xscale("log")
