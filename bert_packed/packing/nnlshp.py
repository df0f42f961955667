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

The solver is the active-set method of Lawson and Hanson, as in `scipy.optimize.nnls`, for matrices that are
nearly empty: gradients are sparse products, and the factor of the columns in use is updated instead of
transforming all columns, which makes it about twenty times as fast for packing matrices.
"""

import numpy as np

from bert_packed.packing.arguments import check_whole
from bert_packed.packing.histogram import check_arguments, check_histogram
from bert_packed.packing.plan import count_strategies, list_strategies, make_plan
from bert_packed.packing.slots import count_slots, fill_slots

# Packing matrices have many columns that are equally good in exact arithmetic, and rounding would choose
# among them. The last is taken: with the choice fixed the result is the same on every machine, and it is the
# one that gives the published number of packs for Wikipedia (the first gives four more).
TIE_TOLERANCE = 1e-8
DEPENDENCE_TOLERANCE = 1e-10


def solve_nnls(matrix, target, max_iterations):
    """Minimise |matrix x - target| over x >= 0, taking in at most `max_iterations` columns.

    Returns x, float64 `[n]`, and False where the iterations ran out: x is then the best so far.
    """
    matrix = matrix.tocsc()
    transposed = matrix.T.tocsr()
    num_columns = matrix.shape[1]
    # scipy.optimize.nnls has the same tolerance
    tolerance = 10 * max(matrix.shape) * np.spacing(1.0) * abs(matrix).sum(axis=0).max()
    x = np.zeros(num_columns)
    used = _UsedColumns(matrix, transposed, transposed @ target)
    residual, best = target, np.inf
    useless = []  # columns that came and went without getting nearer; without this, rounding makes cycles
    for _ in range(max_iterations):
        if not _take_one(used, transposed @ residual, tolerance, useless):
            return x, True
        newest = used.columns[-1]
        solution = used.solve()
        while (solution <= 0).any():
            current = x[used.columns]
            falling = np.flatnonzero(solution <= 0)
            steps = current[falling] / (current[falling] - solution[falling])
            moved = current + steps.min() * (solution - current)
            x[used.columns] = moved
            gone = np.union1d(falling[moved[falling] <= 1e-12 * abs(moved).max()], falling[steps.argmin()])
            x[[used.columns[position] for position in gone]] = 0
            used.drop(gone)
            solution = used.solve()
        x[used.columns] = solution
        residual = target - matrix[:, used.columns] @ solution
        distance = np.linalg.norm(residual)
        useless = [] if distance < best * (1 - 1e-13) else [*useless, newest]
        best = min(best, distance)
    return x, False


def _take_one(used, gradient, tolerance, useless):
    """Take in the column that reduces the distance fastest; False where none does."""
    gradient[used.columns + useless] = -np.inf
    while gradient.size and (steepest := gradient.max()) > tolerance:
        column = int(np.flatnonzero(gradient >= steepest * (1 - TIE_TOLERANCE))[-1])
        if used.take(column):
            return True
        gradient[column] = -np.inf
    return False


class _UsedColumns:
    """The columns in use, with the Cholesky factor of their products and the half-solved right-hand side."""

    def __init__(self, matrix, transposed, products):
        self.columns = []
        self._matrix = matrix
        self._transposed = transposed
        self._products = products  # of every column with the target
        size = min(matrix.shape) + 1
        self._factor = np.zeros((size, size), order="F")
        self._half = np.zeros(size)

    def take(self, column):
        """Append a column; False where it depends on those in use or would enter with a negative share."""
        num = len(self.columns)
        if num + 1 == len(self._half):
            return False
        entries = np.zeros(self._matrix.shape[0])
        inside = slice(self._matrix.indptr[column], self._matrix.indptr[column + 1])
        entries[self._matrix.indices[inside]] = self._matrix.data[inside]
        row = self._triangular(num, self._transposed[self.columns] @ entries) if num else np.zeros(0)
        square = entries @ entries
        pivot = square - row @ row
        if pivot <= DEPENDENCE_TOLERANCE * square:
            return False
        half = (self._products[column] - row @ self._half[:num]) / np.sqrt(pivot)
        if half <= 0:
            return False
        self._factor[num, :num] = row
        self._factor[num, num] = np.sqrt(pivot)
        self._half[num] = half
        self.columns.append(column)
        return True

    def drop(self, positions):
        """Remove columns by position, by rotations that take them out of the factor."""
        # Factorising again what follows would be less code, but BLAS starts threads for it: on a busy
        # machine, waiting for them took 98 % of the time
        for position in sorted(positions.tolist(), reverse=True):
            num = len(self.columns) - 1
            del self.columns[position]
            removed = self._factor[position + 1 : num + 1, position].copy()
            removed_half = self._half[position]
            behind = self._factor[position + 1 : num + 1]
            self._factor[position:num, :position] = behind[:, :position]
            self._factor[position:num, position:num] = behind[:, position + 1 : num + 1]
            self._half[position:num] = self._half[position + 1 : num + 1]
            for row in range(position, num):
                place = row - position
                pivot = self._factor[row, row]
                new_pivot = np.hypot(pivot, removed[place])
                cosine, sine = pivot / new_pivot, removed[place] / new_pivot
                self._factor[row, row] = new_pivot
                below, rest = self._factor[row + 1 : num, row], removed[place + 1 :]
                rotated = cosine * below + sine * rest
                rest *= cosine
                rest -= sine * below
                self._factor[row + 1 : num, row] = rotated
                half = self._half[row]
                self._half[row] = cosine * half + sine * removed_half
                removed_half = cosine * removed_half - sine * half

    def solve(self):
        """The unconstrained mix of the columns in use."""
        return self._triangular(len(self.columns), self._half[: len(self.columns)], transposed=1)

    def _triangular(self, num, right, transposed=0):
        if not num:
            return np.zeros(0)
        from scipy.linalg.blas import dtrsv  # SciPy: as above

        return dtrsv(self._factor[:num, :num], right, lower=1, trans=transposed)


OFFSET, WEIGHT = 8, 0.09  # the published choice, Section F.4.5
COVER_WEIGHT = 3e4
ITERATIONS_PER_STRATEGY = 3
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


def first_mix(histogram, max_seq_length, max_sequences_per_pack, *, offset=OFFSET, weight=WEIGHT):
    """The rounded mix before its repair (Efficient Sequence Packing, Section F.4.4), and notes.

    Lengths up to `offset` weigh `weight`, not 1 (Section F.5).
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
    solution, notes = _solve(matrix, weights * counts, len(strategies))
    return strategies, np.rint(solution), notes


def pack_ennlshp(histogram, max_seq_length, max_sequences_per_pack):
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
        solution, notes = _solve(extended, target, len(strategies))
        packs = round_and_repair(strategies, np.rint(solution[: len(strategies)]), counts)
    return _plan_slots("ennlshp", histogram, max_seq_length, max_sequences_per_pack, packs, notes)


def _solve(matrix, target, num_strategies):
    """The mix, float64 `[columns of matrix]`, and a list with a note where the iterations ran out."""
    limit = ITERATIONS_PER_STRATEGY * num_strategies
    solution, has_converged = solve_nnls(matrix, target, limit)
    note = f"Least squares stopped after {limit} iterations; its best mix so far was repaired."
    return solution, [] if has_converged else [note]


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
    filled = fill_slots(packs, [0, *check_histogram(histogram).tolist()])
    return make_plan(algorithm, max_seq_length, max_sequences_per_pack, filled, notes)
