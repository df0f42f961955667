"""Attention's products and their gradients: NumPy's in either form, and which form a compiled step has."""

import contextlib
import dataclasses
import re

import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from scipy.special import softmax
from tiny import CONFIG, make_engine

from bert_packed.models import attention_by_head, attention_products, layers
from bert_packed.models.attention_products import attended_values, attention_scores, weighted_values
from bert_packed.models.context import MASKED_SCORE
from bert_packed.models.cpu_forms import gradients_for_cpus, has_no_gradients, without_gradients
from bert_packed.training.engines import functional
from bert_packed.training.hlo import read_module
from bert_packed.training.optimization import Lamb

SHALLOW = dataclasses.replace(CONFIG, num_hidden_layers=1)
SHAPE = (2, 5, 3, 4)  # B, S, N, H


def arrays(dtype):
    rng = np.random.default_rng(0)
    names = ("query", "key", "value", "upstream")
    return {name: keras.ops.convert_to_tensor(rng.normal(size=SHAPE), dtype) for name in names}


def loss(inputs):
    """Weights without a softmax between the products: every factor has a gradient of its own."""
    with gradients_for_cpus():
        scores = attention_scores(inputs["query"], inputs["key"])
        found = weighted_values(scores, inputs["value"])
    return keras.ops.sum(keras.ops.cast(found * inputs["upstream"], "float32"))


def expected_gradients(query, key, value, upstream):
    scores = np.einsum("bsnh,btnh->bnst", query, key)
    score_gradient = np.einsum("bsnh,btnh->bnst", upstream, value)
    return {
        "query": np.einsum("bnst,btnh->bsnh", score_gradient, key),
        "key": np.einsum("bnst,bsnh->btnh", score_gradient, query),
        "value": np.einsum("bnst,bsnh->btnh", scores, upstream),
        "upstream": np.einsum("bnst,btnh->bsnh", scores, value),
    }


@pytest.mark.both_backends
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2.0**-6)])
def test_products_and_gradients_are_those_of_numpy(monkeypatch, dtype, tolerance, is_compiled):
    inputs, shapes = arrays(dtype), []
    kept_apart = attention_products.kept_apart
    monkeypatch.setattr(
        attention_products, "kept_apart", lambda one: shapes.append(tuple(one.shape)) or kept_apart(one)
    )
    plain = {name: np.asarray(keras.ops.cast(one, "float32"), np.float64) for name, one in inputs.items()}
    differentiate = functional.gradient(loss)
    gradients = (functional.compiled(differentiate) if is_compiled else differentiate)(inputs)
    for name, expected in expected_gradients(**plain).items():
        assert keras.backend.standardize_dtype(gradients[name].dtype) == dtype
        found = np.asarray(keras.ops.cast(gradients[name], "float32"))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    # B, N, H, S: of keys, and of values; TensorFlow has forms of its own where it computes at once
    num_sums = {"tensorflow": 2 * is_compiled, "jax": 1}[keras.backend.backend()]
    assert shapes == num_sums * 2 * [(2, 3, 4, 5)]


@pytest.mark.both_backends
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("divides_last", [True, False])
@pytest.mark.parametrize("scale", [60, 1])  # with scores whose exponentials no float32 holds, and flat ones
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2.0**-7)])
def test_values_are_weighted_by_the_softmax_wherever_it_divides(
    dtype, tolerance, scale, divides_last, is_compiled
):
    rng = np.random.default_rng(0)
    scores = rng.normal(scale=scale, size=(2, 3, 5, 5)).astype("float32")
    scores[..., 3] = MASKED_SCORE
    keeps = 2 * rng.integers(0, 2, scores.shape).astype("float32")

    def attend(inputs):
        seen = []
        form = without_gradients() if divides_last else contextlib.nullcontext()
        with form:
            found = attended_values(
                inputs["scores"],
                inputs["value"],
                lambda weights: seen.append(weights) or weights * inputs["keeps"],
            )
        return found, seen[0]

    value, kept = arrays(dtype)["value"], keras.ops.cast(keeps, dtype)
    inputs = {"scores": keras.ops.convert_to_tensor(scores), "value": value, "keeps": kept}
    found, weights = (functional.compiled(attend) if is_compiled else attend)(inputs)
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    assert keras.backend.standardize_dtype(weights.dtype) == dtype
    probs = softmax(scores.astype("float64"), axis=-1)
    value, found, weights = (np.asarray(keras.ops.cast(one, "float32")) for one in (value, found, weights))
    expected = np.einsum("bnst,btnh->bsnh", probs * keeps, value)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    assert (weights[..., 3] == 0).all()
    largest = probs.max(axis=-1, keepdims=True)
    expected = probs / largest if divides_last and dtype == "float32" else probs
    np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)


@pytest.mark.both_backends
def test_training_and_its_evaluation_divide_first_and_take_all_heads_at_once(monkeypatch):
    forms = []
    monkeypatch.setattr(attention_by_head, "SCORES_AT_ONCE", 1)
    monkeypatch.setattr(attention_by_head, "scan", lambda *of: pytest.fail("goes by head"))
    monkeypatch.setattr(
        layers,
        "attended_values",
        lambda *of: forms.append(has_no_gradients()) or attended_values(*of),
    )
    engine = make_engine(optimizer=Lamb(0.01))
    with without_gradients():
        assert has_no_gradients()  # and leaves nothing behind
    engine.train_step(packed_and_unpacked()[0])
    engine.eval_step(packed_and_unpacked()[0])
    assert len(forms) >= 2 * CONFIG.num_hidden_layers and not any(forms)


def summed_axes(engine):
    """Along which axis of the first factor each product of the one layer's heads sums, compiled: in order."""
    batch = packed_and_unpacked()[0]
    batch = {name: np.concatenate([values, values]) for name, values in batch.items()}
    (program,) = engine.step_programs(batch)
    instructions = [
        one for of in read_module(program.text).computations.values() for one in of.instructions.values()
    ]
    dots = [one for one in instructions if one.opcode == "dot" and len(one.shapes[0].sizes) == 4]
    return sorted(int(re.search(r"lhs_contracting_dims=\{(\d)\}", one.attributes)[1]) for one in dots)


@pytest.mark.both_backends
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize(
    ("devices", "num_within"), [(["cpu:0", "cpu:1"], {"tensorflow": 0, "jax": 1}), (["cpu:0", "gpu:0"], None)]
)
def test_a_compiled_step_for_cpus_transposes_first(monkeypatch, devices, num_within, micro_batch_size):
    """Of six products those for keys and values, on CPUs; under JAX those for keys."""
    monkeypatch.setattr(keras.distribution, "list_devices", lambda *of: devices)
    engine = make_engine(config=SHALLOW, optimizer=Lamb(0.01), micro_batch_size=micro_batch_size)
    within = num_within[keras.backend.backend()] if num_within else 2
    assert summed_axes(engine) == [2] * within + [3] * (6 - within)
