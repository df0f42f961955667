"""Metrics of GLUE by hand, where each of them has another value."""

import numpy as np
import pytest

from bert_packed.evaluation import glue_metrics

# class 1: two found, three invented, one missed; class 0: four right
PREDICTED = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])
TRUE = np.array([1, 1, 0, 0, 0, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 6 / 10),
        ("f1", 2 * 2 / (2 * 2 + 3 + 1)),
        ("matthews", (2 * 4 - 3 * 1) / np.sqrt(5 * 3 * 7 * 5)),
    ],
)
def test_classes(name, value):
    assert glue_metrics.METRICS[name](PREDICTED, TRUE) == pytest.approx(value)


def test_numbers():
    """One outlier: the ranks know nothing of its size. Equal values share a rank."""
    predicted, true = np.array([1.0, 2.0, 3.0, 10.0]), np.array([1.0, 3.0, 2.0, 4.0])
    # deviations -3 -2 -1 6 and -1.5 .5 -.5 1.5
    assert glue_metrics.METRICS["pearson"](predicted, true) == pytest.approx(13 / np.sqrt(50 * 5))
    assert glue_metrics.METRICS["spearman"](predicted, true) == pytest.approx(1 - 6 * 2 / (4 * 15))
    # ranks 1.5 1.5 3 against 1 2 3
    tied = glue_metrics.METRICS["spearman"](np.array([5, 5, 7]), np.array([1, 2, 3]))
    assert tied == pytest.approx(1.5 / np.sqrt(1.5 * 2))
    assert glue_metrics.METRICS["pearson"](np.ones(4), true) == 0.0


def test_nothing_found_and_nothing_to_find():
    assert glue_metrics.METRICS["f1"](np.zeros(4, int), np.zeros(4, int)) == 0.0


def test_numbers_far_from_zero():
    values = np.array([1.0, 2.0, 4.0])
    assert glue_metrics.METRICS["pearson"](values + 1e8, values) == pytest.approx(1)
    assert glue_metrics.METRICS["pearson"](values, values + 1e8) == pytest.approx(1)
