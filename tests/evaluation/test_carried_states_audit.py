"""Rows of sound Mambas pass; states of another row, of an ended sequence, or never carried are caught."""

import dataclasses
from types import SimpleNamespace

import keras
import next_tokens
import numpy as np
import pytest
from keras import ops

from bert_packed.core.settings import InputError
from bert_packed.evaluation import contamination

pytestmark = pytest.mark.both_backends
LENGTH = 6
# Three rows in packs of 6 have sequences over three packs, ends at a border, single tokens, and padding
ROWS = [[4, 9, 5], [14, 1, 2], [6, 3, 7]]
LEAKS, WITHOUT, UNCUT = (
    f"carried states: {name}"
    for name in (
        "tokens that another sequence changes",
        "packs that go on from nothing",
        "hidden_states of uncut rows",
    )
)


def batch_of(rows=ROWS, length=LENGTH, seed=0):
    """Packs of rows of sequences of random tokens, by a plain loop, and an empty pack behind them."""
    rng, num_rows = np.random.default_rng(seed), len(rows)
    num_steps = -(-max(map(sum, rows)) // length)
    names = ("token_ids", "sequence_ids", "position_ids")
    batch = {name: np.zeros((num_steps * num_rows + 1, length), np.int32) for name in names}
    batch["slot_weights"] = np.zeros((num_steps * num_rows + 1, length), np.float32)
    for row, sizes in enumerate(rows):
        place = 0
        for size in sizes:
            for position in range(size):
                pack, at = place // length * num_rows + row, place % length
                is_new = position == 0 or at == 0
                slot = int(batch["slot_weights"][pack].sum()) + is_new
                batch["slot_weights"][pack, slot - 1] = 1
                batch["token_ids"][pack, at] = rng.integers(1, next_tokens.VOCAB_SIZE)
                batch["sequence_ids"][pack, at] = slot
                batch["position_ids"][pack, at] = position
                place += 1
    return batch


def make_model(num_rows, config):
    config = dataclasses.replace(config, num_hidden_layers=1)
    return next_tokens.make_engine(config=config, build={"num_rows": num_rows}).model


@pytest.fixture(autouse=True)
def as_graph(monkeypatch):
    """A graph is made in less time than XLA's program."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        monkeypatch.setattr(contamination, "compiled", lambda function, model: tf.function(function))


def failed(model, packs):
    checks = contamination.audit_rows(model, packs)
    assert [check.name for check in checks] == [LEAKS, WITHOUT, UNCUT]
    return {check.name for check in checks if not check.passed}


def take_last(carried, size):
    return tuple(part[-size:] for part in carried)


def take_last_states(carried, size):
    return carried[0][-size:], carried[1][:size]


def take_last_tail(carried, size):
    return carried[0][:size], carried[1][-size:]


def take_nothing(carried, size):
    return tuple(part[:size] * 0 for part in carried)


def make_faulty(model, take):
    """Let each micro-batch take over `take(carried, size)`, of the states and the tail of a block."""
    backbone = model.backbone

    def wrong(number, num_packs):
        return take([ops.convert_to_tensor(queue) for queue in backbone.carried[number]], num_packs)

    backbone._take = wrong
    return model


MAMBA, MAMBA2 = next_tokens.CONFIG, next_tokens.MAMBA2
WITHOUT_RESET = dataclasses.replace(MAMBA, ablation_no_position_reset=True)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "rows", "take", "expected"),
    [
        (MAMBA, [[20, 3]], None, set()),
        (MAMBA, [*ROWS, [1, 17]], None, set()),
        (MAMBA, [[4, 9, 5], [6], [6, 3, 7]], None, set()),  # whose last packs are padding in one row
        (MAMBA2, ROWS, None, set()),
        (MAMBA, ROWS, take_last, {LEAKS, WITHOUT, UNCUT}),
        (MAMBA, ROWS, take_last_states, {LEAKS, UNCUT}),
        (MAMBA, ROWS, take_last_tail, {LEAKS, UNCUT}),
        pytest.param(MAMBA2, ROWS, take_last_states, {LEAKS, UNCUT}, marks=SLOW),
        pytest.param(MAMBA2, ROWS, take_last_tail, {LEAKS, UNCUT}, marks=SLOW),
        (MAMBA, ROWS, take_nothing, {WITHOUT, UNCUT}),
        (WITHOUT_RESET, ROWS, None, {LEAKS}),
    ],
)
def test_sound_rows_pass_and_faulty_ones_fail(config, rows, take, expected):
    packs = contamination.take_rows(batch_of(rows), len(rows))
    model = make_model(len(rows), config)
    found = failed(make_faulty(model, take) if take else model, packs)
    assert found >= expected and bool(found) == bool(expected)


def own_sums(packs):
    """The sum of a sequence's tokens up to each, as its state."""
    tokens, positions = (
        packs[name].transpose(1, 0, 2).reshape(3, -1) for name in ("token_ids", "position_ids")
    )
    sums = np.cumsum(tokens, axis=1)
    starts = np.maximum(np.arange(sums.shape[1]) - positions, 0)
    before = np.take_along_axis(np.pad(sums, ((0, 0), (1, 0))), starts, axis=1)
    return (sums - before).reshape(3, -1, LENGTH).transpose(1, 0, 2)[..., None].astype(np.float32)


def numbers_of_rows():
    """int `[N, R, S]`: the number of each token's sequence in its row, -1 for padding."""
    rows = [np.repeat(np.arange(len(sizes)), sizes) for sizes in ROWS]
    padded = [np.pad(row, (0, 3 * LENGTH - len(row)), constant_values=-1) for row in rows]
    return np.reshape(padded, (3, 3, LENGTH)).transpose(1, 0, 2)


@pytest.mark.parametrize("is_of_another_row", [False, True])
def test_a_leak_into_one_place_is_seen_wherever_it_is(monkeypatch, is_of_another_row):
    """It comes from the other sequences of the row, or from those of the same number in other rows."""
    numbers_NRS, rows_R1 = numbers_of_rows(), np.arange(3)[:, None]
    packs = contamination.take_rows(batch_of(), 3)
    model = SimpleNamespace(config=next_tokens.CONFIG)
    monkeypatch.setattr(contamination, "compiled", lambda function, model: function)
    monkeypatch.setattr(contamination, "_uncut_rows", lambda _, packs: own_sums(packs))

    def found(place=None):
        def run(model, step, packs):
            states_NRSD = own_sums(packs)
            if place:
                is_equal_NRS, is_other_R1 = numbers_NRS == numbers_NRS[place], rows_R1 != place[1]
                givers_NRS = (is_equal_NRS == is_other_R1) & (is_other_R1 == is_of_another_row)
                states_NRSD[place] += packs["token_ids"][givers_NRS].sum()
            return states_NRSD

        monkeypatch.setattr(contamination, "_run_rows", run)
        return failed(model, packs)

    assert found() == set()
    # Only neighbours can leak into padding, which has no number
    for place in np.argwhere((numbers_NRS >= 0) | (not is_of_another_row)):
        assert found(tuple(place)) == {LEAKS, UNCUT}, place


def test_packs_that_show_nothing_are_refused():
    batch = batch_of()
    with pytest.raises(InputError, match=r"`num_packs` must be at least 6 .* Received: 3 packs without"):
        contamination.take_rows({name: values[:5] for name, values in batch.items()}, 3)
    with pytest.raises(
        InputError, match=r"from the first on. Received: pack 0, which goes on at position 2, not 0"
    ):
        contamination.take_rows({name: values[3:] for name, values in batch.items()}, 3)
