"""Non-negative least squares for sparse columns: the method of Lawson and Hanson.

The same active-set method as `scipy.optimize.nnls`, for matrices that are nearly empty: gradients are sparse
products, and the factor of the columns in use is updated instead of transforming all columns, which makes
it about twenty times as fast for packing matrices.
"""

import dataclasses

import numpy as np
from scipy.linalg.blas import dtrsv

# Packing matrices have many columns that are equally good in exact arithmetic, and rounding would choose
# among them. The last is taken: with the choice fixed the result is the same on every machine, and it is the
# one that gives the published number of packs for Wikipedia (the first gives four more).
TIE_TOLERANCE = 1e-8
DEPENDENCE_TOLERANCE = 1e-10


@dataclasses.dataclass(frozen=True)
class NnlsResult:
    """The mix, `x`."""

    x: np.ndarray  # float64 [n], not negative
    converged: bool  # False where the iterations ran out; `x` is then the best so far


def solve_nnls(matrix, target, max_iterations):
    """Minimise |matrix x - target| over x >= 0, taking in at most `max_iterations` columns: `NnlsResult`."""
    matrix = matrix.tocsc()
    transposed = matrix.T.tocsr()
    num_columns = matrix.shape[1]
    # as in scipy.optimize.nnls
    tolerance = 10 * max(matrix.shape) * np.spacing(1.0) * abs(matrix).sum(axis=0).max()
    x = np.zeros(num_columns)
    used = _UsedColumns(matrix, transposed, transposed @ target)
    residual, best = target, np.inf
    useless = []  # columns that came and went without getting nearer; without this, rounding makes cycles
    for _ in range(max_iterations):
        if not _take_one(used, transposed @ residual, tolerance, useless):
            return NnlsResult(x, True)
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
    return NnlsResult(x, False)


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
        return dtrsv(self._factor[:num, :num], right, lower=1, trans=transposed)
