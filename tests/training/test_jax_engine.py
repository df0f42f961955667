"""JAX's own: donated state, out-of-memory, programs inside programs."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from keras import ops
from other_backend import batch_at, train, training_engine
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine, replace_sums

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.objectives.pretraining import pretraining_sums
from bert_packed.parallel.targets import Target
from bert_packed.training.backend import compiled

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
pytestmark = [
    pytest.mark.both_backends,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
]


def test_one_program_that_writes_over_its_state():
    engine = training_engine()
    before = engine.state()
    train(engine, range(3))
    assert engine.num_train_traces == engine.compiled_train_step._cache_size() == 1
    assert all(values.is_deleted() for kind in before.values() for values in kind)
    # Started one after another, steps leave the variables alone until somebody needs them
    state = engine.state()
    for step in range(2):
        sums = engine.start_step(batch_at(step))
    assert all(variable.value.is_deleted() for variable in engine.model.trainable_variables)
    assert engine.compiled_train_step._cache_size() == 1 and all(map(np.isfinite, engine.read(sums).values()))
    engine.write_back()
    after = engine.state()
    assert all(after[kind][0] is not state[kind][0] for kind in ("trainable", "optimizer"))
    assert int(engine.optimizer.iterations.numpy()) == 5


def test_out_of_memory_is_a_memory_error():
    def too_much(outputs, batch):
        scale = jax.lax.stop_gradient(ops.sum(outputs["nsp_logits"]))
        # They are sorted, since XLA would never store what it can add up as it makes it
        numbers = ops.sort(scale * jax.numpy.arange(2**44, dtype="float32"))
        sums = pretraining_sums(outputs, batch, "per_sequence")
        return {**sums, "num_tokens": sums["num_tokens"] + numbers[0]}

    engine = training_engine()
    replace_sums(engine, too_much)
    with pytest.raises(MemoryError, match="lower `micro_batch_size`"):
        engine.train_step(batch_at(0))


def test_a_compiled_function_sees_new_weights():
    model = build_model(PRETRAINING, CONFIG, seed=1)
    forward = compiled(functools.partial(model.encode, training=False), model)
    packed, _ = packed_and_unpacked()
    before = np.asarray(forward(packed))
    model.bert.embeddings.norm.gamma.assign(2 * model.bert.embeddings.norm.gamma.numpy())
    after = np.asarray(forward(packed))
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_allclose(after, np.asarray(model.encode(packed)), atol=1e-5)


def test_gradients_inside_another_program_are_the_same():
    """The audit takes them so: options of compilation belong to the outermost program alone."""
    engine = training_engine()
    want, _ = engine.gradients(batch_at(0), training=False)
    got = compiled(lambda batch: engine.gradients(batch, training=False)[0], engine.model)(batch_at(0))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * float(np.abs(other).max()) + 1e-9)


# Heads of 16 and of 8: only the first can be scaled by the weights
@pytest.mark.parametrize(("num_heads", "remat"), [(2, False), (4, True)])
def test_a_step_in_the_forms_for_gpus_is_that_for_cpus(num_heads, remat):
    """What a step for GPUs does otherwise: no other test takes one. A row that `gather_tokens` takes from
    another pack, heads that are scaled twice or not, and a gradient that `copies` leaves out show."""
    config = dataclasses.replace(
        CONFIG, hidden_size=32, num_attention_heads=num_heads, hidden_dropout_prob=0.1
    )
    batch = packed_and_unpacked(0)[0]
    found = {}
    for platform in ("cpu", "gpu"):
        sgd, target = keras.optimizers.SGD(0.1), Target(platform)
        engine = make_engine(config=config, build={"remat": remat}, optimizer=sgd, target=target)
        sums = [{name: float(value) for name, value in engine.train_step(batch).items()} for _ in range(3)]
        program = engine.compiled_train_step.lower(*engine.step_arguments(batch)).as_text()
        found[platform] = sums, engine.weights(), program.count("erf")
    assert found["gpu"][2] > found["cpu"][2]  # GELU is computed again
    for mine, others in zip(found["gpu"][0], found["cpu"][0], strict=True):
        assert mine == pytest.approx(others, rel=1e-4)
    for name, weight in found["gpu"][1].items():
        others = np.asarray(found["cpu"][1][name])
        np.testing.assert_allclose(np.asarray(weight), others, atol=1e-5, err_msg=name)
