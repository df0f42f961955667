"""Padding rates of PackMamba's four ways, by plain loops; lengths like the paper's."""

import pytest

from benchmarks.padding_rates import draw_lengths, padding_rates
from bert_packed.packing.baselines import shuffled_lengths
from bert_packed.packing.histogram import count_lengths


def test_lengths_are_like_the_papers():
    lengths = draw_lengths(20_000, seed=0)
    assert lengths.min() == 57 and lengths.max() == 2048
    assert lengths.mean() == pytest.approx(646, rel=0.01)
    assert (lengths == draw_lengths(20_000, seed=0)).all()
    assert (lengths != draw_lengths(20_000, seed=1)).any()
    others = draw_lengths(20_000, seed=0, shortest=10, longest=100, mean=40)
    assert others.min() == 10 and others.max() == 100 and others.mean() == pytest.approx(40, rel=0.02)


def rates_by_loops(arrivals, row_length, pack_length, window):
    """Percent of padding: padded, in order, sorted in a window."""
    in_order, space = 0, 0
    for length in arrivals:
        if length > space:
            in_order, space = in_order + 1, pack_length
        space -= length
    in_window, space, waiting, left = 0, 0, [], list(arrivals)
    while waiting or left:
        while left and len(waiting) < window:
            waiting.append(left.pop(0))
        fitting = [length for length in waiting if length <= space]
        if fitting:
            waiting.remove(max(fitting))
            space -= max(fitting)
        else:
            in_window, space = in_window + 1, pack_length
    tokens = len(arrivals) * row_length, in_order * pack_length, in_window * pack_length
    return [100 * (1 - sum(arrivals) / size) for size in tokens]


def test_padding_rates_are_those_of_plain_loops():
    lengths = draw_lengths(300, seed=3)
    arrivals = shuffled_lengths(count_lengths(lengths, 4096), 5).tolist()
    *rates, ours = padding_rates(lengths, 2048, 4096, window=16, seed=5)
    assert [row["padding, %"] for row in rates] == pytest.approx(rates_by_loops(arrivals, 2048, 4096, 16))
    assert [row["PackMamba, %"] for row in rates] == [66.3, 19.1, 0.41] and ours["PackMamba, %"] is None
    assert -(-lengths.sum() // 4096) <= ours["at least"] <= ours["rows"] <= rates[2]["rows"]
    assert ours["padding, %"] == pytest.approx(100 - 100 * lengths.sum() / (4096 * ours["rows"]))


def test_padding_rates_of_many_lengths():
    rates = [row["padding, %"] for row in padding_rates(draw_lengths(2000, seed=0), 2048, 4096, window=64)]
    assert rates[:3] == pytest.approx([68.352, 16.497, 0.479], abs=0.001)
    assert rates[3] < 0.3
