"""PackMamba: padding by plain loops, the same sequences in each way, ratios by token."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from benchmark_command import tables_of
from next_tokens import CONFIG, MAMBA2

from benchmarks import packmamba
from benchmarks.packmamba import (
    PACKED,
    PADDED,
    SINGLE,
    PackMambaConfig,
    choose_packs,
    make_batches,
    packmamba_lengths,
    padding_rows,
)
from bert_packed.architectures.registry import config_json
from bert_packed.core.storage import write_json
from bert_packed.packing.baselines import shuffled_lengths
from bert_packed.packing.histogram import count_lengths

TOY = {"max_seq_length": 64, "pack_length": 64, "shrink": 1, "batch_size": 2, "repeats": 1}


def test_lengths_are_like_the_papers():
    lengths = packmamba_lengths(20_000, seed=0)
    assert lengths.min() == 57 and lengths.max() == 2048
    assert lengths.mean() == pytest.approx(646, rel=0.01)
    others = packmamba_lengths(20_000, seed=0, shortest=10, longest=100, mean=40)
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


def test_padding_is_that_of_plain_loops():
    lengths = packmamba_lengths(300, seed=3)
    arrivals = shuffled_lengths(count_lengths(lengths, 4096), 5).tolist()
    *rates, ours = padding_rows(lengths, 2048, 4096, window=16, seed=5)
    assert [row["padding, %"] for row in rates] == pytest.approx(rates_by_loops(arrivals, 2048, 4096, 16))
    assert [row["PackMamba, %"] for row in rates] == [66.3, 19.1, 0.41] and ours["PackMamba, %"] is None
    assert -(-lengths.sum() // 4096) <= ours["at least"] <= ours["rows"] <= rates[2]["rows"]
    assert ours["padding, %"] == pytest.approx(100 - 100 * lengths.sum() / (4096 * ours["rows"]))
    rates = [row["padding, %"] for row in padding_rows(packmamba_lengths(2000, seed=0), 2048, 4096)]
    assert rates[:3] == pytest.approx([68.352, 16.497, 0.479], abs=0.001) and rates[3] < 0.3


def test_chosen_sequences_fill_packs_with_the_spread_of_all():
    assert choose_packs([1, 1, 2, 2, 2, 2, 3, 5], 5, 2) == [(1, 2, 2), (5,)]
    lengths = packmamba_lengths(5000, seed=0)
    packs = choose_packs(lengths, 4096, 4)
    chosen = [length for pack in packs for length in pack]
    assert len(packs) == 4 and all(sum(pack) <= 4096 for pack in packs) and sum(chosen) > 0.95 * 4 * 4096
    assert np.mean(chosen) == pytest.approx(np.mean(lengths), rel=0.03)
    assert np.std(chosen) == pytest.approx(np.std(lengths), rel=0.1)


def test_every_sequence_is_once_in_each_way():
    lengths = packmamba_lengths(400, seed=0, shortest=4, longest=64, mean=20)
    batches = make_batches(PackMambaConfig(**TOY), lengths, CONFIG.vocab_size)

    def lengths_in(some):
        return Counter(
            int((ids == slot).sum())
            for batch in some
            for ids in batch["sequence_ids"]
            for slot in range(1, ids.max() + 1)
        )

    assert lengths_in(batches[SINGLE]) == lengths_in(batches[PADDED]) == lengths_in(batches[PACKED])
    assert batches[PACKED][0]["token_ids"].shape == (2, 64)
    assert {batch["token_ids"].shape[1] for batch in batches[PADDED]} == {64}
    shapes = {batch["token_ids"].shape for batch in batches[SINGLE]}
    assert len(shapes) == 3 and {rows for rows, _ in shapes} == {1}
    counts = {way: packmamba.count_tokens(some) for way, some in batches.items()}
    assert len({num_tokens for num_tokens, _ in counts.values()}) == 1
    assert counts[PACKED][1] < counts[SINGLE][1] < counts[PADDED][1]


def test_gains_are_by_token_and_over_the_other_way():
    batch = {"sequence_ids": np.ones((1, 10))}
    batches = {SINGLE: [batch], PADDED: [batch], PACKED: [batch, batch]}
    by_token = packmamba.seconds_a_token(
        {SINGLE: [3.0, 4.0], PADDED: [2.0, 2.0], PACKED: [2.0, 2.0]}, batches
    )
    assert by_token[PACKED] == [0.1, 0.1] and by_token[SINGLE] == [0.3, 0.4]
    single, padded, packed = packmamba.speed_rows(by_token)
    assert [row["times the first"] for row in (single, padded, packed)] == pytest.approx([1, 1.75, 3.5])
    assert packed["real tokens/s"] == pytest.approx(10)
    row = packmamba.comparison(by_token, PADDED)
    assert row["times the tokens/s"] == pytest.approx(2.0) and row["PackMamba"] is None


@pytest.mark.slow
def test_a_mamba2_is_measured_on_packs_too(tmp_path):
    """Nothing is replaced: engines, programs and clock are real."""
    paths = {"bert_config_file": tmp_path / "mamba.json", "against": tmp_path / "mamba2.json"}
    for path, config in zip(paths.values(), (CONFIG, MAMBA2), strict=True):
        write_json(path, config_json(dataclasses.replace(config, num_hidden_layers=1)))
    tables = tables_of("packmamba", tmp_path, parts="training", **paths, **TOY)
    assert [row["way"] for row in tables["training"]] == [SINGLE, PADDED, PACKED, "mamba2"]
    assert tables["packed against others"][-1]["packed against"] == "mamba2"
