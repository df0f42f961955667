"""A run that begins with the optimizer's state of another, against one that was never interrupted."""

import dataclasses
import shutil

import numpy as np
import pytest
from packs import batch_of, random_packs
from safetensors.numpy import load_file
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.training.optimization import AdamWeightDecay, Lamb, WarmupStableDecay

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled_file")]
RATE, NUM_STEPS = 0.01, 3  # each phase
SMALL = dataclasses.replace(CONFIG, num_hidden_layers=1)


def make(seed=1, first_step=0, config=SMALL, kind=Lamb):
    """An engine with one learning rate for the steps of a phase, and 0 before and after them."""
    rate = WarmupStableDecay(RATE, NUM_STEPS, num_decay_steps=1, first_step=first_step)
    return make_engine(config=config, seed=seed, optimizer=kind(rate, beta_2=0.9))


def train(engine, phase):
    rng = np.random.default_rng(phase)
    for _ in range(NUM_STEPS):
        engine.train_step(batch_of(random_packs(rng, 2, MAX_SEQ_LENGTH), MAX_SEQ_LENGTH, 4, 12))
    return {name: v.numpy() for name, v in {**engine.weights(), **engine.training_state()}.items()}


def begin(folder):
    """The engine of a second phase, as `run_pretraining.py` begins it."""
    engine = make(seed=2, first_step=checkpoint.steps_before(None, folder))
    starting_weights.load(folder, engine.weights(), SMALL)
    checkpoint.load_moments(folder, engine)
    return engine


def train_phases(folder):
    engine = make()
    train(engine, 1)
    checkpoint.save_checkpoint(folder, NUM_STEPS, engine, SMALL, {"interval": {}, "evaluation_due": False})
    whole = make_engine(config=SMALL, optimizer=Lamb(RATE, beta_2=0.9))
    stored = load_file(folder / f"checkpoint-{NUM_STEPS}" / checkpoint.TRAINING)
    checkpoint.assign_tensors(
        folder, checkpoint.read_weights(folder / f"checkpoint-{NUM_STEPS}"), whole.weights()
    )
    for variable in whole.optimizer.variables:
        if variable.path in stored:
            variable.assign(stored[variable.path])
    return train(whole, 2)


@pytest.fixture(scope="module")
def phases(uncompiled_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, train_phases(folder)


def assert_continued(values, whole):
    for name, expected in whole.items():
        if not name.startswith(("dropout_seed/", "lamb/learning_rate")):
            np.testing.assert_array_equal(values[name], expected, err_msg=name)
    assert int(values["lamb/iteration"]) == 2 * NUM_STEPS


def test_moments_their_correction_and_the_rate_go_on(phases):
    folder, whole = phases
    assert_continued(train(begin(folder), 2), whole)


def test_a_run_that_was_stopped_goes_on(phases):
    folder, whole = phases
    stopped = make(seed=2, first_step=NUM_STEPS)
    checkpoint.restore_checkpoint(folder / f"checkpoint-{NUM_STEPS}", stopped)
    assert_continued(train(stopped, 2), whole)


def test_moments_start_at_zero_by_default(phases):
    folder, whole = phases
    engine = make(seed=2)
    starting_weights.load(folder, engine.weights(), SMALL)
    values = train(engine, 2)
    kernel = "bert/layer_0/attention/query/kernel"
    assert int(values["lamb/iteration"]) == NUM_STEPS
    assert np.abs(values[kernel] - whole[kernel]).max() > RATE / 10


def test_steps_before_are_those_of_earlier_runs(phases, tmp_path):
    """The own steps of a run that continues do not count; those before a third phase all do."""
    engine = begin(phases[0])
    engine.optimizer.iterations.assign(NUM_STEPS + 2)
    second = checkpoint.save_checkpoint(tmp_path, 2, engine, SMALL, {})
    assert checkpoint.steps_before(second, "a folder that is gone") == NUM_STEPS
    assert checkpoint.steps_before(None, tmp_path) == NUM_STEPS + 2


def test_what_has_no_such_moments_is_refused(phases, tmp_path):
    folder = phases[0]
    adam = make(kind=AdamWeightDecay)
    with pytest.raises(InputError, match=r"must hold the moments of .*adam_weight_decay. Received: lamb"):
        checkpoint.load_moments(folder, adam)
    wide = make(config=dataclasses.replace(SMALL, hidden_size=32))
    with pytest.raises(InputError, match=r"holds another model: lamb/.*must have shape"):
        checkpoint.load_moments(folder, wide)
    for engine in (adam, wide):
        assert int(engine.optimizer.iterations) == 0
    checkpoint.save_weights(tmp_path / "weights", make().weights(), SMALL)
    with pytest.raises(InputError, match=r"weights/training.safetensors must hold an optimizer's state"):
        checkpoint.steps_before(None, tmp_path / "weights")


def test_a_flipped_bit_of_a_moment_is_refused(phases, tmp_path):
    folder = shutil.copytree(phases[0], tmp_path / "run")
    path = folder / f"checkpoint-{NUM_STEPS}" / checkpoint.TRAINING
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"training.safetensors must have the SHA-256"):
        checkpoint.load_moments(folder, make())
