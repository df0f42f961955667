"""Metrics of GLUE by hand, where each of them has another value."""

import numpy as np
import pytest

from bert_packed.tasks.glue import scores as glue_metrics

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
    for metric in glue_metrics.METRICS.values():
        assert metric(np.zeros(0, int), np.zeros(0, int)) == 0.0


def test_numbers_far_from_zero():
    values = np.array([1.0, 2.0, 4.0])
    assert glue_metrics.METRICS["pearson"](values + 1e8, values) == pytest.approx(1)
    assert glue_metrics.METRICS["pearson"](values, values + 1e8) == pytest.approx(1)


def test_the_average_is_as_the_leaderboard_counts_it():
    """BERT-large's line of gluebenchmark.com, whose score is the 80.5 of the paper's abstract."""
    line = {
        "CoLA": {"matthews": 60.5},
        "SST-2": {"accuracy": 94.9},
        "MRPC": {"accuracy": 85.4, "f1": 89.3},
        "STS-B": {"pearson": 87.6, "spearman": 86.5},
        "QQP": {"accuracy": 89.3, "f1": 72.1},
        "MNLI": {"accuracy_matched": 86.7, "accuracy_mismatched": 85.9},
        "QNLI": {"accuracy": 92.7},
        "RTE": {"accuracy": 70.1},
        "WNLI": {"accuracy": 65.1},
    }
    rows, average = glue_metrics.table_of_tasks(line, 9)
    assert round(average, 1) == 80.5
    assert [row["task"] for row in rows] == [*line, "average"]
    assert rows[5]["mean"] == pytest.approx(86.3) and rows[-1]["scores"] == "9 of 9 tasks"
    assert glue_metrics.table_of_tasks({"CoLA": line["CoLA"]}, 9)[1] == 60.5
