"""Loss and accuracy over sequences and over time, seeds as bands: the picture of a set of learning curves."""

from matplotlib.figure import Figure  # not pyplot: no display, no global state

from benchmarks.curve_tables import FIGURES, curves_of
from benchmarks.saved_picture import save_picture

PANELS = (("train", "sequences"), ("eval", "sequences"), ("eval", "hours"))
TITLES = {"train": "training", "eval": "held out"}


def draw(points, variants, path):
    """Draw the curves of some variants, as PNG, whole or not at all; returns whether there was one to draw.

    Args:
        points: Of `curve_tables.read_points`.
        variants: Names, which have the colours of their order.
        path: Of the PNG.
    """
    points = [point for point in points if point["variant"] in variants]
    panels = [panel for panel in PANELS if any(point["data"] == panel[0] for point in points)]
    if not panels:
        return False
    figure = Figure(figsize=(4.0 * len(panels), 5.6), layout="constrained")
    all_axes = figure.subplots(len(FIGURES), len(panels), squeeze=False)
    for name, row in zip(FIGURES, all_axes, strict=True):
        for (data, over), axes in zip(panels, row, strict=True):
            curves = curves_of(points, data, over, name)
            for number, variant in enumerate(variants):
                if variant in curves:
                    x, mean, least, most = zip(*curves[variant], strict=True)
                    axes.plot(x, mean, color=f"C{number}", linewidth=1, label=variant)
                    axes.fill_between(x, least, most, color=f"C{number}", alpha=0.2, linewidth=0)
            axes.set(title=TITLES[data], xlabel=over, ylabel=name)
    all_axes[0, 0].legend(fontsize="small")
    save_picture(figure, path, dpi=80)
    return True
