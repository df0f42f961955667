"""How a plan loses its last pack too many: a few packs with free tokens are packed anew, exactly.

Rounding leaves free tokens here and there that together are a pack. Which packs would hold their sequences
without is a small integer program, if the packs to choose from are many and fit exactly: those that column
generation has found do not suffice, their own program proves it for most plans. With S = 8, bound 2:

    5 2 | 4 3 | 2     free 1, 1 and 6 tokens, together S     ->     5 3 | 4 2 2

Where the free tokens are spread over too many packs for one program, the plan stays as it is.
"""

import random
from collections import Counter

import highspy
import numpy as np
from highspy import HighsModelStatus as Status

from bert_packed.packing.highs import make_model, solve

MAX_TURNS = 24  # programs; each takes some hundredths of a second, seldom a second
FIRST_SEQUENCES, MOST_SEQUENCES = 32, 128  # packed anew in a turn
FIRST_PACKS, MOST_PACKS = 1500, 3000  # to choose from
MAX_WORK = 100_000  # packs to choose from times lengths, over all turns: seldom over 3 seconds
MAX_NODES = 20
MAX_COPIES = 8  # of equal packs in a turn


def repack(packs, lengths, max_seq_length, depth, bound):
    """Save packs until there are `bound`, or no turn is left. Equal input gives equal output.

    Args:
        packs: List of `(ascending tuple of rows, count)`, the rows of sequences.
        lengths: List of whole numbers by row, ascending.
        max_seq_length: S.
        depth: Most sequences per pack.
        bound: A number of packs that no plan is below.

    Returns:
        List of `(ascending tuple of rows, count)`, the same sequences, in no more packs.
    """
    plan = Counter()
    for pack, count in packs:
        if pack:
            plan[pack] += count
    draw = random.Random(0)
    num_sequences, most_packs, work = FIRST_SEQUENCES, FIRST_PACKS, 0
    for _ in range(MAX_TURNS):
        if plan.total() <= bound:
            break
        chosen, free = _choose(plan, lengths, max_seq_length, depth, num_sequences, draw)
        demand = Counter(row for pack in chosen for row in pack)
        spare = free - max_seq_length  # tokens that may stay free when a pack is saved
        if spare < 0 or demand.total() > MOST_SEQUENCES:
            break
        candidates = list_packs(demand, lengths, max_seq_length, depth, spare, most_packs, draw)
        work += len(candidates) * len(demand)
        if work > MAX_WORK:
            break
        better, is_known = _mix(candidates, demand, len(chosen) - 1)
        if better is not None:
            plan = +(plan - Counter(chosen)) + better
        elif len(candidates) < most_packs // 2 and num_sequences < MOST_SEQUENCES:
            num_sequences = num_sequences * 3 // 2
        elif is_known:
            most_packs = min(2 * most_packs, MOST_PACKS)
    return sorted(plan.items())


def _choose(plan, lengths, max_seq_length, depth, num_sequences, draw):
    """Packs for one turn: those with most free tokens until these are a pack, then others by chance.

    Returns:
        List of packs, and how many tokens are free in them.
    """
    free_tokens = {pack: max_seq_length - sum(lengths[row] for row in pack) for pack in plan}
    chosen, free, placed = [], 0, 0
    for pack in sorted(plan, key=lambda pack: (-free_tokens[pack], pack)):
        for _ in range(min(plan[pack], MAX_COPIES)):
            if free < max_seq_length and free_tokens[pack]:
                chosen.append(pack)
                free += free_tokens[pack]
                placed += len(pack)
    taken = Counter(chosen)
    others = [pack for pack, count in sorted(plan.items()) if count > taken[pack]]
    draw.shuffle(others)
    for pack in others:
        # without the pack to be saved there must be slots for all, and some to spare
        if placed >= num_sequences and placed <= depth * (len(chosen) - 1):
            break
        if placed < num_sequences or len(pack) < depth:
            chosen.append(pack)
            free += free_tokens[pack]
            placed += len(pack)
    return chosen, free


def list_packs(demand, lengths, max_seq_length, depth, spare, most, draw):
    """List packs that leave at most `spare` tokens free: all there are, or about `most` by chance.

    Args:
        demand: Dict from row to number of sequences.
        lengths: By row, ascending.
        max_seq_length: S.
        depth: Most sequences per pack.
        spare: Tokens that may stay free, below S.
        most: How many; each row gets its share, else those of one long sequence would be all.
        draw: `random.Random`.

    Returns:
        Sorted list of ascending tuples of rows, none with more of a row than `demand`.
    """
    rows = sorted(demand, reverse=True)
    sums = [0] * (len(rows) + 1)  # bit t of entry i: rows[i:] can be added up to t tokens
    sums[-1] = 1
    for index in range(len(rows) - 1, -1, -1):
        sums[index] = sums[index + 1]
        for _ in range(min(demand[rows[index]], depth)):
            sums[index] |= sums[index] << lengths[rows[index]]
    found = set()

    def extend(pack, first, room, quota):
        """Add sequences of rows[first:] to a pack; returns what is left of the quota."""
        if room <= spare:
            new = tuple(sorted(pack))
            quota -= new not in found
            found.add(new)
        if len(pack) == depth:
            return quota
        following = []
        least = max(0, room - spare)
        for index in range(first, len(rows)):
            length = lengths[rows[index]]
            if length > room:
                continue
            if length * (depth - len(pack)) < least or not sums[index] >> least & ((2 << room - least) - 1):
                break
            if pack.count(rows[index]) < demand[rows[index]]:
                following.append(index)
        draw.shuffle(following)
        for index in following:
            if quota <= 0:
                break
            row = rows[index]
            quota = extend((*pack, row), index, room - lengths[row], quota)
        return quota

    for row in rows:
        extend((row,), 0, max_seq_length - lengths[row], -(-most // len(rows)))
    return sorted(found)


def _mix(candidates, demand, num_packs):
    """Choose so many of the candidates that they hold exactly the demand.

    Args:
        candidates: List of tuples of rows.
        demand: Counter of rows.
        num_packs: How many to choose.

    Returns:
        Counter of packs, or None; and whether the program was solved, if only to find that there is none.
    """
    rows = sorted(demand)
    place = {row: index for index, row in enumerate(rows)}
    starts, entry_rows, entries = [0], [], []
    for pack in candidates:
        for row, times in Counter(pack).items():
            entry_rows.append(place[row])
            entries.append(times)
        entry_rows.append(len(rows))  # how many packs
        entries.append(1)
        starts.append(len(entries))
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(candidates), len(rows) + 1
    program.col_cost_ = program.col_lower_ = np.zeros(len(candidates))
    most = [min(demand[row] // times for row, times in Counter(pack).items()) for pack in candidates]
    program.col_upper_ = np.array(most, float)
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_ = np.array(starts, np.int32)
    program.a_matrix_.index_ = np.array(entry_rows, np.int32)
    program.a_matrix_.value_ = np.array(entries, float)
    program.integrality_ = [highspy.HighsVarType.kInteger] * len(candidates)
    wanted = np.array([*(demand[row] for row in rows), num_packs], float)
    program.row_lower_ = program.row_upper_ = wanted
    # no limit of time: the plan must not depend on the machine
    model = make_model(
        mip_max_nodes=MAX_NODES,
        presolve="off",  # it takes seconds and finds little to leave out
    )
    model.passModel(program)
    end = solve(model, Status.kOptimal, Status.kInfeasible, Status.kSolutionLimit)
    if model.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, end == Status.kInfeasible
    times = np.rint(model.getSolution().col_value).astype(int).tolist()
    chosen = Counter({pack: count for pack, count in zip(candidates, times, strict=True) if count})
    held = Counter({row: 0 for row in rows})
    for pack, count in chosen.items():
        for row in pack:
            held[row] += count
    return (chosen, True) if held == demand else (None, False)  # else the solver's tolerance
