"""A mistake in an argument of packing that is not refused, or whose message does not say what it is."""

import math

import numpy as np
import pytest

from bert_packed.packing import nnlshp
from bert_packed.packing.baselines import cost_of_sorted_batching, pack_greedy, pack_local_greedy
from bert_packed.packing.bounds import best_packs, dual_bound
from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.histogram import (
    check_histogram,
    check_limits,
    count_lengths,
    fold,
    load_histogram,
    load_known_histogram,
)
from bert_packed.packing.nnlshp import pack_nnlshp
from bert_packed.packing.online import OnlinePacker
from bert_packed.packing.plan import PackingPlan, from_json, validate_plan

HISTOGRAM = np.array([0, 2, 2, 1, 2, 0, 0, 0])
COUNTS = [1, 2, 3]


def validate(strategies):
    validate_plan(PackingPlan("any", 8, 3, strategies), HISTOGRAM)


def read_plan(strategies):
    return from_json(PackingPlan("any", 8, 3, {}).to_json() | {"strategies": strategies})


def resume(change):
    packer = OnlinePacker(8, 2, buffer_size=4)
    packer.add([3, 4])
    return OnlinePacker.from_state(packer.state() | change)


def add_online(lengths):
    packer = OnlinePacker(8, 2)
    try:
        packer.add(lengths)
    finally:
        assert packer.state()["lengths"] == []  # nothing of it was taken


MISTAKES = [
    (pack_cghp, (COUNTS, 3, 2), {"gap": -0.1}, "`gap` must be at least 0. Received: -0.1"),
    (pack_cghp, (COUNTS, 3, 2), {"gap": math.nan}, "`gap` must be at least 0. Received: nan"),
    (pack_cghp, (COUNTS, 3, 2), {"effort": 0}, "`effort` must be above 0. Received: 0"),
    (pack_nnlshp, (COUNTS, 3, 2), {"offset": -1}, "`offset` must be a whole number from 0. Received: -1"),
    (pack_nnlshp, (COUNTS, 3, 2), {"weight": 1.5}, r"`weight` must be in 0..1. Received: 1.5"),
    (pack_nnlshp, (np.ones(512, int), 512, 8), {}, r"use cghp .*Received: max_seq_length=512, depth=8"),
    (pack_local_greedy, ([1], 1, 1), {"buffer_size": 0}, "`buffer_size` .* number from 1. Received: 0"),
    (pack_greedy, ([2**40, 0], 2, 1), {}, "at most 100,000,000; use an algorithm on the histogram"),
    (cost_of_sorted_batching, ([1], 1, 0), {}, "`batch_size` must be at least 1. Received: 0"),
    *(
        (dual_bound, ([1, 1, 1], 3, 2, values), {}, "`dual_values` must be 3 whole numbers from 0")
        for values in ([1, 2], [1, -1, 2], [1, 1.9, 2], [1, "1", 2], [1, 2**70, 2])
    ),
    (best_packs, (np.array([0, 2**57]), 8), {}, r"must stay below 2\*\*60 in sum"),
    (count_lengths, ([3, 0], 5), {}, "every length must be in 1..max_seq_length=5. Received: 0"),
    (count_lengths, ([3, 6], 5), {}, "every length must be in 1..max_seq_length=5. Received: 6"),
    (count_lengths, ([2**70], 5), {}, r"in 1..max_seq_length=5. Received: 1180591620717411303424"),
    (count_lengths, ([2.7], 5), {}, "every length must be a whole number. Received: 2.7"),
    (count_lengths, ([3, math.nan], 5), {}, "every length must be a whole number. Received: nan"),
    (count_lengths, ([True], 5), {}, "every length must be a whole number. Received: True"),
    (count_lengths, ([[1], [2]], 5), {}, r"`lengths` must have one dimension. Received: \[\[1\], \[2\]\]"),
    (count_lengths, ([[1], 2], 5), {}, "`lengths` must have one dimension"),
    (check_histogram, ([7, 2**53 + 1, 3],), {}, "of a length. Received: 9007199254740993 of length 2"),
    (fold, (np.full(2050, 2**53), 2), {}, r"more than 2\*\*53 sequences of a length. Received: 184557"),
    *(
        (check_limits, (length, 1), {}, rf"number from 1 to 1,048,576. Received: {length}\.")
        for length in (0, 2**20 + 1, 2**63, 1.0, True)
    ),
    (check_limits, (3, True), {}, "`max_sequences_per_pack` must be a whole number of at least 1"),
    (load_known_histogram, ("c4", 512), {}, r"one of articles_2048, .*wikipedia_512. Received: 'c4'"),
    (validate, ({(3, 5): 2, (2, 2): 1},), {}, "length 4 placed -1 times too often"),
    (validate, ({(3, 5): 2, (2, 2, 4): 2},), {}, r"length 2 placed \+2 times too often"),
    (validate, ({(4, 5): 1},), {}, r"at most 8 tokens. Received: \(4, 5\)"),
    (validate, ({(1, 1, 1, 1): 1},), {}, r"at most 3 sequences. Received: \(1, 1, 1, 1\)"),
    *(
        (validate, ({(3, 5): count},), {}, rf"count from 1. Received: \(3, 5\): {count}")
        for count in (0, 1.5, True)
    ),
    # An index of -1 or less is that of a long length, and a fraction would be cut off
    *(
        (validate, ({strategy: 1},), {}, rf"in 1..max_seq_length=8. Received: {wrong} in ")
        for strategy, wrong in (((0,), 0), ((-1,), -1), ((4, -3, 3), -3), ((2.5, 5), 2.5))
    ),
    (read_plan, ([[[5, 3], 1]],), {}, r"lengths of a strategy must ascend. Received: \(5, 3\)"),
    (read_plan, ([[[3, 5], 1], [[3, 5], 1]],), {}, r"each strategy once. Received twice: \(3, 5\)"),
    (resume, ({"lengths": [3, 9]},), {}, "every length must be in 1..max_seq_length=8. Received: 9"),
    (resume, ({"lengths": [3, 2.5]},), {}, "every length must be a whole number. Received: 2.5"),
    (resume, ({"numbers": [0]},), {}, "as many `numbers` as `lengths`, below buffer_size=4. Received: 1, 2"),
    (resume, ({"lengths": [1] * 4, "numbers": [*range(4)]},), {}, "below buffer_size=4. Received: 4, 4"),
    (resume, ({"numbers": [1, 1]},), {}, r"ascend from 0 and be below num_arrived. .* numbers=\[1, 1\]"),
    (resume, ({"numbers": [-1, 1]},), {}, r"ascend from 0 .* numbers=\[-1, 1\]"),
    (resume, ({"numbers": [0, 1.5]},), {}, "must be whole, ascend"),
    (resume, ({"num_arrived": 1},), {}, "below num_arrived. Received: num_arrived=1"),
    (add_online, ([3, 9],), {}, "every length must be in 1..max_seq_length=8. Received: 9"),
    (add_online, ([3, 2.7],), {}, "every length must be a whole number. Received: 2.7"),
    (OnlinePacker, (8.0, 2), {}, "`max_seq_length` must be .* from 1 to 1,048,576. Received: 8.0"),
    (OnlinePacker, (8, 2), {"buffer_size": 4.5}, "`buffer_size` .* whole number from 1. Received: 4.5"),
    (OnlinePacker, (8, 2), {"buffer_size": 9, "max_age": 8}, "`max_age` .* buffer_size=9. Received: 8"),
    (OnlinePacker, (8, 2), {"max_age": math.nan}, "at least buffer_size=10000. Received: nan"),
    (OnlinePacker, (8, 2), {"policy": "worst"}, "one of best_fit, first_fit. Received: 'worst'"),
    (OnlinePacker, (8, 2), {"leaving_share": 0}, "`leaving_share` must be over 0 and at most 1. Received: 0"),
]


@pytest.mark.parametrize(("function", "arguments", "settings", "message"), MISTAKES)
def test_a_wrong_argument_is_named(function, arguments, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        function(*arguments, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "must be JSON with `lengths` and `counts`"),
        ('{"lengths": [1]}', "must be JSON with `lengths` and `counts`"),
        ("no json", "must be JSON with `lengths` and `counts`"),
        ('{"lengths": [1, 2], "counts": [1]}', "must be equally long. Received: 2, 1"),
        ('{"lengths": 5, "counts": 3}', "`lengths` must be a list of numbers. Received: 5"),
        ('{"lengths": [1], "counts": null}', "`counts` must be a list of numbers. Received: None"),
        ('{"lengths": [1, 2], "counts": [[1], 2]}', "`histogram` must have one dimension"),
        ('{"lengths": [1], "counts": [1' + "0" * 5000 + "]}", "must be JSON with `lengths` and `counts`"),
        ('{"lengths": [0], "counts": [1]}', "whole number from 1 to 1,048,576. Received: 0"),
        ('{"lengths": [true], "counts": [2]}', "whole number from 1 to 1,048,576. Received: True"),
        ('{"lengths": ["3"], "counts": [2]}', "whole number from 1 to 1,048,576. Received: '3'"),
        ('{"lengths": [99999999999999], "counts": [2]}', "from 1 to 1,048,576. Received: 99999999999999"),
        ('{"lengths": [1, 1], "counts": [9007199254740992, 1]}', r"more than 2\*\*53 sequences of a length"),
        ('{"lengths": [1], "counts": [0.5]}', "must hold whole numbers. Received: 0.5"),
        ('{"lengths": [1], "counts": [-3]}', "must not be negative"),
    ],
)
def test_a_file_that_is_no_histogram_is_named(tmp_path, text, message):
    path = tmp_path / "histogram.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_histogram(path, 4)
    assert str(error.value).startswith(f"{path}: ")


def test_limits_are_inclusive(monkeypatch):
    assert check_histogram([2**53])[0] == 2**53 and check_limits(2**20, "max") == 2**20
    monkeypatch.setattr(nnlshp, "MAX_STRATEGIES", 4)
    assert pack_nnlshp(np.array([2, 3, 0, 3, 2, 0]), 6, 2).num_packs > 0
    monkeypatch.setattr(nnlshp, "MAX_STRATEGIES", 3)
    with pytest.raises(ValueError, match="which must be at most 3; use cghp"):
        pack_nnlshp(np.array([2, 3, 0, 3, 2, 0]), 6, 2)
