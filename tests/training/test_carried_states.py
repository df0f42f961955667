"""States that rows hand on from step to step, in the program as it is compiled for users."""

import contextlib
import dataclasses

import next_tokens
import numpy as np
import pytest
from conftest import run_uncompiled
from tiny import to_floats

from bert_packed.training.optimization import Lamb
from bert_packed.training.step_report import describe_step, is_static

pytestmark = pytest.mark.both_backends


@pytest.mark.slow
def test_compiled_steps_over_rows_are_those_of_single_operations():
    """One program, of fixed shapes; micro-batches use the carried states one after the other."""
    batch = next_tokens.batch_of(next_tokens.random_packs()[:4], 12, 4)
    later = {**batch, "position_ids": batch["position_ids"] + 12}
    figures = []
    for is_compiled in (True, False):
        optimizer = Lamb(0.01)
        with contextlib.nullcontext() if is_compiled else run_uncompiled():
            engine = next_tokens.make_engine(build={"num_rows": 4}, optimizer=optimizer, micro_batch_size=2)
        figures.append([to_floats(engine.train_step(one)) for one in (batch, later)])
        carried = {n: np.array(v.numpy()) for n, v in engine.training_state().items() if "carried" in n}
        if is_compiled:
            assert engine.num_train_traces == 1 and is_static(describe_step(engine.step_programs(batch)))
            want = carried
    assert figures[0][1]["lm_loss"] != pytest.approx(figures[0][0]["lm_loss"], rel=1e-3)
    for one, other in zip(*figures, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for name, values in want.items():
        np.testing.assert_allclose(carried[name], values, atol=1e-4 * np.abs(values).max())


def carried_states(engine):
    """The states and tails that each row hands on: list of arrays `[rows, ...]`."""
    return [np.array(v.numpy()) for name, v in engine.training_state().items() if "carried" in name]


@pytest.mark.usefixtures("uncompiled")
def test_a_step_that_is_left_out_hands_on_no_state_that_is_not_finite():
    """The third row ends in a token whose embedding is infinite: its states and tails become 0."""
    rng = np.random.default_rng(3)
    rows = [[rng.integers(1, 20, 12).tolist()] for _ in range(4)]
    clean = next_tokens.batch_of(rows, 12, 4)
    rows[2][0][11] = 25
    batch = next_tokens.batch_of(rows, 12, 4)
    config = dataclasses.replace(next_tokens.CONFIG, num_hidden_layers=1)
    options = {"build": {"num_rows": 4}, "optimizer": Lamb(0.01), "micro_batch_size": 2}
    engine = next_tokens.make_engine(config=config, **options)
    table = engine.weights()["backbone/embeddings"]
    good = np.array(table.numpy())
    spoiled = good.copy()
    spoiled[25] = np.inf
    table.assign(spoiled)
    assert to_floats(engine.train_step(batch))["is_skipped"] == 1
    handed_on = carried_states(engine)
    assert len(handed_on) == 2 * config.num_hidden_layers
    for values in handed_on:
        assert np.isfinite(values).all() and not values[2].any()
        assert all(values[row].any() for row in (0, 1, 3))
    table.assign(good)
    later = {**clean, "position_ids": clean["position_ids"] + 12}
    figures = to_floats(engine.train_step(later))
    assert figures["is_skipped"] == 0 and np.isfinite(figures["lm_loss"])
    assert all(values[2].any() for values in carried_states(engine))
