"""Histograms count right, and refuse what is none."""

import json

import numpy as np
import pytest

from bert_packed.packing.histogram import (
    check_limits,
    count_lengths,
    known_histogram_names,
    load_histogram,
    load_known_histogram,
    to_json,
)


def test_lengths_are_counted():
    histogram = count_lengths([3, 1, 3, 4], 5)
    assert histogram.tolist() == [1, 0, 2, 1, 0] and histogram.dtype == np.int64
    assert count_lengths([], 2).tolist() == [0, 0]
    # No pack is deeper than it is long
    assert [check_limits(5, depth) for depth in (1, 4, 5, 9, "max")] == [1, 4, 5, 5, 5]


def test_json_round_trip_and_truncation(tmp_path):
    path = tmp_path / "histogram.json"
    path.write_text(json.dumps(to_json(np.array([1, 0, 2, 1, 7]))))
    assert json.loads(path.read_text()) == {"lengths": [1, 3, 4, 5], "counts": [1, 2, 1, 7]}
    assert load_histogram(path, 5).tolist() == [1, 0, 2, 1, 7]
    assert load_histogram(path, 3).tolist() == [1, 0, 10] and load_histogram(path, 1).tolist() == [11]
    assert load_histogram(path, 7).tolist() == [1, 0, 2, 1, 7, 0, 0]


def test_whole_floats_are_lengths_and_counts(tmp_path):
    path = tmp_path / "histogram.json"
    path.write_text('{"lengths": [3.0, 0, 1], "counts": [2.0, 0, 5]}')
    assert load_histogram(path).tolist() == [5, 0, 2]
    path.write_text('{"lengths": [1048576], "counts": [3]}')
    assert load_histogram(path, 2).tolist() == [0, 3]


@pytest.mark.parametrize(
    "name, max_seq_length, num_sequences, num_tokens",
    [
        ("wikipedia_512", 512, 16_279_552, 4_164_796_173),
        ("squad_1.1_384", 384, 88_641, 15_249_479),
        ("glue_cola", 128, 8_551, 96_859),
        ("articles_2048", 2048, 7_750, None),
    ],
)
def test_known_histograms_have_the_papers_totals(name, max_seq_length, num_sequences, num_tokens):
    histogram = load_known_histogram(name, max_seq_length)
    assert histogram.sum() == num_sequences
    assert num_tokens in (None, histogram @ np.arange(1, max_seq_length + 1))
    assert name in known_histogram_names()
