"""Several devices take the steps of one: the same losses, norms, gradients and weights, with dropout too."""

import contextlib
import dataclasses
import functools
import re

import finetuning_batches
import keras
import modern_bert_models
import next_tokens
import numpy as np
import pytest
from logical_devices import divide_processor
from packs import packed_and_unpacked
from tiny import SHALLOW, to_floats, train_on, values_of

from bert_packed.core.settings import InputError
from bert_packed.layers import context as layers
from bert_packed.layers.fast_gradients import gradients_are_for
from bert_packed.objectives.pretraining import (
    masked_lm_objective,
    next_token_objective,
    pretraining_objective,
)
from bert_packed.parallel.replicas import (
    Replicas,
    check_processes,
    check_shares,
    count_replicas,
    group_of,
    make_replicas,
)
from bert_packed.training import engines
from bert_packed.training.optimization import Lamb

pytestmark = pytest.mark.both_backends
NUM_DEVICES = 4
NUM_STEPS = 6
WITH_DROPOUT = dataclasses.replace(SHALLOW, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
MICRO_BATCH_SIZE = 4  # of eight packs a step
CLIP = 0.5  # of lengths above 1


@pytest.fixture(scope="module", autouse=True)
def devices():
    divide_processor(NUM_DEVICES)


@functools.cache  # TensorFlow joins devices once in a process
def make_some(num):
    """The first devices alone: the whole machine is `make_replicas`'s."""
    if num == NUM_DEVICES:
        return make_replicas("mirrored")
    if keras.backend.backend() == "jax":
        import jax

        return Replicas(num, num, mesh=jax.sharding.Mesh(np.array(jax.devices()[:num]), ("data",)))
    import tensorflow as tf

    return Replicas(num, num, strategy=tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)]))


def make_engine(num_devices, config=WITH_DROPOUT, clip=CLIP, rate=0.01, skips_empty=False, objective=None):
    replicas = make_some(num_devices) if num_devices > 1 else None
    objective = objective or pretraining_objective("per_sequence")
    objective = dataclasses.replace(objective, skips_empty=skips_empty)
    with replicas.scope() if replicas else contextlib.nullcontext():
        model = objective.build_model(config, 1)
        optimizer = Lamb(rate, weight_decay_rate=0.01, global_clipnorm=clip)
        return engines.make_engine(model, objective, optimizer, MICRO_BATCH_SIZE, replicas)


def batch_at(step):
    """Eight packs of 4, 3, 1, 2, 2, 1, 3, 4 sequences: no two devices hold as many."""
    packed, _ = packed_and_unpacked(step)
    return {name: np.concatenate([values[:4], values[3::-1]]) for name, values in packed.items()}


def finetuning_batch(kind, step):
    """Packs of 4, 3, 1, 2 and 1 sequences, and three empty ones, which fill up the micro-batches."""
    packed, _ = finetuning_batches.packed_and_unpacked(step)
    packed["labels"] = packed[finetuning_batches.LABELS.get(kind, "labels")]
    return {name: np.concatenate([values, np.zeros_like(values[:3])]) for name, values in packed.items()}


@pytest.fixture(scope="module")
def trained(devices):
    """Results of training by devices and objective; attention has its gradients for CPUs in each trace."""

    @functools.cache
    def train(num_devices, kind="pretraining"):
        objective = finetuning_batches.KINDS.get(kind)
        batch_of = functools.partial(finetuning_batch, kind) if objective else batch_at
        engine = make_engine(num_devices, objective=objective)
        taken, attend = [], layers.attention_scores
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                layers, "attention_scores", lambda *of: taken.append(gradients_are_for("cpu")) or attend(*of)
            )
            found = train_on(engine, map(batch_of, range(NUM_STEPS)))
        assert taken and all(taken)
        return found

    return train


# TensorFlow compiles a program for each device
tf_slow = [pytest.mark.slow] if keras.backend.backend() == "tensorflow" else []
CASES = [
    ("pretraining", 2),
    pytest.param("pretraining", 4, marks=tf_slow),
    ("weighted", 2),
    *(pytest.param(kind, 4, marks=tf_slow) for kind in ("tags", "answers")),
    pytest.param("several", 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "num_devices"), CASES)
def test_steps_are_those_of_one_device(trained, kind, num_devices):
    """Losses, norms, gradients, weights and seeds of dropout; the first moments are the clipped gradient."""
    one, many = trained(1, kind), trained(num_devices, kind)
    assert many.engine.num_train_traces == 1 and one.figures[0]["gradient_norm"] > CLIP
    for want, found in zip(one.figures, many.figures, strict=True):
        assert found["num_stop_requests"] == 0
        assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-5)
        for name in many.engine.objective.losses:
            assert found[name] == pytest.approx(want[name], rel=1e-6)
    batch = finetuning_batch(kind, 7) if kind in finetuning_batches.KINDS else batch_at(7)
    want, found = (to_floats(of.engine.eval_step(batch)) for of in (one, many))
    assert found == pytest.approx(want, rel=1e-5)
    names = [name for name in one.moments if name.endswith(("momentum", "velocity"))]
    gradients = [one.moments[name] for name in names if name.endswith("momentum")]
    whole = np.sqrt(sum(np.sum(values**2) for values in gradients))
    assert whole == pytest.approx(0.1 * CLIP, rel=1e-5)  # the length of all, of which 1 - beta_1 is kept
    largest = max(np.abs(values).max() for values in gradients)
    for name in names:
        np.testing.assert_allclose(many.moments[name], one.moments[name], atol=1e-6 * largest, err_msg=name)
    shifts = finetuning_batches.SHIFTS if kind == "answers" else ("key/bias",)
    shifts = tuple(name.replace("layer_1", "layer_0") for name in shifts)  # the last
    for name, values in one.weights.items():
        # Some true gradients are 0: of their rounding LAMB makes whole steps
        if not name.endswith(shifts):
            np.testing.assert_allclose(many.weights[name], values, atol=1e-5, err_msg=name)
    seeds = [name for name in one.state if name.startswith("dropout_seed/")]
    assert len(seeds) == (4 if kind in ("pretraining", "answers") else 5)
    for name in seeds:  # where a run goes on, on another number of devices too
        np.testing.assert_array_equal(many.state[name], one.state[name])


def test_evaluation_takes_batches_that_no_micro_batch_divides(trained):
    """Four packs at once in training, and six in evaluation."""
    some = {name: values[:6] for name, values in batch_at(7).items()}
    want, found = (to_floats(trained(number).engine.eval_step(some)) for number in (1, 2))
    assert want["num_sequences"] > 0
    assert found == pytest.approx(want, rel=1e-5)


def spoiled(batch):
    """A weight that is infinite makes the loss so."""
    weights = batch["slot_weights"].copy()
    weights[-1, 0] = np.inf
    return {**batch, "slot_weights": weights}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing(trained, num_devices):
    engine = trained(num_devices).engine
    weights, state = values_of(engine.weights()), values_of(engine.training_state())
    figures = to_floats(engine.train_step(spoiled(batch_at(1))))
    assert figures["is_skipped"] == 1 and not np.isfinite(figures["nsp_loss"])
    for name, values in values_of(engine.weights()).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)
    for name, values in values_of(engine.training_state()).items():
        if name.endswith(("momentum", "velocity")):
            np.testing.assert_array_equal(values, state[name], err_msg=name)
    figures = to_floats(engine.train_step(batch_at(2)))
    assert figures["is_skipped"] == 0 and np.isfinite(figures["nsp_loss"])
    assert any(np.any(values != weights[name]) for name, values in values_of(engine.weights()).items())
    assert engine.num_train_traces == 1


def test_stop_requests_are_counted(trained):
    engine = trained(2).engine
    assert float(engine.train_step(batch_at(0), wants_stop=True)["num_stop_requests"]) == 1
    assert float(engine.train_step(batch_at(0))["num_stop_requests"]) == 0


def test_packs_of_a_process_by_replica():
    replicas = Replicas(num=8, num_local=4)
    found = replicas.by_replica(np.arange(8), micro_batch_size=4)
    assert found.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert replicas.by_replica(np.arange(8), micro_batch_size=8).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Parts of a processor are no faster than it
    assert make_some(NUM_DEVICES).num_whole == 1
    assert (replicas.num_whole, Replicas(8, 4, shares_processor=True).num_whole) == (8, 2)


def test_packs_are_shared_equally_or_refused():
    assert make_replicas("none") is None
    check_shares(None, train_batch_size=3)
    replicas = Replicas(num=4, num_local=2)
    check_shares(replicas, micro_batch_size=8)
    message = r"`eval_batch_size` must be divisible.* Received: 6 packs, 4 devices"
    with pytest.raises(InputError, match=message):
        check_shares(replicas, micro_batch_size=8, eval_batch_size=6)
    with pytest.raises(InputError, match="`distribution` must not be tpu without a TPU"):
        make_replicas("tpu")


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
def test_each_device_computes_its_part_and_adds_it_up_once():
    flops = {}
    for num_devices in (1, 4):
        engine = make_engine(num_devices)
        program = engine.compiled_train_step.lower(*engine.step_arguments(batch_at(0))).compile()
        flops[num_devices] = program.cost_analysis()["flops"]
    loop = re.findall(r"^(?:ENTRY )?%\S+ \(.*?\n}", program.as_text(), re.M | re.S)
    assert any("ENTRY" in part for part in loop)
    reducing = [part for part in loop if re.search(r" all-reduce(-start)?\(", part)]
    assert len(reducing) == 1 and reducing[0].startswith("ENTRY")  # not in the loop over micro-batches
    assert " all-gather" not in program.as_text()
    # the update is the same on each; the rest is a quarter
    assert flops[4] < 0.5 * flops[1]


RATES = dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), 0.2)
# TensorFlow joins no other number of devices in one process
OTHERS = {
    "modernbert": (
        dataclasses.replace(modern_bert_models.CONFIG, num_hidden_layers=2, **RATES),
        masked_lm_objective("per_token"),
        batch_at,
    ),
    # Packs that hold 4, 2, 1, 3, 4, 2, 1 and 3 sequences
    "mamba": (
        next_tokens.CONFIG,
        next_token_objective("per_sequence"),
        lambda step: next_tokens.batch_of(2 * next_tokens.random_packs(seed=step)[:4], 12, 4),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param("modernbert", marks=tf_slow), pytest.param("mamba", marks=pytest.mark.slow)]
)
def test_other_architectures_are_those_of_one_device(name):
    """The bands of a ModernBERT have dropout."""
    config, objective, batch_of_step = OTHERS[name]
    made = (make_engine(number, config, objective=objective) for number in (1, NUM_DEVICES))
    one, many = (train_on(engine, map(batch_of_step, range(3))) for engine in made)
    for want, found in zip(one.figures, many.figures, strict=True):
        assert want["num_sequences"] == 20 and want["gradient_norm"] > CLIP
        assert found.pop("num_stop_requests") == 0
        assert found == pytest.approx(want, rel=1e-5)
    for name, values in one.weights.items():
        np.testing.assert_allclose(many.weights[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("num_processes", "num_replicas", "groups"),
    [
        (1, 4, [(0, 1)]),
        (2, 4, [(0, 2), (1, 2)]),
        (4, 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (3, 1, [(0, 1)] * 3),
    ],
)
def test_processes_of_one_replica_compute_the_same_packs(num_processes, num_replicas, groups):
    found = [group_of(index, num_processes, num_replicas) for index in range(num_processes)]
    assert found == groups
    check_processes(num_processes, num_replicas)


@pytest.mark.parametrize(("num_processes", "num_replicas"), [(4, 6), (3, 2)])
def test_processes_that_have_parts_of_replicas_are_refused(num_processes, num_replicas):
    message = f"Received: {num_processes} processes, {num_replicas} parts"
    with pytest.raises(InputError, match=message):
        check_processes(num_processes, num_replicas)
    # Rows divide packs under Optimus alone
    shape = (num_replicas, 3, 3)
    assert count_replicas("optimus2d", shape) == 3 * num_replicas
    assert count_replicas("megatron1d", shape) == num_replicas
