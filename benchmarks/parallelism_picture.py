"""What spreading a model over devices costs, by layout: the picture."""

from matplotlib.figure import Figure  # not pyplot: no display, no global state

from benchmarks.saved_picture import save_picture

BAR = 0.38
COLORS = {"megatron1d": "tab:orange", "optimus2d": "tab:blue", "tree": "tab:blue", "gather": "tab:green"}


def draw(tables, path):
    """Draw those of the tables that have a picture, as PNG: memory, largest batch, and scalars sent.

    Args:
        tables: Dict from name to rows, as `parallelism` prints them.
        path: Of the PNG.
    """
    drawn = [name for name in ("memory", "batch", "crossover") if name in tables]
    figure = Figure(figsize=(4 * max(1, len(drawn)), 3.2), layout="constrained")
    for number, name in enumerate(drawn, start=1):
        axes = figure.add_subplot(1, len(drawn), number)
        if name == "memory":
            _draw_bars(axes, tables[name], "peak, MiB")
            axes.set(title="Memory of a device, MiB", yscale="log")
        elif name == "batch":
            _draw_bars(axes, tables[name], "largest batch")
            axes.set(title="Largest batch")
        else:
            _draw_sent(axes, tables[name])
    save_picture(figure, path)


def _draw_bars(axes, rows, column):
    """Bars of both layouts, side by side for each number of devices."""
    numbers = sorted({row["devices"] for row in rows if row["layout"] in COLORS})
    for shift, layout in ((-0.5, "megatron1d"), (0.5, "optimus2d")):
        values = {row["devices"]: row[column] for row in rows if row["layout"] == layout}
        places = [place + shift * BAR for place in range(len(numbers))]
        axes.bar(places, [values[number] for number in numbers], BAR, label=layout, color=COLORS[layout])
    axes.set_xticks(range(len(numbers)), numbers)
    axes.set(xlabel="devices")
    axes.legend()


def _draw_sent(axes, rows):
    """What 2D sends in units of what 1D sends."""
    numbers = [row["devices"] for row in rows]
    axes.axhline(1, color=COLORS["megatron1d"], label="megatron1d")
    for transport in ("tree", "gather"):
        sent = [row[f"{transport} / 1D"] for row in rows]
        axes.plot(numbers, sent, "o-", color=COLORS[transport], label=f"optimus2d, {transport}")
    axes.set(title="Sent in a step, of 1D", xlabel="devices", xscale="log", ylim=(0, None))
    axes.legend()
