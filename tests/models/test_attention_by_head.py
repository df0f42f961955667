"""Attention of one head after another: the results of all at once, and where it is taken."""

import keras
import numpy as np
import pytest
from scipy.special import softmax

from bert_packed.models import attention_by_head
from bert_packed.models.attention_by_head import attend_by_head, goes_by_head
from bert_packed.models.attention_products import attended_values, attention_scores
from bert_packed.models.context import PackContext
from bert_packed.models.cpu_forms import gradients_for_cpus, without_gradients
from bert_packed.training.engines import functional

pytestmark = pytest.mark.both_backends
B, S, N, H = 2, 5, 3, 4
IDS = np.array([[1, 1, 2, 3, 3], [1, 2, 2, 2, 0]], np.int32)


def arrays(dtype="float32", batch=B):
    rng = np.random.default_rng(0)
    return [
        keras.ops.convert_to_tensor(3 * rng.normal(size=(batch, S, N, H)), dtype)
        for _ in ("query", "key", "value")
    ]


def alone(query_SH, key_SH, value_SH, ids_S):
    """Each sequence of a pack by itself, one head: float64 `[S, H]`."""
    found_SH = np.zeros(query_SH.shape)
    for number in set(ids_S.tolist()):
        own = ids_S == number
        found_SH[own] = softmax(query_SH[own] @ key_SH[own].T, axis=-1) @ value_SH[own]
    return found_SH


def at_once(query_BSNH, key_BSNH, value_BSNH, context):
    scores_BNSS = context.hide(keras.ops.cast(attention_scores(query_BSNH, key_BSNH), "float32"))
    return attended_values(scores_BNSS, value_BSNH, lambda weights: weights)


def attend(query_BSNH, key_BSNH, value_BSNH, ids_BS):
    with without_gradients():
        return attend_by_head(at_once, query_BSNH, key_BSNH, value_BSNH, PackContext(ids_BS, None))


@pytest.mark.parametrize("scores_at_once", [1, 2 * S * S, 5 * S * S, 6 * S * S])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2.0**-6)])
def test_each_head_attends_in_its_own_sequences(monkeypatch, dtype, tolerance, scores_at_once):
    monkeypatch.setattr(attention_by_head, "SCORES_AT_ONCE", scores_at_once)
    given = arrays(dtype)
    found = functional.compiled(attend)(*given, keras.ops.convert_to_tensor(IDS))
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    found = np.asarray(keras.ops.cast(found, "float32"))
    plain = [np.asarray(keras.ops.cast(one, "float32"), np.float64) for one in given]
    for pack in range(B):
        for head in range(N):
            want = alone(*(one[pack, :, head] for one in plain), IDS[pack])
            np.testing.assert_allclose(
                found[pack, :, head], want, rtol=0, atol=tolerance * np.abs(want).max()
            )


@pytest.mark.parametrize(
    ("scores_at_once", "turns", "heads"),
    [
        (1, 6, 1),  # one head at least
        (S * S, 6, 1),
        (2 * S * S - 1, 6, 1),
        (2 * S * S, 3, 2),
        (5 * S * S, 2, 3),  # turns are equal
        (6 * S * S, 1, 6),
    ],
)
def test_heads_of_a_turn(monkeypatch, scores_at_once, turns, heads):
    shapes, scan = [], attention_by_head.scan
    monkeypatch.setattr(attention_by_head, "SCORES_AT_ONCE", scores_at_once)
    monkeypatch.setattr(
        attention_by_head,
        "scan",
        lambda step, carry, inputs: shapes.append(inputs) or scan(step, carry, inputs),
    )
    functional.compiled(attend)(*arrays(), keras.ops.convert_to_tensor(IDS))
    ((*factors, ids),) = shapes
    assert [tuple(one.shape) for one in factors] == 3 * [(turns, heads, S, H)]
    assert tuple(ids.shape) == (turns, heads, S)


def told(context, batch=B, devices=("cpu:0",), is_compiled=True):
    """What `goes_by_head` answers in a context."""
    answers = []

    def ask(query_BSNH):
        with context():
            answers.append(goes_by_head(query_BSNH))
        return query_BSNH

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(keras.distribution, "list_devices", lambda *of: list(devices))
        (functional.compiled(ask) if is_compiled else ask)(arrays(batch=batch)[0])
    (found,) = answers
    return found


def test_where_it_is_taken(monkeypatch):
    monkeypatch.setattr(attention_by_head, "SCORES_AT_ONCE", S * S)
    assert told(without_gradients)  # of 6 heads
    assert not told(without_gradients, batch=1)  # of 3, no more than 4 times as many as at once
    assert not told(without_gradients, devices=("cpu:0", "gpu:0"))
    assert not told(gradients_for_cpus)
    assert told(without_gradients, is_compiled=False) is (keras.backend.backend() == "jax")
