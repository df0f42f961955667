"""How un-padding scales, and how one device's speed-ups are spread: Figures 5 and 6 as a picture."""

import numpy as np
from matplotlib.figure import Figure  # not pyplot: no display, no global state

from benchmarks.saved_picture import save_picture

POINTS = np.linspace(0.5, 4.0, 400)


def draw(tables, group, one, measured, path):
    """Draw speed-ups by devices, and densities of the speed-ups of 8 devices and of one, as PNG.

    Args:
        tables: Of `unpadding_scaling`, by name.
        group, one: `Gumbel` of the paper's 8 devices, and of one of them.
        measured: List of our own speed-ups and the `Gumbel` fitted to them; None for none.
        path: Of the PNG.
    """
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    scaling, spread = figure.subplots(1, 2)
    for name, style in (("scaling, the paper's times", "-"), ("scaling, times from here", "--")):
        rows = tables.get(name)
        if rows:
            source = "paper" if style == "-" else "here"
            devices = [row["devices"] for row in rows]
            for way, color in (("un-padding", "C1"), ("packing", "C0")):
                scaling.plot(
                    devices, [row[way] for row in rows], style, color=color, label=f"{way}, {source}"
                )
    scaling.set_xscale("log", base=2)
    scaling.set(title="Speed-up over padding", xlabel="devices")
    scaling.legend(fontsize="small")
    spread.plot(POINTS, group.density(POINTS), "-", color="C2", label="8 GPUs, paper")
    spread.plot(POINTS, one.density(POINTS), "-", color="C1", label="one GPU, paper")
    if measured:
        speed_ups, own = measured
        spread.hist(speed_ups, bins="auto", density=True, color="0.8", label="one device, here")
        spread.plot(POINTS, own.density(POINTS), "--", color="C1", label="its Gumbel")
    spread.set(title="Un-padding of one device: density", xlabel="speed-up")
    spread.legend(fontsize="small")
    save_picture(figure, path)
