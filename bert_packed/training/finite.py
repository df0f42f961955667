"""Whether training still computes with finite numbers: sums of steps and evaluations, tensors to be saved.

A loss can be finite in the very step whose update makes the weights NaN, so that neither check replaces the
other.
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


def check_sums(sums, where, weights_step=None):
    """Check the sums of a step or an evaluation.

    Args:
        sums: Dict of floats.
        where: What they are of, for the message: "at step 7".
        weights_step: After which step the weights were that gave them.

    Raises:
        NotFiniteError: naming those that are not finite.
    """
    bad = {name: value for name, value in sums.items() if not math.isfinite(value)}
    if bad:
        received = ", ".join(f"{name} {value}" for name, value in bad.items())
        raise NotFiniteError(f"the loss must stay finite. Received: {received} {where}.", weights_step)


class SkippedSteps:
    """Counts steps that the engine left out because their loss or gradient was not finite.

    Args:
        most: The run ends with so many in a row.

    Attributes:
        num_in_row: Steps left out since the last that counted.
    """

    def __init__(self, most):
        self._most = most
        self.num_in_row = 0

    def note(self, step, sums, is_skipped):
        """Whether a step was left out, which the step itself decides: its not finite figures as text, or "".

        Args:
            step: Its number, from 1.
            sums: Dict of floats, as the engine returned them.
            is_skipped: What the engine said with them.

        Raises:
            NotFiniteError: it is the last of too many in a row.
        """
        if not is_skipped:
            self.num_in_row = 0
            return ""
        self.num_in_row += 1
        bad = {name: value for name, value in sums.items() if not math.isfinite(value)}
        received = ", ".join(f"{name} {value}" for name, value in bad.items())
        if self.num_in_row < self._most:
            return received
        where = f"at step {step}"
        if self.num_in_row > 1:
            where += f", as at the {self.num_in_row - 1} before it (`max_skipped_steps`={self._most})"
        # The weights are those that the first of them met
        raise NotFiniteError(
            f"loss and gradient must stay finite. Received: {received} {where}.", step - self.num_in_row
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
