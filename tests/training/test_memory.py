"""A device out of memory is one line that names the setting to lower, wherever it runs out."""

import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import make_engine

from bert_packed.runs import finetuning
from bert_packed.runs.finetuning_config import FinetuneConfig
from bert_packed.training import loop
from bert_packed.training.backend import out_of_memory_names

pytestmark = pytest.mark.both_backends
TOO_MUCH = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"


def backend_error(text):
    """The out-of-memory error of the running backend."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.errors.JaxRuntimeError(text)
    import tensorflow as tf

    kind = tf.errors.ResourceExhaustedError if text == TOO_MUCH else tf.errors.InternalError
    return kind(None, None, text)


def failing(text=TOO_MUCH):
    def program(*_, **__):
        raise backend_error(text)

    return program


def test_evaluation(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "compiled_eval_step", failing())
    with pytest.raises(MemoryError, match="out of memory in evaluation; lower `eval_batch_size`"):
        loop.evaluate(engine, [packed_and_unpacked()[0]])


def test_training(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "compiled_train_step", failing())
    with pytest.raises(MemoryError, match="out of memory in a training step; lower `micro_batch_size`"):
        engine.train_step(packed_and_unpacked()[0])


def test_prediction(monkeypatch):
    sequences = {"lengths": np.array([3, 4])}
    monkeypatch.setattr(finetuning, "predict", failing())
    with pytest.raises(MemoryError, match="out of memory in prediction; lower `predict_batch_size`"):
        finetuning.predict_packed(FinetuneConfig(output_dir="x"), None, sequences)


def test_other_errors_stay_what_they_are():
    error = backend_error("INTERNAL: not our business")
    with pytest.raises(type(error), match="not our business"), out_of_memory_names("x", "y"):
        raise error
