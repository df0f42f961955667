"""Non-finite losses, gradients and weights: skipped steps, and the end of a run that has diverged.

A loss can be finite in the very step whose update makes the weights NaN, so sums and saved tensors are both
checked.
"""

import math

import numpy as np

from bert_packed.core.settings import InputError


class NotFiniteError(InputError):
    """A run has diverged: NaN or infinity where a number should be.

    Attributes:
        weights_step: After which step the weights gave such a number; None where it is not known, or where
            they hold one themselves and so are not saved.
    """

    def __init__(self, message, weights_step=None):
        super().__init__(message)
        self.weights_step = weights_step


def check_sums(sums, where):
    """Raise `NotFiniteError` where one of some floats by name is not finite; `where` ends its message."""
    if received := _describe(sums):
        raise NotFiniteError(f"the loss must stay finite. Received: {received} {where}.")


def _describe(sums):
    return ", ".join(f"{name} {value}" for name, value in sums.items() if not math.isfinite(value))


class SkippedSteps:
    """Counts steps that the engine left out because their loss or gradient was not finite.

    Args:
        most: The run ends with that many in a row.
    """

    def __init__(self, most):
        self._most = most
        self._num_in_row = 0

    def note(self, step, sums, is_skipped):
        """The figures of a step that are not finite, as text; "" unless it was left out.

        Args:
            step: Its number, from 1.
            sums: Dict of floats, as the engine returned them.
            is_skipped: Whether the engine left it out.

        Raises:
            NotFiniteError: it is the last of too many in a row.
        """
        self._num_in_row = self._num_in_row + 1 if is_skipped else 0
        if not is_skipped:
            return ""
        received = _describe(sums)
        if self._num_in_row < self._most:
            return received
        where = f"at step {step}"
        if self._num_in_row > 1:
            where += f", as at the {self._num_in_row - 1} before it (`max_skipped_steps`={self._most})"
        # The weights are those that the first of them met
        raise NotFiniteError(
            f"loss and gradient must stay finite. Received: {received} {where}.", step - self._num_in_row
        )


def check_arrays(arrays, where):
    """Check tensors, of weights or of the optimizer.

    Args:
        arrays: Dict of NumPy arrays.
        where: What they are of, for the message.

    Raises:
        NotFiniteError: naming the first that holds a value that is not finite.
    """
    for name, values in arrays.items():
        is_finite = np.isfinite(values)
        if not is_finite.all():
            received = values[~is_finite].ravel()[0]
            raise NotFiniteError(f"every weight must stay finite. Received: {received} in {name} {where}.")
