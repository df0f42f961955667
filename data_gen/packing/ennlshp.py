"""Extended non-negative least squares histogram-packing: as NNLSHP, but no length may be packed too seldom.

Packing: Towards 2x NLP BERT Acceleration, Section G.1. In NNLSHP a sequence left over costs as much as a
slot left empty, while it really costs the rest of a pack. Here a second block of equations with a large
weight forces A x - r = b with r >= 0, so that nothing is left over, and the first block weighs the empty
slots of length i by i, their padding:

    minimise |w (A x - b)|^2 + |W (A x - b - r)|^2     over x >= 0, r >= 0,     w_i = i,  W large

Where we differ from print. The listing disagrees with equation (24) in details (its matrix is filled by a
statement without effect); this follows the equation. The text says that a positive residual r_i costs
(512 - r_i) i tokens; it is (512 - i) r_i. W is 3 * 10^4, not 10^6: what it leaves uncovered, 0.01 of a
sequence on Wikipedia, vanishes in rounding, and the products of columns stay within double precision.
"""

import numpy as np
from scipy import sparse

from data_gen.packing.histogram import check_arguments
from data_gen.packing.nnlshp import (
    checked_strategies,
    least_squares_mix,
    packing_matrix,
    plan_slots,
    round_and_repair,
)

COVER_WEIGHT = 3e4


def pack_ennlshp(histogram, max_seq_length, max_sequences_per_pack, *, max_iterations=None):
    """Pack by extended non-negative least squares.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        max_sequences_per_pack: Depth, a whole number from 1, or "max". The strategies grow fast with it.
        max_iterations: Of the least squares; default 3 per strategy. When they run out, the best mix so far
            is repaired like any other, and a note says so.

    Returns:
        A `PackingPlan`.

    Raises:
        ValueError: an argument breaks its rule, or there are over two million strategies.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    if not histogram.any():
        return plan_slots("ennlshp", histogram, max_seq_length, max_sequences_per_pack, [], [])
    strategies = checked_strategies(max_seq_length, depth)
    matrix = packing_matrix(strategies, max_seq_length)
    padding_weights = sparse.diags_array(np.arange(1.0, max_seq_length + 1))
    extended = sparse.block_array(
        [
            [padding_weights @ matrix, None],
            [COVER_WEIGHT * matrix, -COVER_WEIGHT * sparse.eye_array(max_seq_length)],
        ]
    )
    target = np.concatenate([padding_weights @ histogram, COVER_WEIGHT * histogram])
    solution, notes = least_squares_mix(extended, target, len(strategies), max_iterations)
    packs = round_and_repair(strategies, np.rint(solution[: len(strategies)]), histogram)
    return plan_slots("ennlshp", histogram, max_seq_length, max_sequences_per_pack, packs, notes)
