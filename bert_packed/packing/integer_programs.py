"""Integer programs of HiGHS that save the last packs: over all strategies if few, else some packs at a time.

Rounding a fractional plan misses the optimum by a pack now and then, which matters to nobody with millions
of packs and to somebody with ten. It leaves free tokens here and there that together are a pack. To hold the
sequences of a few packs in one less is a small program if the packs to choose from are many and fit exactly.
Those that column generation has found do not suffice: their own program proves it for most plans. With S = 8,
bound 2:

    5 2 | 4 3 | 2     free 1, 1 and 6 tokens, together S     ->     5 3 | 4 2 2

Where the free tokens are spread over too many packs for one program, the plan stays as it is. No program has
a limit of time: plans must not depend on the machine.
"""

import contextlib
import os
import random
from collections import Counter

import highspy
import numpy as np
from highspy import HighsModelStatus as Status

from bert_packed.packing.plan import count_strategies, list_strategies

STANDARD_OUTPUT = 1  # the file descriptor: compiled code knows nothing of `sys.stdout`


def make_model(**options):
    """An empty HiGHS model with one thread, a fixed seed, no output, and options by HiGHS's names."""
    with _without_output():
        model = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, "random_seed": 0, **options}.items():
        if model.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise ValueError(f"HiGHS must know its options. Received: {name}={value!r}.")
    return model


def solve(model, *ends):
    """Run a model of `make_model`; returns its `HighsModelStatus`, which is one of `ends`.

    Raises:
        RuntimeError: HiGHS failed, or ended otherwise.
    """
    # A thread's first run fixes its number of HiGHS threads, and HiGHS refuses to run a model with another.
    # One reset protects this run from another program's number, the other protects the other program's runs.
    model.resetGlobalScheduler(True)
    try:
        status = model.run()
    finally:
        model.resetGlobalScheduler(True)
    end = model.getModelStatus()
    if status == highspy.HighsStatus.kError or end not in ends:
        raise RuntimeError(f"HiGHS must solve a packing program. Received: {status}, {end}.")
    return end


@contextlib.contextmanager
def _without_output():
    """Drop what compiled code prints: HiGHS 1.16 greets with two lines before an option could silence it."""
    try:
        standard_output = os.dup(STANDARD_OUTPUT)
    except OSError:  # closed: there is nothing to print to
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), STANDARD_OUTPUT)
        yield
    finally:
        os.dup2(standard_output, STANDARD_OUTPUT)
        os.close(standard_output)


# Limits of `fewest_packs`
MAX_STRATEGIES = 2_000
MAX_SEQUENCES = 10**6  # beyond, one pack is below the solver's tolerance
MAX_NODES = 1_000
# Limits of `repack`
MAX_ROUNDS = 24  # programs; each takes some hundredths of a second, seldom a second
FIRST_SEQUENCES, MOST_SEQUENCES = 32, 128  # repacked in a round
FIRST_PACKS, MOST_PACKS = 1500, 3000  # to choose from
MAX_WORK = 100_000  # packs to choose from times lengths, over all rounds: seldom over 3 seconds
MAX_ROUND_NODES = 20
MAX_COPIES = 8  # of equal packs in a round


def fewest_packs(demand, row_of_slot, depth):
    """Packs `(ascending tuple of rows, count)` by a program over all strategies, and whether nodes sufficed.

    None for packs where the case is too large or the nodes ran out.
    """
    max_seq_length = len(row_of_slot) - 1
    num_strategies = count_strategies(max_seq_length, depth, limit=MAX_STRATEGIES)
    if sum(demand) > MAX_SEQUENCES or num_strategies > MAX_STRATEGIES:
        return None, True
    listed = row_of_slot[list_strategies(max_seq_length, depth)].tolist()
    packs = sorted({tuple(sorted(row for row in pack if row >= 0)) for pack in listed} - {()})
    # Slots are nested, so that enough of them of at least each length are the same as an assignment.
    slots = np.array([[sum(slot >= row for slot in pack) for pack in packs] for row in range(len(demand))])
    needed = np.array([sum(demand[row:]) for row in range(len(demand))], float)
    most, limits = np.full(len(packs), highspy.kHighsInf), (needed, np.full(len(demand), highspy.kHighsInf))
    options = {"mip_max_nodes": MAX_NODES, "mip_rel_gap": 0.0, "mip_abs_gap": 0.5}
    counts, end = _solve(slots, np.ones(len(packs)), most, limits, options)
    if end != Status.kOptimal:
        return None, False
    return [(pack, count) for pack, count in zip(packs, counts, strict=True) if count], True


def repack(packs, lengths, max_seq_length, depth, bound):
    """Save packs, `(ascending tuple of rows, count)`, until there are `bound` or no round is left."""
    plan = Counter()
    for pack, count in packs:
        if pack:
            plan[pack] += count
    draw = random.Random(0)
    num_sequences, most_packs, work = FIRST_SEQUENCES, FIRST_PACKS, 0
    for _ in range(MAX_ROUNDS):
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
    """Packs for one round, those with most free tokens, then others by chance; and their free tokens."""
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
        # the others must have slots for all without the pack to be saved, and some to spare
        if placed >= num_sequences and placed <= depth * (len(chosen) - 1):
            break
        if placed < num_sequences or len(pack) < depth:
            chosen.append(pack)
            free += free_tokens[pack]
            placed += len(pack)
    return chosen, free


def list_packs(demand, lengths, max_seq_length, depth, spare, most, draw):
    """List packs that leave at most `spare` tokens free: all there are, or about `most` by chance."""
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

    for row in rows:  # each row gets its share, or those of one long sequence would be all
        extend((row,), 0, max_seq_length - lengths[row], -(-most // len(rows)))
    return sorted(found)


def _mix(candidates, demand, num_packs):
    """A counter of `num_packs` candidates that hold the demand, or None; and whether that is proven."""
    rows = sorted(demand)
    places = np.array([[pack.count(row) for pack in candidates] for row in rows])
    wanted = np.array([*(demand[row] for row in rows), num_packs], float)
    most = [min(demand[row] // times for row, times in Counter(pack).items()) for pack in candidates]
    options = {"mip_max_nodes": MAX_ROUND_NODES, "presolve": "off"}  # which takes seconds and finds little
    matrix, costs = np.vstack([places, np.ones(len(candidates))]), np.zeros(len(candidates))
    times, end = _solve(matrix, costs, np.array(most, float), (wanted, wanted), options)
    if times is None:
        return None, end == Status.kInfeasible
    chosen = Counter({pack: count for pack, count in zip(candidates, times, strict=True) if count})
    held = Counter(row for pack in chosen.elements() for row in pack)
    return (chosen, True) if held == demand else (None, False)  # else the solver's tolerance


def _solve(matrix, costs, most, limits, options):
    """Whole numbers of least cost within the limits, None without a solution; and the program's status."""
    columns, rows = np.nonzero(matrix.T)
    program = highspy.HighsLp()
    program.num_row_, program.num_col_ = matrix.shape
    program.col_cost_, program.col_lower_, program.col_upper_ = costs, np.zeros(len(costs)), most
    program.row_lower_, program.row_upper_ = limits
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_ = np.searchsorted(columns, np.arange(len(costs) + 1)).astype(np.int32)
    program.a_matrix_.index_ = rows.astype(np.int32)
    program.a_matrix_.value_ = matrix[rows, columns].astype(float)
    program.integrality_ = [highspy.HighsVarType.kInteger] * len(costs)
    model = make_model(**options)
    model.passModel(program)
    end = solve(model, Status.kOptimal, Status.kInfeasible, Status.kSolutionLimit)
    if model.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, end
    return np.rint(model.getSolution().col_value).astype(int).tolist(), end
