"""Vectors of texts: texts and rows a second, ratios of neighbors, and vectors that agree."""

import contextlib

import numpy as np
import pytest

from benchmarks import embedding, inference_speed
from benchmarks.inference_speed import speed_rows
from bert_packed.core.settings import InputError


def test_speeds_are_of_texts_and_ratios_of_neighbors():
    seconds = {"packed": [2.0, 1.0, 4.0], "padded": [6.0, 4.0, 8.0]}
    packed, padded = speed_rows(seconds, num_texts=3, factor=2.0)
    columns = "texts/s", "packed is faster by", "of the packing factor"
    assert [packed[name] for name in columns] == [1.5, 1.0, 0.5]
    assert [padded[name] for name in columns] == [0.5, 3.0, 1.5]


def test_steps_of_one_pass_compare_with_one_and_of_two_with_two():
    """Of contrastive training, whose steps are of rows."""
    seconds = {"packed": [2.0, 1.0, 4.0], "packed, micro-batches": [4.0, 4.0, 4.0]}
    seconds |= {"torch, plain loss": [6.0, 4.0, 8.0], "torch, cached loss": [6.0, 4.0, 8.0]}
    rows = embedding.step_rows(seconds, 6, dict.fromkeys(seconds, 1.5))
    assert [row["packed is faster by"] for row in rows] == [1, 1, 3, 1.5]
    assert [row["rows/s"] for row in rows] == [3, 1.5, 1, 1]


@pytest.mark.parametrize(("value", "differs"), [(1.00009, False), (1.001, True), (np.nan, True)])
def test_other_vectors_are_noticed(value, differs):
    same, theirs = np.ones((2, 3)), np.array([[1.0, 1, 1], [1, 1, value]])
    ways = {"packed": lambda: same, "same": lambda: same, "theirs": lambda: theirs}
    noticed = pytest.raises(InputError, match=r"must give our vectors.*theirs")
    with noticed if differs else contextlib.nullcontext():
        inference_speed.check_agreement(ways)
