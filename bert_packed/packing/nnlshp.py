"""NNLSHP and its extension: histogram packing by non-negative least squares over full packs.

Efficient Sequence Packing, Sections 3.1 and F.4 (Listing 3 of Packing: Towards 2x NLP BERT Acceleration).
All strategies that fill S exactly are columns; the least-squares mix is rounded; what is not covered gets
another pack; slots without a sequence are padding.

Extended (`pack_ennlshp`; Packing: Towards 2x NLP BERT Acceleration, Section G.1): no length may be packed too
seldom. In NNLSHP a sequence left over costs as much as a slot left empty, while it really costs the rest of a
pack. There a second block of equations with a large weight forces A x - r = b with r >= 0, so that nothing is
left over, and the first block weighs the empty slots of length i by i, their padding:

    minimise |w (A x - b)|^2 + |W (A x - b - r)|^2     over x >= 0, r >= 0,     w_i = i,  W large

Where we differ from print. The listing disagrees with equation (24) in details (its matrix is filled by a
statement without effect); this follows the equation. The text says that a positive residual r_i costs
(512 - r_i) i tokens; it is (512 - i) r_i. W is 3 * 10^4, not 10^6: what it leaves uncovered, 0.01 of a
sequence on Wikipedia, vanishes in rounding, and the products of columns stay within double precision.
"""

import numpy as np

from bert_packed.packing.arguments import check_whole
from bert_packed.packing.histogram import check_arguments, check_histogram
from bert_packed.packing.plan import count_strategies, list_strategies, make_plan
from bert_packed.packing.slots import count_slots, fill_slots

OFFSET, WEIGHT = 8, 0.09  # the published choice, Section F.4.5
COVER_WEIGHT = 3e4
MAX_STRATEGIES = 2_000_000  # about 2.5 GiB; S = 512 has 22,102 at depth 3, some 940,000 at depth 4


def pack_nnlshp(histogram, max_seq_length, max_sequences_per_pack, **settings):
    """Pack by non-negative least squares.

    Packs are those of the published code. Strategies are more here, because two packs of one strategy
    differ where a slot of only one of them stays empty; `mix_nnlshp` counts as the papers do. Where the
    listing leaves an empty slot at its length, the slot takes any shorter sequence or none.

    See `algorithms` for arguments and result, `first_mix` for settings and errors.
    """
    packs, notes = mix_nnlshp(histogram, max_seq_length, max_sequences_per_pack, **settings)
    return _plan_slots("nnlshp", histogram, max_seq_length, max_sequences_per_pack, packs, notes)


def mix_nnlshp(histogram, max_seq_length, max_sequences_per_pack, **settings):
    """The mix of `pack_nnlshp`, without sequences: list of `(ascending tuple of slots, count)`, and notes."""
    strategies, whole_counts, notes = first_mix(histogram, max_seq_length, max_sequences_per_pack, **settings)
    return round_and_repair(strategies, whole_counts, check_histogram(histogram)), notes


def first_mix(
    histogram, max_seq_length, max_sequences_per_pack, *, offset=OFFSET, weight=WEIGHT, max_iterations=None
):
    """The rounded mix before its repair (Efficient Sequence Packing, Section F.4.4).

    Args:
        histogram, max_seq_length, max_sequences_per_pack: As for all `algorithms`.
        offset: Lengths up to this one count less in the distance (Section F.5).
        weight: Their weight, 0 to 1; others weigh 1.
        max_iterations: Of the least squares; default 3 per strategy. When they run out, the best mix so far
            is repaired like any other, and a note says so.

    Returns:
        Strategies as from `list_strategies`, their counts, float64 `[strategies]` of whole numbers, and a
        list of notes. Over two million strategies are a `ValueError`.
    """
    from scipy import sparse  # half a second: not for --help and the other algorithms

    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    check_whole("offset", offset)
    if not 0 <= weight <= 1:
        raise ValueError(f"`weight` must be in 0..1. Received: {weight!r}.")
    if not counts.any():
        return np.zeros((0, depth), np.int32), np.zeros(0), []
    strategies = _list_if_few(max_seq_length, depth)
    weights = np.ones(max_seq_length)
    weights[:offset] = weight
    matrix = sparse.diags_array(weights) @ packing_matrix(strategies, max_seq_length)
    solution, notes = _solve(matrix, weights * counts, len(strategies), max_iterations)
    return strategies, np.rint(solution), notes


def pack_ennlshp(histogram, max_seq_length, max_sequences_per_pack, *, max_iterations=None):
    """Pack by extended non-negative least squares; arguments and result like those of `pack_nnlshp`."""
    from scipy import sparse  # half a second: not for --help and the other algorithms

    counts, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    packs, notes = [], []
    if counts.any():
        strategies = _list_if_few(max_seq_length, depth)
        matrix = packing_matrix(strategies, max_seq_length)
        padding_weights = sparse.diags_array(np.arange(1.0, max_seq_length + 1))
        extended = sparse.block_array(
            [
                [padding_weights @ matrix, None],
                [COVER_WEIGHT * matrix, -COVER_WEIGHT * sparse.eye_array(max_seq_length)],
            ]
        )
        target = np.concatenate([padding_weights @ counts, COVER_WEIGHT * counts])
        solution, notes = _solve(extended, target, len(strategies), max_iterations)
        packs = round_and_repair(strategies, np.rint(solution[: len(strategies)]), counts)
    return _plan_slots("ennlshp", histogram, max_seq_length, max_sequences_per_pack, packs, notes)


def _solve(matrix, target, num_strategies, max_iterations):
    """The mix, float64 `[columns of matrix]`, and a list with a note where the iterations ran out."""
    from bert_packed.packing.least_squares import solve_nnls  # SciPy

    limit = 3 * num_strategies if max_iterations is None else max_iterations
    result = solve_nnls(matrix, target, limit)
    note = f"Least squares stopped after {limit} iterations; its best mix so far was repaired."
    return result.x, [] if result.converged else [note]


def _list_if_few(max_seq_length, depth):
    if count_strategies(max_seq_length, depth, MAX_STRATEGIES) > MAX_STRATEGIES:
        raise ValueError(
            "least squares lists all strategies, which must be at most "
            f"{MAX_STRATEGIES:,}; use cghp for such depths. Received: max_seq_length={max_seq_length}, "
            f"depth={depth}, which have more."
        )
    return list_strategies(max_seq_length, depth)


def packing_matrix(strategies, max_seq_length):
    """Slots by length and strategy (Section F.4.2): sparse float64 `[S, strategies]`."""
    from scipy import sparse  # half a second: not for --help and the other algorithms

    columns, places = np.nonzero(strategies)
    rows = strategies[columns, places] - 1
    shape = max_seq_length, len(strategies)
    return sparse.csc_array((np.ones(len(rows)), (rows, columns)), shape=shape)  # equal entries add up


def round_and_repair(strategies, whole_counts, histogram):
    """Take whole counts of strategies, and give each sequence not covered another pack.

    List of `(ascending tuple of slot sizes, count)`, at least a slot of its length for each sequence.
    """
    max_seq_length, depth = len(histogram), strategies.shape[1]
    packs = {}
    for index in np.flatnonzero(whole_counts):
        packs[tuple(slot for slot in strategies[index].tolist() if slot)] = int(whole_counts[index])
    slots = count_slots(packs.items(), max_seq_length + 1)
    for length, count in enumerate(histogram.tolist(), start=1):
        if slots[length] < count:
            rest = [max_seq_length - length] if length < max_seq_length and depth > 1 else []
            pack = tuple(sorted([length, *rest]))
            packs[pack] = packs.get(pack, 0) + count - slots[length]
    return sorted(packs.items())


def _plan_slots(algorithm, histogram, max_seq_length, max_sequences_per_pack, packs, notes):
    """The plan that puts the sequences of a histogram into packs of slots."""
    filled = fill_slots(packs, [0, *check_histogram(histogram).tolist()])
    return make_plan(algorithm, max_seq_length, max_sequences_per_pack, filled, notes)
