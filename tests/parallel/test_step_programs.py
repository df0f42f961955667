"""Step of two devices, in a process by itself: its program, and a batch that grows.

TensorFlow joins devices once in a process.
"""

import re

import keras
import numpy as np
import pytest
from test_replicas import MICRO_BATCH_SIZE, batch_at, devices, make_engine, tf_slow  # noqa: F401  a fixture
from tiny import CONFIG, to_floats, values_of

from bert_packed.training.step_report import describe_step, is_static

pytestmark = pytest.mark.both_backends


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=tf_slow)])
def test_a_step_that_ends_in_empty_packs_is_one_without_them(num_devices):
    """The first steps of a growing batch end so: what is skipped changes no weight and no dropout."""
    part = {name: values[:MICRO_BATCH_SIZE] for name, values in batch_at(0).items()}
    small = {name: np.concatenate([values, np.zeros_like(values)]) for name, values in part.items()}
    skipping, plain = make_engine(num_devices, skips_empty=True), make_engine(1)
    batches = [small, small, batch_at(1), small, batch_at(2)]
    found = [to_floats(skipping.train_step(batch)) for batch in batches]
    for figures, batch in zip(found, batches, strict=True):
        figures.pop("num_stop_requests", None)
        assert figures == pytest.approx(to_floats(plain.train_step(batch)), rel=1e-5)
    assert found[0]["num_sequences"] == np.count_nonzero(part["slot_weights"])
    weights = values_of(skipping.weights())
    for name, want in values_of(plain.weights()).items():
        if not name.endswith("key/bias"):
            assert np.abs(weights[name] - want).max() <= 1e-5 * np.abs(want).max(), name
    found, want = (values_of(engine.training_state()) for engine in (skipping, plain))
    seeds = [name for name in found if "seed" in name]
    assert seeds
    for name in seeds:
        np.testing.assert_array_equal(found[name], want[name])


@pytest.mark.slow
def test_the_program_has_its_share_and_sends_the_gradient_once():
    batch = batch_at(0)
    engine = make_engine(2)
    report = describe_step(engine.step_program(batch))
    assert is_static(report) and report["devices"] == 2
    # a device has 4 of 8 packs, in two rounds of 2
    length, width, wide = batch["token_ids"].shape[1], CONFIG.hidden_size, CONFIG.intermediate_size
    block = 4 * length * width**2 + 2 * length**2 * width + 2 * length * width * wide
    heads = batch["prediction_ids"].shape[1] * width * (width + CONFIG.vocab_size)
    heads += batch["slot_weights"].shape[1] * width * (width + 2)
    assert report["matmul_flops"] == 3 * 2 * 4 * (block + heads)
    if keras.backend.backend() == "tensorflow":
        assert report["collectives"] == []  # `tf.distribute` adds up, outside of the program
        program = engine.step_program(batch)
        summed = re.findall(r"= f32\[\d+,\d+,\d+,\d+\]\S* dot\(.*lhs_contracting_dims=\{(\d)\}", program.text)
        assert len(summed) == 6 and set(summed) == {"3"}  # attention's gradients in the form for CPUs
        return
    (row,) = report["collectives"]
    assert (row["kind"], row["group_size"]) == ("all-reduce", 2) and row["executions"] <= 4
    # Each array of a collective has its own round trips on CPUs: counts, gradients, requests to stop
    kinds = re.findall(r"= (.*?) all-reduce\(", engine.step_program(batch).text)
    assert 2 <= sum(kind.count("[") for kind in kinds) <= 3
    gradient = sum(variable.numpy().nbytes for variable in engine.model.trainable_variables)
    assert gradient < report["collective_bytes"] <= gradient + 4 * 2 * len(engine.objective.sum_names)
