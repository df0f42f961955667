"""Histograms count right, and refuse what is none."""

import json

import numpy as np
import pytest

from bert_packed.packing.histogram import (
    check_histogram,
    check_limits,
    count_lengths,
    fold,
    known_histogram_names,
    load_histogram,
    load_known_histogram,
    to_json,
)


def test_lengths_are_counted():
    histogram = count_lengths([3, 1, 3, 4], 5)
    assert histogram.tolist() == [1, 0, 2, 1, 0]
    assert histogram.dtype == np.int64
    assert count_lengths([], 2).tolist() == [0, 0]
    for wrong in (0, 6):
        with pytest.raises(
            ValueError, match=f"every length must be in 1..max_seq_length=5. Received: {wrong}"
        ):
            count_lengths([3, wrong], 5)


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([2.7], r"every length must be a whole number\. Received: 2.7"),
        ([3, float("nan")], r"every length must be a whole number\. Received: nan"),
        ([True], r"every length must be a whole number\. Received: True"),
        ([2**70], r"every length must be in 1..max_seq_length=5\. Received: 1180591620717411303424"),
        ([[1], [2]], r"`lengths` must have one dimension\. Received: \[\[1\], \[2\]\]"),
        ([[1], 2], r"`lengths` must have one dimension"),
    ],
)
def test_what_is_no_length_is_named(lengths, message):
    with pytest.raises(ValueError, match=message):
        count_lengths(lengths, 5)


def test_json_round_trip_and_truncation(tmp_path):
    path = tmp_path / "histogram.json"
    path.write_text(json.dumps(to_json(np.array([1, 0, 2, 1, 7]))))
    assert json.loads(path.read_text()) == {"lengths": [1, 3, 4, 5], "counts": [1, 2, 1, 7]}
    assert load_histogram(path, 5).tolist() == [1, 0, 2, 1, 7]
    assert load_histogram(path, 3).tolist() == [1, 0, 10]
    assert load_histogram(path, 7).tolist() == [1, 0, 2, 1, 7, 0, 0]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "must be JSON with `lengths` and `counts`"),
        ('{"lengths": [1]}', "must be JSON with `lengths` and `counts`"),
        ("no json", "must be JSON with `lengths` and `counts`"),
        ('{"lengths": [1, 2], "counts": [1]}', r"must be equally long\. Received: 2, 1"),
        ('{"lengths": 5, "counts": 3}', r"`lengths` must be a list of numbers\. Received: 5"),
        ('{"lengths": [1], "counts": null}', r"`counts` must be a list of numbers\. Received: None"),
        ('{"lengths": [1, 2], "counts": [[1], 2]}', "`histogram` must have one dimension"),
        ('{"lengths": [1], "counts": [1' + "0" * 5000 + "]}", "must be JSON with `lengths` and `counts`"),
        ('{"lengths": [0], "counts": [1]}', r"whole number from 1 to 1,048,576\. Received: 0"),
        ('{"lengths": [1.5], "counts": [1]}', r"whole number from 1 to 1,048,576\. Received: 1.5"),
        ('{"lengths": [true], "counts": [2]}', r"whole number from 1 to 1,048,576\. Received: True"),
        ('{"lengths": ["3"], "counts": [2]}', r"whole number from 1 to 1,048,576\. Received: '3'"),
        ('{"lengths": [[3]], "counts": [2]}', r"whole number from 1 to 1,048,576\. Received: \[3\]"),
        ('{"lengths": [99999999999999], "counts": [2]}', r"from 1 to 1,048,576\. Received: 99999999999999"),
        ('{"lengths": [1, 1], "counts": [9007199254740992, 1]}', r"more than 2\*\*53 sequences of a length"),
        ('{"lengths": [1], "counts": [0.5]}', r"must hold whole numbers\. Received: 0.5"),
        ('{"lengths": [1], "counts": [-3]}', "must not be negative"),
    ],
)
def test_a_file_that_is_no_histogram_is_named(tmp_path, text, message):
    path = tmp_path / "histogram.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_histogram(path, 4)
    assert str(error.value).startswith(f"{path}: ")


def test_whole_floats_are_lengths_and_counts(tmp_path):
    path = tmp_path / "histogram.json"
    path.write_text('{"lengths": [3.0, 0, 1], "counts": [2.0, 0, 5]}')
    assert load_histogram(path).tolist() == [5, 0, 2]
    path.write_text('{"lengths": [1048576], "counts": [3]}')
    assert load_histogram(path, 2).tolist() == [0, 3]


def test_folding_adds_up_without_overflow():
    assert fold(np.array([1, 2, 3, 4]), 3).tolist() == [1, 2, 7]
    assert fold(np.array([1, 2]), 4).tolist() == [1, 2, 0, 0]
    assert fold(np.array([1, 2, 3]), 1).tolist() == [6]
    with pytest.raises(ValueError, match=r"more than 2\*\*53 sequences of a length\. Received: 184557"):
        fold(np.full(2050, 2**53), 2)


def test_counts_too_large_for_floats_are_refused():
    assert check_histogram([2**53])[0] == 2**53
    with pytest.raises(
        ValueError, match=r"2\*\*53 sequences of a length\. Received: 9007199254740993 of length 2"
    ):
        check_histogram([7, 2**53 + 1, 3])


@pytest.mark.parametrize("length", [0, 2**20 + 1, 2**63, 1.0, True])
def test_a_length_that_would_ask_for_all_memory_is_refused(length):
    with pytest.raises(ValueError, match=rf"number from 1 to 1,048,576\. Received: {length}\."):
        check_limits(length, 1)
    assert check_limits(2**20, "max") == 2**20


def test_no_pack_is_deeper_than_it_is_long():
    assert [check_limits(5, depth) for depth in (1, 4, 5, 9, "max")] == [1, 4, 5, 5, 5]


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


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"must be one of articles_2048, .*wikipedia_512\. Received: 'c4'"):
        load_known_histogram("c4", 512)
