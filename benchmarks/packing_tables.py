"""The papers' packing tables beside ours, and rows of `cghp`, which no paper has.

python -m benchmarks.packing_tables --markdown=docs/evidence/packing_tables.md \
    --picture=docs/pictures/packing_wikipedia_512.png
"""

import dataclasses
import functools
import os
import sys
import textwrap
from pathlib import Path

import numpy as np
from tabulate import tabulate

from benchmarks.packing_figures import KNOWN_DIFFERENCES, PRINTED
from benchmarks.pictures import new_figure, save_picture
from benchmarks.results import Settings, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import make_folder, write_text
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.packing.baselines import cost_of_sorted_batching, greedy_starts, shuffled_lengths
from bert_packed.packing.histogram import count_lengths, known_histogram_names, load_known_histogram
from bert_packed.packing.nnlshp import first_mix, mix_nnlshp, packing_matrix
from bert_packed.packing.plan import validate_plan
from bert_packed.tasks.glue.files import TASKS, read_lines
from bert_packed.text.tokenization import encode_sentences, load_vocab, make_tokenizer
from data_gen.dry_run import DEPTHS, plot_efficiency, plot_lengths

SORTED_BATCH = 32
MARKDOWN_WIDTH = 120
# Extra rows: (histogram, S, depths)
EXTRA = [("wikipedia_512", 512, (2, 3, 4, 8, "max")), ("squad_1.1_384", 384, (2, 3, "max"))]


DRAWN = ("spfhp", "lpfhp", "cghp")


@dataclasses.dataclass(frozen=True)
class TablesConfig(Settings):
    """Computes every deterministic figure of the packing tables of both papers, beside theirs, and the plans
    of column generation with their proof. Exit status 1 where a figure differs from the paper's and no
    known difference explains it, or it is no longer the one that is explained.
    """

    glue_dir: str = setting(
        "", "folder with CoLA/train.tsv, ...: measure GLUE lengths instead of loading them"
    )
    vocab_file: str = setting("", "WordPieces for `glue_dir`, one a line (bert-base-uncased in the papers)")
    markdown: str = setting("", "also write the tables to this file, for the documentation")
    picture: str = setting("", "also draw efficiency by depth into this PNG")

    def __post_init__(self):
        super().__post_init__()
        if bool(self.glue_dir) != bool(self.vocab_file):
            raise InputError(
                "`glue_dir` and `vocab_file` must be given together. "
                f"Received: glue_dir={self.glue_dir!r}, vocab_file={self.vocab_file!r}."
            )


def main(config):
    """Compute, print, write and draw; returns the exit status."""
    measured = measure_glue(config.glue_dir, config.vocab_file, 128) if config.glue_dir else {}
    rows, reasons = compare_with_papers(PRINTED, measured)
    rows += cghp_rows(measured)
    text = "\n".join(f"[{number}] {reason}." for number, reason in enumerate(reasons, start=1))
    show("packing_tables", config, {"packing": rows}, [f"Known differences:\n{text}"] if reasons else [])
    if config.markdown:
        write_markdown(config.markdown, rows, text, config.picture)
    if config.picture:
        draw(load_known_histogram("wikipedia_512", 512), 512, config.picture)
    return exit_status(rows)


def exit_status(rows):
    """1 where a row differs from the paper for no known reason, else 0."""
    return 1 if any("DIFFERS" in row["against the paper"] for row in rows) else 0


def compare_with_papers(printed_rows, measured=None):
    """Compute each printed row and compare each figure to its printed digits.

    Returns:
        List of dicts for the table, and the list of reasons that they refer to by number.
    """
    rows, reasons = [], []
    for printed in printed_rows:
        name = ", ".join(f"{key} {value:g}" for key, value in printed.options.items())
        row = {
            "table": printed.table,
            "data": printed.histogram,
            "algorithm": f"{printed.algorithm} {name}".strip(),
            "max_sequences_per_pack": str(printed.depth),
        }
        histogram = _find_histogram(printed.histogram, printed.max_seq_length, measured or {})
        if histogram is None:
            rows.append(
                {**row, **_show({}), "against the paper": "not computed: needs --glue_dir with this task"}
            )
            continue
        ours = compute_figures(
            printed.algorithm, histogram, printed.max_seq_length, printed.depth, printed.options
        )
        known = KNOWN_DIFFERENCES.get(
            (printed.table, printed.algorithm, printed.depth, tuple(printed.options.items())), {}
        )
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
        rows.append(
            {
                **row,
                **_show(ours),
                "against the paper": "; ".join(verdicts) or f"equal ({len(printed.figures)})",
            }
        )
    return rows, reasons


def cghp_rows(measured=None):
    """Rows for `cghp`, which no paper has: the same columns, with the proven gap in the last."""
    rows = []
    glue = [(name, 128, ("max",)) for name in known_histogram_names() if name.startswith("glue_")]
    for name, max_seq_length, depths in EXTRA + glue:
        histogram = _find_histogram(name, max_seq_length, measured or {})
        for depth in depths:
            plan = ALGORITHMS["cghp"](histogram, max_seq_length, depth)
            validate_plan(plan, histogram)
            rows.append(
                {
                    "table": "Column generation (ours)",
                    "data": name,
                    "algorithm": "cghp",
                    "max_sequences_per_pack": str(depth),
                    **_show(_figures_of_plan(plan)),
                    "against the paper": f"at least {plan.certificate.lower_bound:,} packs, "
                    f"gap {plan.certificate.gap:.1e} ({plan.certificate.tight})",
                }
            )
    return rows


def compute_figures(algorithm, histogram, max_seq_length, depth, options):
    """The figures of one row as numbers; None for those that the algorithm does not have."""
    tokens = sum(length * count for length, count in enumerate(histogram.tolist(), start=1))
    from_packs = functools.partial(_figures, sum(histogram.tolist()), tokens, max_seq_length)
    if algorithm == "sort":
        cost = cost_of_sorted_batching(histogram, max_seq_length, SORTED_BATCH)
        return {
            **from_packs(None, None, None),
            "efficiency": 100 * cost.efficiency,
            "packing_factor": cost.packing_factor,
        }
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


def write_markdown(path, rows, reasons, picture=""):
    """Write one section for each table, and the notes, as a page of the documentation."""
    parts = [
        "# The papers' packing tables",
        "Are our packing tables those of the papers? `python -m benchmarks.packing_tables --markdown=FILE`\n"
        "writes them. Efficiency is in percent; equal (n) means that n printed figures agree in every digit.",
    ]
    if picture:
        name = os.path.relpath(picture, Path(path).parent)
        parts.append(f"![Lengths of Wikipedia, and efficiency by depth]({name})")
    for table in dict.fromkeys(row["table"] for row in rows):
        section = [{k: v for k, v in row.items() if k != "table"} for row in rows if row["table"] == table]
        parts.append(f"## {table}")
        parts.append(tabulate(section, headers="keys", tablefmt="github", floatfmt=".6g", intfmt=","))
    if reasons:
        notes = (textwrap.fill(note, MARKDOWN_WIDTH, break_on_hyphens=False) for note in reasons.split("\n"))
        parts += ["## Known differences", *notes]
    parts.append(
        "See also: [packing](../guides/packing.md), [packing speed](packing_speed.md), [paper](paper.md)."
    )
    make_folder(Path(path).absolute().parent)
    write_text(path, "\n\n".join(parts) + "\n")


def measure_glue(glue_dir, vocab_file, max_seq_length):
    """Lengths of the training sequences of every GLUE task that is there, by our own tokenizer, lower-cased.

    Args:
        glue_dir: Folder with `CoLA/train.tsv`, `SST-2/train.tsv`, ...
        vocab_file: WordPieces, one a line.
        max_seq_length: S; longer sequences count as S, truncated.

    Returns:
        Dict from "glue_cola", "glue_sst2", ... to int64 `[S]`.

    Raises:
        InputError: no task is there, or a file lacks its columns.
    """
    tokenizer = make_tokenizer(load_vocab(vocab_file), do_lower_case=True)
    histograms = {}
    for task in TASKS.values():
        path = Path(glue_dir) / task.name / "train.tsv"
        if path.exists():
            texts, _, _ = read_lines(path, task.columns[:-1], task.has_torn_lines)
            lengths = np.ones(len(texts[0]), np.int64)  # [CLS]
            for column in texts:
                lengths += [len(ids) + 1 for ids in encode_sentences(tokenizer, column)]  # [SEP]
            name = f"glue_{task.name.replace('-', '').lower()}"
            histograms[name] = count_lengths(np.minimum(lengths, max_seq_length), max_seq_length)
    if not histograms:
        raise InputError(f"`glue_dir` must hold a task, such as CoLA/train.tsv. Received: {glue_dir}.")
    return histograms


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
    points = {}
    for name in algorithms:
        plans = {depth: ALGORITHMS[name](histogram, max_seq_length, depth) for depth in depths}
        points[name] = {depth: plan.efficiency for depth, plan in plans.items()}
    plot_efficiency(right, points)
    right.set(title="Efficiency by depth")
    right.legend(loc="lower right")
    save_picture(figure, path, dpi=110)


def _find_histogram(name, max_seq_length, measured):
    if name in measured:
        return measured[name]
    return load_known_histogram(name, max_seq_length) if name in known_histogram_names() else None


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
    known = packs is not None
    return {
        "packs": packs,
        "packs_millions": packs / 1e6 if known else None,
        "strategies": strategies,
        "depth": depth,
        "padding": packs * max_seq_length - tokens if known else None,
        "efficiency": 100 * tokens / (packs * max_seq_length) if known else None,
        "packing_factor": num_sequences / packs if known else None,
        "theoretical_speed_up": num_sequences * max_seq_length / tokens if tokens else None,
    }


def _show(figures):
    shown = ("packs", "strategies", "depth", "padding", "efficiency", "packing_factor")
    return {name: figures.get(name) for name in shown}


if __name__ == "__main__":
    sys.exit(run(main, TablesConfig))
