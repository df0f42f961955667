"""A batch that grows on several devices: in a separate process, since TensorFlow joins devices but once."""

import numpy as np
import pytest
from test_replicas import MICRO_BATCH_SIZE, batch_at, dear, devices, make_engine  # noqa: F401  a fixture
from tiny import to_floats

pytestmark = pytest.mark.both_backends


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=dear), pytest.param(2, marks=dear)])
def test_a_step_that_ends_in_empty_packs_is_one_without_them(num_devices):
    """As the first steps of a growing batch do: what is skipped changes no weight and no dropout."""
    part = {name: values[:MICRO_BATCH_SIZE] for name, values in batch_at(0).items()}
    small = {name: np.concatenate([values, np.zeros_like(values)]) for name, values in part.items()}
    skipping, plain = make_engine(num_devices, skips_empty=True), make_engine(1)
    batches = [small, small, batch_at(1), small, batch_at(2)]
    found = [to_floats(skipping.train_step(batch)) for batch in batches]
    for figures, batch in zip(found, batches, strict=True):
        figures.pop("num_stop_requests", None)
        assert figures == pytest.approx(to_floats(plain.train_step(batch)), rel=1e-5)
    assert found[0]["num_sequences"] == np.count_nonzero(part["slot_weights"])
    for name, weight in plain.weights().items():
        if not name.endswith("key/bias"):
            got, want = np.array(skipping.weights()[name].numpy()), np.array(weight.numpy())
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), name
    seeds = [
        {name: np.array(v.numpy()) for name, v in engine.training_state().items() if "seed" in name}
        for engine in (skipping, plain)
    ]
    assert seeds[0] and str(seeds[0]) == str(seeds[1])
