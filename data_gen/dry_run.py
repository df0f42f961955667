"""Dry run: efficiency and cost for several lengths and depths, and a recommendation, without packing."""

import dataclasses
import itertools
import math
import os
import sys
import time

import numpy as np
from tqdm import tqdm

from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_whole
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.bounds import lower_bound
from bert_packed.packing.histogram import fold, known_histogram_names, load_histogram, load_known_histogram
from bert_packed.schema import CAUSAL_LM

DEFAULT_FOLDER = "packing_report"
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, "max")
LENGTH_FACTORS = (0.25, 0.5, 1, 2)
# BERT-base has this width: it determines the length from which attention, quadratic in it, outweighs the rest
MODEL_WIDTH = 768
# A smaller depth within this share of the best is preferred: each slot for a sequence costs a little per step
DEPTH_TOLERANCE = 0.005
# This is enough for a choice: a gap of 1e-4 takes a tenth of the time of 1e-6
GAP = 1e-4


def report_choices(config):
    """Try the lengths and depths of a `PackConfig`, and draw them as PNGs: (rows, folder of the PNGs)."""
    histogram = read_histogram(config.histogram, config.input_file)
    rows, notes = try_choices(
        histogram, config.algorithm, config.max_seq_length, config.max_sequences_per_pack
    )
    for note in notes:
        tqdm.write(note, file=sys.stderr)
    folder = config.output_dir or DEFAULT_FOLDER
    os.makedirs(folder, exist_ok=True)
    draw_histogram(histogram, config.max_seq_length, os.path.join(folder, "length_histogram.png"))
    draw_efficiency(rows, os.path.join(folder, "efficiency_by_depth.png"))
    return rows, folder


def try_choices(histogram, algorithm, max_seq_length, max_sequences_per_pack):
    """Plan for a quarter to twice of a length, and for depths: (rows in ascending order, notes for the user).

    A row's `total_speed_up` compares FLOPs of BERT-base with those for unpacked data of `max_seq_length`.
    Raises `InputError` where the algorithm can do none of the depths at that length.
    """
    depths = DEPTHS if max_sequences_per_pack == "max" else (max_sequences_per_pack,)
    lengths = sorted({max(3, int(max_seq_length * factor)) for factor in LENGTH_FACTORS})
    rows, failures, shallower = [], [], {}
    choices = list(itertools.product(lengths, depths))
    for length, depth in tqdm(choices, desc="dry run", unit=" plans", disable=None):
        start = time.perf_counter()
        try:
            plan = _plan(histogram, algorithm, length, depth, shallower.get(length))
        except ValueError as error:  # the algorithm does not scale to this length or depth
            failures.append((length, depth, error))
            continue
        shallower[length] = plan
        rows.append(_describe(plan, histogram, time.perf_counter() - start))
    at_asked = next((row for row in rows if row["max_seq_length"] == max_seq_length), None)
    if at_asked is None:
        error = next(error for length, _, error in failures if length == max_seq_length)
        raise InputError(f"`algorithm` {algorithm} cannot pack these lengths: {error}") from error
    # Unpacked, every sequence is a pack of length S
    baseline = training_cost(sum(histogram.tolist()), max_seq_length)
    best = recommend(rows)
    for row in rows:
        if row["tokens_cut"] <= at_asked["tokens_cut"]:  # a speed-up on less text would be misleading
            row["total_speed_up"] = baseline / training_cost(row["packs"], row["max_seq_length"])
        row["recommended"] = row is best
    notes = []
    if failures:
        left_out = "; ".join(
            f"length {length} at depth {', '.join(str(depth) for _, depth, _ in group)}"
            for length, group in itertools.groupby(failures, lambda failure: failure[0])
        )
        notes.append(f"left out, because {algorithm} cannot do it: {left_out}. First error: {failures[0][2]}")
    if at_asked["tokens_cut"]:
        notes.append(
            f"max_seq_length={max_seq_length} cuts {at_asked['tokens_cut']:,} tokens of "
            f"{at_asked['truncated']:,} sequences; the longest has {len(np.trim_zeros(histogram, 'b')):,}"
        )
    return rows, notes


def recommend(rows):
    """The row of the cheapest length that cuts no token, at the smallest depth within 0.5 %, or None."""
    costs = [
        (training_cost(row["packs"], row["max_seq_length"]), row) for row in rows if not row["tokens_cut"]
    ]
    if not costs:
        return None
    least, cheapest = min(costs, key=lambda pair: pair[0])
    length, most = cheapest["max_seq_length"], least * (1 + DEPTH_TOLERANCE)
    return next(row for cost, row in costs if row["max_seq_length"] == length and cost <= most)


def training_cost(num_packs, length):
    """FLOPs of an epoch in an encoder block of BERT-base, in units of 4 x 768."""
    # A token costs 24 D^2 in products with weights and 4 S D in attention: 6 D + S, times 4 D
    return num_packs * length * (6 * MODEL_WIDTH + length)


def _plan(histogram, algorithm, max_seq_length, depth, shallower):
    folded = fold(histogram, max_seq_length)
    if algorithm != DEFAULT_ALGORITHM:
        return ALGORITHMS[algorithm](folded, max_seq_length, depth)
    if shallower and shallower.num_packs <= (1 + GAP) * lower_bound(folded, max_seq_length, depth):
        # the shallower plan is good enough; but its dual values prove nothing for a larger depth
        return dataclasses.replace(
            shallower, max_sequences_per_pack=depth, notes=(), dual_values=(), lp_bound=None
        )
    return ALGORITHMS[algorithm](folded, max_seq_length, depth, gap=GAP, integer_programs=False)


def _describe(plan, histogram, seconds):
    length, certificate = plan.max_seq_length, plan.certificate
    squares = np.arange(1, length + 1, dtype=np.float64) ** 2  # no overflow
    needed = int(np.dot(fold(histogram, length), squares))  # pairs of tokens of one sequence
    over = histogram[length:].tolist()
    return {
        "algorithm": plan.algorithm,
        "max_sequences_per_pack": plan.max_sequences_per_pack,
        "max_seq_length": length,
        "packs": plan.num_packs,
        "lower_bound": certificate.lower_bound,
        "gap": certificate.gap,
        "tight_bound": certificate.tight,
        "efficiency": plan.efficiency,
        "packing_factor": plan.packing_factor,
        "depth": plan.depth,
        "strategies": len(plan.strategies),
        # attention computes this many times the pairs of tokens that it needs; 1 without waste
        "attention_cost": plan.num_packs * length**2 / needed,
        "total_speed_up": None,
        "truncated": sum(over),
        "tokens_cut": sum(tokens * count for tokens, count in enumerate(over, start=1)),
        "seconds": seconds,
        "recommended": False,
    }


def read_histogram(histogram, input_file):
    """Count lengths as they are on disk, also those over any S: int64 `[L]`, L the longest."""
    counts = _read_json(histogram) if histogram else _count_records(input_file)
    if not counts.any():
        name, path = ("histogram", histogram) if histogram else ("input_file", input_file)
        raise InputError(f"`{name}` must count a sequence. Received: {path}, which counts none.")
    return counts


def _count_records(input_file):
    from bert_packed.records.inputs import find_files
    from bert_packed.records.read_bert import read_unpacked
    from bert_packed.records.read_causal import read_causal
    from bert_packed.records.record_rules import find_common_objective

    counts = np.zeros(0, np.int64)
    paths = find_files(input_file, "input_file")
    read = read_causal if find_common_objective(paths) == CAUSAL_LM else read_unpacked
    for path in paths:
        for batch in read(path):
            more = np.bincount(batch["lengths"], minlength=len(counts) + 1)[1:]
            more[: len(counts)] += counts
            counts = more
    return counts


def _read_json(name):
    try:
        if name in known_histogram_names() and not os.path.exists(name):
            return load_known_histogram(name)
        return load_histogram(name)
    except ValueError as error:
        raise InputError(str(error)) from error


def draw_histogram(histogram, max_seq_length, path):
    """Draw a histogram of lengths, int64 `[L]`, as a PNG; the title has the padding without packing."""
    figure, axes = _new_figure()
    num_sequences = sum(histogram.tolist())
    clipped = np.minimum(np.arange(1.0, len(histogram) + 1), max_seq_length)
    padding = 1 - np.dot(histogram, clipped) / (num_sequences * max_seq_length)
    plot_lengths(axes, histogram)
    axes.axvline(max_seq_length, color="tab:red", linewidth=1, label=f"length {max_seq_length}")
    axes.set(title=f"{num_sequences:,} sequences; {padding:.1%} of the tokens are padding without packing")
    axes.legend(loc="upper right")  # "best" would search all lengths for free space
    _save(figure, path)


def draw_efficiency(rows, path):
    """Draw efficiency by depth as a PNG with a line for each length."""
    figure, axes = _new_figure()
    points = {}
    for row in rows:
        label = f"{row['max_seq_length']} tokens{', cuts text' if row['tokens_cut'] else ''}"
        points.setdefault(label, {})[row["max_sequences_per_pack"]] = row["efficiency"]
    positions = plot_efficiency(axes, points)
    for recommended in (row for row in rows if row["recommended"]):  # one, or none
        x, y = positions[recommended["max_sequences_per_pack"]], 100 * recommended["efficiency"]
        axes.plot(x, y, "o", markersize=14, fillstyle="none", color="black", label="recommended")
    axes.set(title=f"Efficiency by depth, {rows[0]['algorithm']}")
    axes.legend(loc="lower right")
    _save(figure, path)


def plot_lengths(axes, histogram):
    """Plot a histogram, int64 `[L]`."""
    # One outline is drawn: a bar for each of many lengths takes minutes
    axes.stairs(histogram, np.arange(len(histogram) + 1) + 0.5, fill=True, color="tab:blue")
    axes.set(xlabel="tokens in a sequence", ylabel="sequences")
    if histogram.max() > 50 * max(np.median(histogram[histogram > 0]), 1):
        axes.set_yscale("log")  # one bar of truncated sequences would flatten all others


def plot_efficiency(axes, points):
    """Plot lines, label to depth to efficiency in 0..1; returns each depth's position on the x axis."""
    depths = {depth for line in points.values() for depth in line}
    ordered = sorted(depths, key=lambda depth: math.inf if depth == "max" else depth)
    positions = {depth: index for index, depth in enumerate(ordered)}
    for label, line in points.items():
        places = [positions[depth] for depth in line]
        axes.plot(places, [100 * efficiency for efficiency in line.values()], marker="o", label=label)
    axes.set_xticks(range(len(ordered)), [str(depth) for depth in ordered])
    axes.set(xlabel="most sequences in a pack", ylabel="efficiency: tokens that are not padding, %")
    axes.grid(alpha=0.3)
    return positions


def _new_figure():
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.subplots()


def _save(figure, path):
    with write_whole(path) as partial:
        figure.savefig(partial, dpi=100, format="png", metadata={"Software": None})
