"""The Gumbel estimate against another formula, against draws, and against what the paper prints of it."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from benchmarks.gumbel import PRINTED_8, Gumbel, expected_least, expected_least_of_values, fit, of_one_device
from bert_packed.core.settings import InputError

ONE = Gumbel(1.94, 0.318)


@pytest.mark.parametrize("num_devices", [1, 2, 5, 10])
def test_the_least_follows_from_the_greatest(num_devices):
    """The greatest of k is Gumbel again, alpha + beta ln k; inclusion and exclusion lead to the least."""
    terms = range(1, num_devices + 1)
    greatest = [Gumbel(ONE.alpha + ONE.beta * math.log(k), ONE.beta).mean for k in terms]
    expected = sum(-((-1) ** k) * math.comb(num_devices, k) * greatest[k - 1] for k in terms)
    assert expected_least(ONE, num_devices) == pytest.approx(expected, abs=1e-9)


def test_one_device_is_what_the_listing_finds():
    """The paper's way: least squares of Equations 19 and 20, by Nelder-Mead from its start."""

    def error(parameters):
        one = stats.gumbel_r(*parameters)
        median = PRINTED_8.alpha - PRINTED_8.beta * math.log(math.log(2))
        return (0.5 - one.sf(median) ** 8) ** 2 + (1 - math.exp(-1) - one.sf(PRINTED_8.alpha) ** 8) ** 2

    found = optimize.minimize(
        error, [1.6038, 0.1288], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-18}
    )
    one = of_one_device(PRINTED_8, 8)
    assert [one.alpha, one.beta] == pytest.approx(found.x, abs=1e-4)
    assert of_one_device(ONE, 1).beta == pytest.approx(ONE.beta)
    assert one.alpha == pytest.approx(1.94, abs=0.005) and one.beta == pytest.approx(0.318, abs=0.0005)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_least_of_values_is_the_mean_over_all_ways_to_draw(num_devices):
    values = [3.0, 1.0, 2.5, 1.0, 7.0]
    draws = [min(drawn) for drawn in itertools.product(values, repeat=num_devices)]
    assert expected_least_of_values(values, num_devices) == pytest.approx(np.mean(draws))


def test_a_fit_finds_what_the_values_are_drawn_from():
    found = fit(np.random.default_rng(1).gumbel(1.3, 0.2, 20_000).tolist())
    assert found.alpha == pytest.approx(1.3, abs=0.01) and found.beta == pytest.approx(0.2, abs=0.01)
    with pytest.raises(InputError, match=r"must give different speed-ups. Received: 2 of all"):
        fit([2.0] * 10)


def test_density_and_quantile_belong_together():
    points = np.linspace(0.5, 8, 200_001)
    upto = np.cumsum(ONE.density(points)) * (points[1] - points[0])
    for share in (0.1, 0.5, 0.9):
        assert points[np.searchsorted(upto, share)] == pytest.approx(ONE.quantile(share), abs=1e-3)
