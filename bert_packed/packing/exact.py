"""What is the fewest packs where every strategy can be listed: one integer program, for tiny cases.

Rounding a fractional plan misses the optimum by a pack now and then, which matters to nobody with millions
of packs and to somebody with ten.
"""

import highspy
import numpy as np
from highspy import HighsModelStatus as Status

from bert_packed.packing.highs import make_model, solve
from bert_packed.packing.strategies import count_strategies, list_strategies

MAX_STRATEGIES = 2_000
MAX_SEQUENCES = 10**6  # beyond, one pack is below the solver's tolerance
MAX_NODES = 1_000


def fewest_packs(demand, row_of_slot, depth, max_nodes=MAX_NODES):
    """Solve the packing program over all strategies.

    Args:
        demand: Whole numbers from 1 by row.
        row_of_slot: int `[S + 1]`, the row of the longest length that a slot of this size holds, or -1.
        depth: Slots per pack.
        max_nodes: Of branch and bound, after which to give up.

    Returns:
        List of `(ascending tuple of rows, count)` that can hold the demand, or None where the case is too
        large or the nodes ran out; and whether they did not run out.
    """
    max_seq_length = len(row_of_slot) - 1
    num_strategies = count_strategies(max_seq_length, depth, limit=MAX_STRATEGIES)
    if sum(demand) > MAX_SEQUENCES or num_strategies > MAX_STRATEGIES:
        return None, True
    listed = row_of_slot[list_strategies(max_seq_length, depth)].tolist()
    packs = sorted({tuple(sorted(row for row in pack if row >= 0)) for pack in listed} - {()})
    model = make_model(mip_max_nodes=max_nodes, mip_rel_gap=0.0, mip_abs_gap=0.5)
    for _ in packs:
        model.addVar(0.0, highspy.kHighsInf)
    columns = np.arange(len(packs), dtype=np.int32)
    model.changeColsCost(len(packs), columns, np.ones(len(packs)))
    model.changeColsIntegrality(
        len(packs), columns, np.full(len(packs), highspy.HighsVarType.kInteger, dtype=object)
    )
    # Enough slots of at least each length: with nested slots that is the same as an assignment.
    for row in range(len(demand)):
        entries = np.array([sum(slot >= row for slot in pack) for pack in packs], float)
        used = np.flatnonzero(entries).astype(np.int32)
        model.addRow(float(sum(demand[row:])), highspy.kHighsInf, len(used), used, entries[used])
    if solve(model, Status.kOptimal, Status.kSolutionLimit) == Status.kSolutionLimit:
        return None, False
    counts = np.rint(model.getSolution().col_value).astype(int).tolist()
    return [(pack, count) for pack, count in zip(packs, counts, strict=True) if count], True
