"""How efficient is each algorithm at each depth: the picture."""

from matplotlib.figure import Figure  # not pyplot: no display, no global state

from data_gen.packing.algorithms import ALGORITHMS

DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, "max")
DRAWN = ("spfhp", "lpfhp", "cghp")


def draw_efficiency_by_depth(histogram, max_seq_length, path, depths=DEPTHS, algorithms=DRAWN):
    """Draw the histogram, and beside it efficiency by depth for some algorithms, as PNG.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        path: Of the PNG.
        depths: Sequences per pack, or "max".
        algorithms: Names as in `data_gen.packing.algorithms`.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.fill_between(range(1, max_seq_length + 1), histogram, step="mid")
    left.set(xlabel="length in tokens", ylabel="sequences", title="Lengths", yscale="log")
    for name in algorithms:
        efficiency = [100 * ALGORITHMS[name](histogram, max_seq_length, depth).efficiency for depth in depths]
        right.plot(range(len(depths)), efficiency, marker="o", label=name)
    right.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    right.set(xlabel="most sequences per pack", ylabel="efficiency in %", title="Efficiency by depth")
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, dpi=110, format="png")
