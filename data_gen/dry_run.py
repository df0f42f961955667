"""Should I pack, how deep, and how long? What every choice would cost, without writing a pack."""

import dataclasses
import itertools
import os
import sys
import time

import numpy as np
from tqdm import tqdm

from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.bounds import lower_bound
from bert_packed.packing.histogram import fold
from bert_packed.packing.plan import PackingPlan
from bert_packed.records.read_lengths import read_histogram
from data_gen.pictures import draw_efficiency, draw_histogram

DEFAULT_FOLDER = "packing_report"
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, "max")
LENGTH_FACTORS = (0.25, 0.5, 1, 2)
# Width of BERT-base: decides when attention, which grows with the square of the length, outweighs the rest
MODEL_WIDTH = 768
# A depth within this share of the best is as good: more slots for sequences cost a little of every step
DEPTH_TOLERANCE = 0.005
# What a choice needs: a hundredth of a percent takes a tenth of the time of a millionth
GAP = 1e-4


@dataclasses.dataclass(frozen=True)
class Choice:
    """One length and depth, tried.

    Attributes:
        plan: `PackingPlan`.
        seconds: Time that the algorithm took, its certificate not counted.
        num_truncated: Sequences that are longer than the plan's length and would be cut.
        num_cut: Tokens that they would lose.
        sum_of_squares: Pairs of tokens of one sequence: the attention that is needed.
    """

    plan: PackingPlan
    seconds: float
    num_truncated: int
    num_cut: int
    sum_of_squares: int

    @property
    def attention_cost(self):
        """Pairs of tokens that attention computes, over those that are of one sequence; 1 is no waste."""
        return self.plan.num_packs * self.plan.max_seq_length**2 / self.sum_of_squares

    @property
    def training_cost(self):
        """Floating-point operations of an epoch through one encoder block of BERT-base, in units of 4 x 768.

        A token costs 24 D^2 in the products with weights and 4 S D in attention: 6 D + S, times 4 D.
        """
        length = self.plan.max_seq_length
        return self.plan.num_packs * length * (6 * MODEL_WIDTH + length)

    def row(self, is_recommended, baseline_cost, most_cut):
        """This choice as a row of the table; without a speed-up where it would be that of less text."""
        certificate = self.plan.certificate
        return {
            "algorithm": self.plan.algorithm,
            "max_sequences_per_pack": self.plan.max_sequences_per_pack,
            "max_seq_length": self.plan.max_seq_length,
            "packs": self.plan.num_packs,
            "lower_bound": certificate.lower_bound,
            "gap": certificate.gap,
            "tight_bound": certificate.tight,
            "efficiency": self.plan.efficiency,
            "packing_factor": self.plan.packing_factor,
            "depth": self.plan.depth,
            "strategies": len(self.plan.strategies),
            "attention_cost": self.attention_cost,
            "speed_up": None if self.num_cut > most_cut else baseline_cost / self.training_cost,
            "truncated": self.num_truncated,
            "tokens_cut": self.num_cut,
            "seconds": self.seconds,
            "recommended": is_recommended,
        }


def report_choices(config):
    """Try what a `PackConfig` with `dry_run` asks for, and draw it.

    What cannot be tried is told in one line on stderr, beside the progress bar.

    Returns:
        Rows of `try_choices`, and the folder with `length_histogram.png` and `efficiency_by_depth.png`.

    Raises:
        InputError: the histogram or the records cannot be used.
    """
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
    """Plan for several lengths and depths.

    Args:
        histogram: int64 `[L]`, of all lengths that occur, also over `max_seq_length`.
        algorithm: Name in `ALGORITHMS`.
        max_seq_length: S; a quarter, half and the double of it are tried as well.
        max_sequences_per_pack: Depth; "max" stands for 1 to 8 and max.

    Returns:
        List of dicts, the rows of the table in ascending length and depth, without those that the algorithm
        cannot do; and a list with a sentence about these, if any, and about text that would be cut.
        `speed_up` compares the floating-point operations of BERT-base, attention included, with unpacked
        data of length S; it is None for a length that cuts more tokens than S does. One row is
        `recommended`: of the lengths that cut no token, the cheapest, at the smallest depth that is within
        0.5 % of its cheapest; none, where each length cuts some. Plans of cghp are within 1e-4 of optimal
        here, and those of a packing run nearer.

    Raises:
        InputError: the algorithm can do none of the depths at S.
    """
    depths = DEPTHS if max_sequences_per_pack == "max" else (max_sequences_per_pack,)
    lengths = sorted({max(3, int(max_seq_length * factor)) for factor in LENGTH_FACTORS})
    choices, failures, best = [], [], {}
    for length, depth in tqdm(
        list(itertools.product(lengths, depths)), desc="dry run", unit=" plans", disable=None
    ):
        try:
            choices.append(_try(histogram, algorithm, length, depth, best.get(length)))
            best[length] = choices[-1].plan
        except ValueError as error:  # an algorithm that does not scale so far
            failures.append((length, depth, error))
    if all(choice.plan.max_seq_length != max_seq_length for choice in choices):
        error = next(error for length, _, error in failures if length == max_seq_length)
        raise InputError(f"`algorithm` {algorithm} cannot pack these lengths: {error}") from error
    # Unpacked, every sequence is a pack of length S
    num_sequences = sum(histogram.tolist())
    baseline = num_sequences * max_seq_length * (6 * MODEL_WIDTH + max_seq_length)
    recommended = _recommend(choices)
    at_asked = next(choice for choice in choices if choice.plan.max_seq_length == max_seq_length)
    rows = [choice.row(choice is recommended, baseline, at_asked.num_cut) for choice in choices]
    notes = _notes(algorithm, failures)
    if at_asked.num_cut:
        notes.append(
            f"max_seq_length={max_seq_length} cuts {at_asked.num_cut:,} tokens of {at_asked.num_truncated:,} "
            f"sequences; the longest has {len(np.trim_zeros(histogram, 'b')):,}"
        )
    return rows, notes


def _notes(algorithm, failures):
    if not failures:
        return []
    depths = {}
    for length, depth, _ in failures:
        depths.setdefault(length, []).append(str(depth))
    left_out = "; ".join(f"length {length} at depth {', '.join(depths[length])}" for length in depths)
    return [f"left out, because {algorithm} cannot do it: {left_out}. First error: {failures[0][2]}"]


def _try(histogram, algorithm, max_seq_length, depth, shallower):
    """Plan for one choice; `shallower` is the plan of the same length and less depth, None for the first."""
    folded = fold(histogram, max_seq_length)
    start = time.perf_counter()
    if algorithm != DEFAULT_ALGORITHM:
        plan = ALGORITHMS[algorithm](folded, max_seq_length, depth)
    elif shallower and shallower.num_packs <= (1 + GAP) * lower_bound(folded, max_seq_length, depth):
        # as good as a plan of this depth needs to be; its dual values prove nothing for more depth
        plan = dataclasses.replace(
            shallower, max_sequences_per_pack=depth, notes=(), dual_values=(), lp_bound=None
        )
    else:
        plan = ALGORITHMS[algorithm](folded, max_seq_length, depth, gap=GAP, integer_programs=False)
    seconds = time.perf_counter() - start
    squares = np.arange(1, max_seq_length + 1, dtype=np.float64) ** 2  # no overflow
    over = histogram[max_seq_length:].tolist()
    num_cut = sum(tokens * count for tokens, count in enumerate(over, start=1))
    return Choice(plan, seconds, sum(over), num_cut, int(np.dot(folded, squares)))


def _recommend(choices):
    """The choice to recommend; None where each of them loses text."""
    allowed = [choice for choice in choices if not choice.num_cut]
    if not allowed:
        return None
    cheapest = min(allowed, key=lambda choice: choice.training_cost)
    same_length = [c for c in allowed if c.plan.max_seq_length == cheapest.plan.max_seq_length]
    good = [c for c in same_length if c.training_cost <= cheapest.training_cost * (1 + DEPTH_TOLERANCE)]
    return good[0]  # depths ascend
