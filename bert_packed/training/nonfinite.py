"""Non-finite losses, gradients and weights: skipped steps, and the end of a run that has diverged.

Sums and saved tensors are both checked, since a step with a finite loss may make the weights NaN.
"""

import math

import numpy as np

from bert_packed.core.settings import InputError


class NotFiniteError(InputError):
    """A run has diverged: a loss, gradient or weight is NaN or infinite.

    Attributes:
        weights_step: The step after which the weights gave such a number; None where it is not known, or
            where they hold one themselves and so are not saved.
    """

    def __init__(self, message, weights_step=None):
        super().__init__(message)
        self.weights_step = weights_step


def check_sums(sums, where):
    """Raise `NotFiniteError` if one of a dict of floats is not finite; `where` ends the message."""
    if received := _describe(sums):
        raise NotFiniteError(f"the loss must stay finite. Received: {received} {where}.")


def _describe(sums):
    return ", ".join(f"{name} {value}" for name, value in sums.items() if not math.isfinite(value))


class SkippedSteps:
    """Counts skipped steps, whose loss or gradient was not finite; `most` in a row end the run."""

    def __init__(self, most):
        self._most = most
        self._num_in_row = 0

    def note(self, sums, is_skipped):
        """The figures of a skipped step that are not finite, as text; "" if it was not skipped."""
        self._num_in_row = self._num_in_row + 1 if is_skipped else 0
        return _describe(sums) if is_skipped else ""

    def check(self, step, received):
        """Raise `NotFiniteError` after the last of `most` skipped steps in a row.

        `step` is numbered from 1, `received` is what `note` returned of it.
        """
        if self._num_in_row < self._most:
            return
        where = f"at step {step}"
        if self._num_in_row > 1:
            where += f", as at the {self._num_in_row - 1} before it (`max_skipped_steps`={self._most})"
        # No skipped step has changed the weights: they are those from before the first
        raise NotFiniteError(
            f"loss and gradient must stay finite. Received: {received} {where}.", step - self._num_in_row
        )


def check_arrays(arrays, where):
    """Raise `NotFiniteError`, naming the first array with a non-finite value; `where` ends the message."""
    for name, values in arrays.items():
        is_finite = np.isfinite(values)
        if not is_finite.all():
            received = values[~is_finite].ravel()[0]
            raise NotFiniteError(f"every weight must stay finite. Received: {received} in {name} {where}.")
