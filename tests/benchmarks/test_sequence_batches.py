"""The same sequences one at a time, padded and packed: chosen, and each once in each way."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from mamba_batches import PACKS, WAYS, tiny_batches
from next_tokens import CONFIG, VOCAB_SIZE

from benchmarks import mamba_speed
from benchmarks.padding_rates import draw_lengths
from benchmarks.sequence_batches import (
    PACKED,
    PADDED,
    SINGLE,
    best_shapes,
    choose_packs,
    make_batches,
)
from bert_packed.core.settings import InputError


@pytest.mark.parametrize("num_shapes", [1, 2, 3, 9])
def test_the_best_shapes_are_those_of_all_choices(num_shapes):
    lengths = np.random.default_rng(num_shapes).integers(1, 30, 12)
    values = np.unique(lengths)
    costs = [
        sum(min(shape for shape in shapes if shape >= length) for length in lengths)
        for count in range(1, min(num_shapes, len(values)) + 1)
        for shapes in itertools.combinations(values, count)
        if max(shapes) == max(values)
    ]
    shapes = best_shapes(lengths, num_shapes)
    assert len(shapes) <= num_shapes and shapes[-1] == max(lengths)
    assert sum(shapes[np.searchsorted(shapes, lengths)]) == min(costs)


def test_chosen_sequences_fill_the_packs_and_have_the_spread_of_all():
    assert choose_packs([1, 1, 2, 2, 2, 2, 3, 5], 5, 2) == [(1, 2, 2), (5,)]
    lengths = draw_lengths(5000, seed=0)
    packs = choose_packs(lengths, 4096, 4)
    chosen = [length for pack in packs for length in pack]
    assert len(packs) == 4 and all(sum(pack) <= 4096 for pack in packs)
    assert sum(chosen) > 0.95 * 4 * 4096
    assert np.mean(chosen) == pytest.approx(np.mean(lengths), rel=0.03)
    assert np.std(chosen) == pytest.approx(np.std(lengths), rel=0.1)
    with pytest.raises(InputError, match=r"must hold enough to fill 3 packs of 8\. Received: 4 sequences"):
        choose_packs([3, 4, 5, 2], 8, 3)


def sequences_of(batch):
    """The tokens of each sequence, after a check that each predicts its own next, by a loop."""
    for row in range(len(batch["token_ids"])):
        ids = batch["sequence_ids"][row]
        assert batch["slot_weights"][row].sum() == ids.max()
        for slot in range(1, ids.max() + 1):
            here = np.flatnonzero(ids == slot)
            tokens = batch["token_ids"][row, here]
            assert here.tolist() == list(range(here[0], here[0] + len(here)))
            assert batch["position_ids"][row, here].tolist() == list(range(len(here)))
            assert batch["label_ids"][row, here].tolist() == [*tokens[1:], 0]
            assert batch["label_sequences"][row, here].tolist() == [slot] * (len(here) - 1) + [0]
            yield tuple(tokens.tolist())


def test_every_sequence_is_once_in_each_way():
    batches = tiny_batches()
    found = {
        way: Counter(one for batch in some.batches for one in sequences_of(batch))
        for way, some in batches.items()
    }
    assert tuple(found) == WAYS
    assert found[SINGLE] == found[PADDED] == found[PACKED]
    assert sorted(map(len, found[PACKED].elements())) == sorted(itertools.chain(*PACKS))
    shapes = {way: [batch["token_ids"].shape for batch in some.batches] for way, some in batches.items()}
    assert shapes[PACKED] == [(2, 8)] * 2
    assert shapes[PADDED] == [(2, 6)] * 4 + [(1, 6)]  # as many tokens at once as 2 packs of 8 hold
    assert len(set(shapes[SINGLE])) == 3 and {rows for rows, _ in shapes[SINGLE]} == {1}
    assert batches[PACKED].padding == pytest.approx(1 - 28 / 32)
    assert batches[PADDED].padding == pytest.approx(1 - 28 / 54)


@pytest.mark.both_backends
def test_the_losses_of_all_sequences_are_the_same_in_each_way(uncompiled):
    """The model is one, so what is timed is the same work; without resets it is not."""
    batches = make_batches([(1, 2, 3), (5,)], 6, 5, 2, 2, VOCAB_SIZE)
    names = ("lm_nll", "lm_sequence_nll", "num_predictions", "num_sequences", "num_bytes")

    def totals(config, way):
        engine = mamba_speed.make_mamba_engine(config)
        sums = [engine.eval_step(batch) for batch in batches[way].batches]
        return [sum(float(one[name]) for one in sums) for name in names]

    found = [totals(CONFIG, way) for way in WAYS]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert found[0][2:] == [7, 4, 11]
    without = totals(dataclasses.replace(CONFIG, ablation_no_position_reset=True), PACKED)
    assert abs(without[0] / found[2][0] - 1) > 1e-5
