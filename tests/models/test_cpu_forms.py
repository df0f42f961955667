"""Which forms a program takes: as whoever compiles it says, on CPUs alone."""

import keras
import numpy as np
import pytest

from bert_packed.models import cpu_forms
from bert_packed.training.engines import functional

CONTEXTS = {
    cpu_forms.gradients_for_cpus: cpu_forms.has_gradients_for_cpus,
    cpu_forms.without_gradients: cpu_forms.has_no_gradients,
}


def told(context, devices, monkeypatch):
    """What each question is answered while a program is traced in a context."""
    monkeypatch.setattr(keras.distribution, "list_devices", lambda *of: devices)
    answers = []

    def traced(values):
        with context():
            answers.append({question: question() for question in CONTEXTS.values()})
        assert not any(question() for question in CONTEXTS.values())
        return values

    functional.compiled(traced)(keras.ops.ones(1))
    (found,) = answers
    return found


@pytest.mark.both_backends
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_form_is_taken_where_every_device_is_a_cpu(monkeypatch, context):
    for devices, is_taken in ((["cpu:0", "cpu:1"], True), (["cpu:0", "gpu:0"], False)):
        found = told(context, devices, monkeypatch)
        assert found.pop(CONTEXTS[context]) is is_taken
        assert not any(found.values())


@pytest.mark.both_backends
def test_operations_one_by_one_keep_tensorflows_gradients():
    with cpu_forms.gradients_for_cpus():
        assert cpu_forms.has_gradients_for_cpus() is (keras.backend.backend() == "jax")


@pytest.mark.both_backends
def test_what_is_kept_apart_is_the_same():
    values = np.arange(6.0).reshape(2, 3)
    found = functional.compiled(lambda one: cpu_forms.kept_apart(keras.ops.transpose(one)))(
        keras.ops.convert_to_tensor(values)
    )
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(found), values.T)
