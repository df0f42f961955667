"""The papers' packing tables beside ours, and rows of `cghp`, which no paper has.

python -m benchmarks.packing_tables --picture=docs/pictures/packing_wikipedia_512.png
"""

import dataclasses
import functools
import sys

import numpy as np

from benchmarks.packing_figures import KNOWN_DIFFERENCES, PRINTED
from benchmarks.runner import Settings, new_figure, save_picture, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.packing.baselines import cost_of_sorted_batching, greedy_starts, shuffled_lengths
from bert_packed.packing.histogram import known_histogram_names, load_known_histogram
from bert_packed.packing.nnlshp import first_mix, mix_nnlshp, packing_matrix
from bert_packed.packing.plan import validate_plan
from data_gen.dry_run import DEPTHS, plot_efficiency, plot_lengths

SORTED_BATCH = 32
OURS = "Column generation (ours)"  # a table that no paper has
# That table has these rows besides GLUE's: (histogram, S, depths)
EXTRA = [("wikipedia_512", 512, (2, 3, 4, 8, "max")), ("squad_1.1_384", 384, (2, 3, "max"))]
DIGITS = 6
DRAWN = ("spfhp", "lpfhp", "cghp")


@dataclasses.dataclass(frozen=True)
class TablesConfig(Settings):
    """Computes every deterministic figure of the packing tables of both papers, beside theirs, and the plans
    of column generation with their proof. Exit status 1 where a figure differs from the paper's and no
    known difference explains it, or it is no longer the one that is explained.
    """

    picture: str = setting("", "also draw efficiency by depth into this PNG")


def main(config):
    """Compute, print, write and draw; returns the exit status."""
    tables, reasons = compare_with_papers(PRINTED)
    tables[OURS] = cghp_rows()
    notes = [f"[{number}] {reason}." for number, reason in enumerate(reasons, start=1)]
    show("packing_tables", config, tables, notes, DIGITS)
    if config.picture:
        draw(load_known_histogram("wikipedia_512", 512), 512, config.picture)
    return exit_status(tables)


def exit_status(tables):
    """1 where a row differs from the paper for no known reason, else 0."""
    return int(any("DIFFERS" in row["against the paper"] for rows in tables.values() for row in rows))


def compare_with_papers(printed_rows):
    """Compute each printed row and compare each figure to its printed digits.

    Returns:
        Dict from the name of a table to its rows, and the list of reasons that they refer to by number.
    """
    tables, reasons = {}, []
    for printed in printed_rows:
        name = ", ".join(f"{key} {value:g}" for key, value in printed.options.items())
        row = {
            "data": printed.histogram,
            "algorithm": f"{printed.algorithm} {name}".strip(),
            "depth limit": str(printed.depth),
        }
        rows = tables.setdefault(printed.table, [])
        if printed.histogram not in known_histogram_names():
            rows.append({**row, **_show({}), "against the paper": "not computed: no histogram of it"})
            continue
        histogram = load_known_histogram(printed.histogram, printed.max_seq_length)
        ours = compute_figures(
            printed.algorithm, histogram, printed.max_seq_length, printed.depth, printed.options
        )
        rows.append({**row, **_show(ours), "against the paper": verdict_of(printed, ours, reasons)})
    return tables, reasons


def verdict_of(printed, ours, reasons):
    """Compare our figures to printed ones: a text. Reasons of known differences are added to a list."""
    key = printed.table, printed.algorithm, printed.depth, tuple(printed.options.items())
    known = KNOWN_DIFFERENCES.get(key, {})
    verdicts = []
    for figure, text in printed.figures.items():
        if agrees(ours[figure], text):
            continue
        if figure not in known:
            verdicts.append(f"{figure}: DIFFERS from the paper's {_shown(text)}")
        elif not is_accepted(ours[figure], known[figure]):
            verdicts.append(
                f"{figure}: {ours[figure]:.9g} DIFFERS from the paper's {_shown(text)} and from ours, "
                f"{known[figure].ours}"
            )
        else:
            reason = known[figure].reason
            if reason not in reasons:
                reasons.append(reason)
            verdicts.append(f"{figure} (paper: {_shown(text)}) [{reasons.index(reason) + 1}]")
    return "; ".join(verdicts) or f"equal ({len(printed.figures)})"


def cghp_rows():
    """Rows for `cghp`, which no paper has: the same columns, with the proven gap in the last."""
    rows = []
    glue = [(name, 128, ("max",)) for name in known_histogram_names() if name.startswith("glue_")]
    for name, max_seq_length, depths in EXTRA + glue:
        histogram = load_known_histogram(name, max_seq_length)
        for depth in depths:
            plan = ALGORITHMS["cghp"](histogram, max_seq_length, depth)
            validate_plan(plan, histogram)
            rows.append(
                {
                    "data": name,
                    "algorithm": "cghp",
                    "depth limit": str(depth),
                    **_show(_figures_of_plan(plan)),
                    "against the paper": f"at least {plan.certificate.lower_bound:,} packs, "
                    f"gap {plan.certificate.gap:.1e} ({plan.certificate.tight})",
                }
            )
    return rows


def compute_figures(algorithm, histogram, max_seq_length, depth, options):
    """The figures of one row that the algorithm has, as numbers; the others are None or absent."""
    tokens = sum(length * count for length, count in enumerate(histogram.tolist(), start=1))
    from_packs = functools.partial(_figures, sum(histogram.tolist()), tokens, max_seq_length)
    if algorithm == "sort":
        cost = cost_of_sorted_batching(histogram, max_seq_length, SORTED_BATCH)
        return {"efficiency": 100 * cost.efficiency, "packing_factor": cost.packing_factor}
    if algorithm == "greedy":
        lengths = shuffled_lengths(histogram, seed=0)
        limit = max_seq_length if depth == "max" else depth
        return from_packs(len(greedy_starts(lengths, max_seq_length, limit)), None, None)
    if algorithm == "nnlshp residuals":
        return _figures_before_repair(histogram, max_seq_length, depth, options)
    if algorithm == "nnlshp":  # strategies counted as the papers do, before empty slots split them
        mix, _ = mix_nnlshp(histogram, max_seq_length, depth, **options)
        return from_packs(sum(count for _, count in mix), len(mix), max(len(pack) for pack, _ in mix))
    name = "spfhp" if algorithm == "none" else algorithm
    plan = ALGORITHMS[name](histogram, max_seq_length, depth, **options)
    validate_plan(plan, histogram)
    return _figures_of_plan(plan)


def agrees(number, text):
    """True if a number, rounded to the digits of a printed figure, is that figure."""
    decimals = len(text.partition(".")[2])
    return f"{number:.{decimals}f}" == text


def _shown(text):
    """A printed figure for readers: whole numbers with commas."""
    return text if "." in text else f"{int(text):,}"


def is_accepted(number, known):
    """True if a figure that differs from the paper's is the one that `Known` explains, and not a new one."""
    if not known.within:
        return agrees(number, known.ours)
    return abs(number - float(known.ours)) <= known.within


def draw(histogram, max_seq_length, path, depths=DEPTHS, algorithms=DRAWN):
    """Draw a histogram, and beside it efficiency by depth for some algorithms, as PNG."""
    figure, ((left, right),) = new_figure(2, size=(5.5, 4))
    plot_lengths(left, histogram)
    left.set(title="Lengths", yscale="linear")
    *_, second, tallest = np.sort(histogram)
    if tallest > 5 * second:  # the sequences that were cut: one bar would flatten all others
        length = np.argmax(histogram) + 1
        left.set(ylim=(0, 1.2 * second))
        words = f"{tallest / 1e6:.1f} million sequences of {length} tokens,\nbeyond the axis"
        left.annotate(
            words, (length, 1.18 * second), (-12, -8), textcoords="offset points", ha="right", va="top"
        )
    points = {
        name: {depth: ALGORITHMS[name](histogram, max_seq_length, depth).efficiency for depth in depths}
        for name in algorithms
    }
    plot_efficiency(right, points)
    right.set(title="Efficiency by depth")
    right.legend(loc="lower right")
    save_picture(figure, path, dpi=110)


def _figures_of_plan(plan):
    return _figures(
        plan.num_sequences,
        plan.num_real_tokens,
        plan.max_seq_length,
        plan.num_packs,
        len(plan.strategies),
        plan.depth,
    )


def _figures_before_repair(histogram, max_seq_length, depth, options):
    strategies, whole_counts, _ = first_mix(histogram, max_seq_length, depth, **options)
    slots = (packing_matrix(strategies, max_seq_length) @ whole_counts).astype(np.int64)
    residuals = (histogram - slots).tolist()
    by_length = {f"residual_{length}": number for length, number in enumerate(residuals, start=1)}
    return {"unpacked": sum(number for number in residuals if number > 0), **by_length}


def _figures(num_sequences, tokens, max_seq_length, packs, strategies, depth):
    return {
        "packs": packs,
        "packs_millions": packs / 1e6,
        "strategies": strategies,
        "depth": depth,
        "padding": packs * max_seq_length - tokens,
        "efficiency": 100 * tokens / (packs * max_seq_length),
        "packing_factor": num_sequences / packs,
        "theoretical_speed_up": num_sequences * max_seq_length / tokens,
    }


def _show(figures):
    shown = ("packs", "strategies", "depth", "padding", "efficiency", "packing_factor")
    return {name: figures.get(name) for name in shown}


if __name__ == "__main__":
    sys.exit(run(main, TablesConfig))
