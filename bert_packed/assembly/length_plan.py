"""How a plan is made for sequences of one length each, and what a manifest says of it."""

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.packing import plan as plans
from bert_packed.packing.algorithms import ALGORITHMS


def plan_lengths(histogram, algorithm, max_seq_length, depth):
    """Run a packing algorithm, and check what it made.

    Args:
        histogram: Int array `[S]`.
        algorithm: Name.
        max_seq_length: S.
        depth: Most sequences per pack, or "max".

    Returns:
        Dict of plain JSON for a manifest: `plan`, `num_sequences`, `num_packs`, `efficiency`,
        `packing_factor`, `depth`, `lower_bound`, `gap` ((packs - lower_bound) / lower_bound).

    Raises:
        InputError: the algorithm does not scale to this length, depth or number of sequences.
    """
    histogram = np.asarray(histogram, np.int64)
    try:
        plan = ALGORITHMS[algorithm](histogram, max_seq_length, depth)
    except ValueError as error:
        raise InputError(f"`algorithm` {algorithm} cannot pack these lengths: {error}") from error
    plans.validate_plan(plan, histogram)
    return {
        "plan": plan.to_json(),
        "num_sequences": plan.num_sequences,
        "num_packs": plan.num_packs,
        "efficiency": plan.efficiency,
        "packing_factor": plan.packing_factor,
        "depth": plan.depth,
        "lower_bound": plan.certificate.lower_bound,
        "gap": plan.certificate.gap,
    }
