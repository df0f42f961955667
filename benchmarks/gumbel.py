"""Speed of the slowest of n devices whose speed-ups are Gumbel distributed.

Section E of "Efficient Sequence Packing without Cross-contamination" (Section F of "Packing: Towards 2x NLP
BERT Acceleration"). s is a speed-up over padding, P_n its distribution on n devices, of which the least
counts:

    1 - P_n(s) = (1 - P_1(s))^n          P_1(s) = exp(-exp(-(s - alpha) / beta))
"""

import dataclasses
import math

import numpy as np
from scipy import integrate, stats

from bert_packed.core.settings import InputError

LEAST_SPREAD = 1e-9  # of speed-ups that have a distribution, of the largest


@dataclasses.dataclass(frozen=True)
class Gumbel:
    """A Gumbel distribution of speed-ups, skewed to the larger ones."""

    alpha: float  # its mode
    beta: float  # its scale

    @property
    def mean(self):
        return self.alpha + np.euler_gamma * self.beta

    def quantile(self, share):
        """The speed-up that a share of draws, 0..1, is below; array or number."""
        return self.alpha - self.beta * np.log(-np.log(share))

    def density(self, values):
        """Probability density at speed-ups, an array."""
        return stats.gumbel_r.pdf(values, self.alpha, self.beta)


PRINTED_8 = Gumbel(1.6038, 0.1288)  # of Listing 2, fitted by the authors to a log of 8 GPUs


def of_one_device(group, num_devices):
    """The distribution of one device, where that of several devices' least is known: `Gumbel`."""
    # The least of n Gumbel values is no Gumbel value itself, so one device is fitted at two points, as in
    # the paper: median and mode of the group. Both are linear in alpha and beta, and are solved for them;
    # the paper's listing minimises the squares of their errors
    points = []  # of the group: speed-up, and the share of groups below it
    for share in (0.5, math.exp(-1)):
        of_one = -math.expm1(math.log1p(-share) / num_devices)  # of single devices below it
        points.append((group.quantile(share), -math.log(-math.log(of_one))))
    (median, at_median), (mode, at_mode) = points
    beta = (median - mode) / (at_median - at_mode)
    return Gumbel(float(mode - beta * at_mode), float(beta))


def expected_least(one, num_devices):
    """The speed-up to expect on n devices, of which the slowest counts: float."""

    def speed_up(share):
        # u = (1 - P_1)^n is uniform on 0..1
        return one.quantile(-math.expm1(math.log(share) / num_devices))

    return integrate.quad(speed_up, 0, 1, limit=200)[0]


def expected_least_of_values(values, num_devices):
    """The mean of the least of n values drawn from a list, with replacement: float."""
    # Of values in ascending order the i-th of N is the least where all n draws are at or above it and not
    # all are above. Nothing is assumed of their distribution, but none is slower than the slowest seen
    upto = (np.arange(len(values), -1, -1) / len(values)) ** num_devices
    return float(np.sort(values) @ -np.diff(upto))


def fit(values):
    """The `Gumbel` under which speed-ups of one device are most likely; `InputError` if all are the same."""
    if np.ptp(values) <= LEAST_SPREAD * max(values):
        raise InputError(f"times of batches must give different speed-ups. Received: {values[0]:g} of all.")
    return Gumbel(*(float(value) for value in stats.gumbel_r.fit(values)))
