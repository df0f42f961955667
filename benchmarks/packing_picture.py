"""How efficient is each algorithm at each depth: the picture."""

from matplotlib.figure import Figure  # not pyplot: no display, no global state

from benchmarks.saved_picture import save_picture
from bert_packed.packing.algorithms import ALGORITHMS
from data_gen.dry_run import DEPTHS
from data_gen.pictures import plot_efficiency, plot_lengths

DRAWN = ("spfhp", "lpfhp", "cghp")


def draw_efficiency_by_depth(histogram, max_seq_length, path, depths=DEPTHS, algorithms=DRAWN):
    """Draw the histogram, and beside it efficiency by depth for some algorithms, as PNG.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        path: Of the PNG.
        depths: Sequences per pack, or "max".
        algorithms: Names as in `bert_packed.packing.algorithms`.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_lengths(left, histogram)
    left.set(title="Lengths", yscale="log")
    points = {}
    for name in algorithms:
        plans = {depth: ALGORITHMS[name](histogram, max_seq_length, depth) for depth in depths}
        points[name] = {depth: plan.efficiency for depth, plan in plans.items()}
    plot_efficiency(right, points)
    right.set(title="Efficiency by depth")
    right.legend(loc="lower right")
    save_picture(figure, path, dpi=110)
