"""Where a step's time goes, and the roofline of its parts: the picture."""

from matplotlib.figure import Figure  # not pyplot: no display, no global state

from benchmarks.saved_picture import save_picture

BAR = 0.38
TOTALS = ("all parts", "whole step")


def draw(tables, rates, path):
    """Draw what `machine` measured, as PNG: milliseconds of each part beside its bound, and the roofline.

    Args:
        tables: Dict with the rows `parts` of `step_parts.part_rows`.
        rates: `machine_rates.Rates`.
        path: Of the PNG.
    """
    rows = tables["parts"]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    _draw_times(figure.add_subplot(1, 2, 1), rows)
    _draw_roofline(figure.add_subplot(1, 2, 2), [row for row in rows if row["part"] not in TOTALS], rates)
    save_picture(figure, path)


def _draw_times(axes, rows):
    places = range(len(rows))
    axes.barh([place - BAR / 2 for place in places], [row["ms"] for row in rows], BAR, label="measured")
    bound = [row["ms by its bound"] for row in rows]
    axes.barh([place + BAR / 2 for place in places], bound, BAR, label="by the machine's rates")
    axes.set_yticks(places, [row["part"] for row in rows])
    axes.invert_yaxis()
    axes.set(title="ms of a step", xscale="log")
    # Below the axes: the longest bars stand last
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, fontsize="small")


def _draw_roofline(axes, rows, rates):
    """Operations a byte across, GFLOP/s up; only what has products has a place here."""
    products = [row for row in rows if row["GFLOP/s"]]
    intensities = [row["operations a byte"] for row in products]
    ends = [min([1, *intensities]), max([*intensities, 1]) * 2]
    ridge = rates.products / rates.bandwidth
    across = sorted({*ends, ridge})
    axes.plot(across, [min(rates.products, rates.bandwidth * one) for one in across], color="black")
    for row, intensity in zip(products, intensities, strict=True):
        axes.plot(intensity, row["GFLOP/s"], "o", label=row["part"])
    axes.set(title="Roofline", xlabel="operations a byte", ylabel="GFLOP/s", xscale="log", yscale="log")
    axes.legend(loc="lower right", fontsize="small")
