"""A device out of memory is one line, which names the setting to lower or the bytes of the model."""

import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from encoder_files import write_encoder
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine, write_data

from bert_packed import PretrainingConfig, TrainConfig, load_encoder, pretrain
from bert_packed.architectures import packed_model
from bert_packed.evaluation.checkpoint_audit import AuditConfig, audit_checkpoint
from bert_packed.kernels.choose import Kernels
from bert_packed.parallel.processes import ALONE
from bert_packed.runs.checkpoint_export import ExportConfig, export_checkpoint
from bert_packed.tasks import run as finetuning
from bert_packed.tasks.config import FinetuneConfig
from bert_packed.text_to_model import steps
from bert_packed.training import backend, loop
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


def test_training_and_evaluation(monkeypatch):
    engine, batch = make_engine(), packed_and_unpacked()[0]
    for step in ("train", "eval"):
        monkeypatch.setattr(engine, f"compiled_{step}_step", failing())
    with pytest.raises(MemoryError, match="out of memory in evaluation; lower `eval_batch_size`"):
        loop.evaluate(engine, [batch])
    with pytest.raises(MemoryError, match="out of memory in a training step; lower `micro_batch_size`"):
        engine.train_step(batch)


def test_prediction(monkeypatch):
    sequences = {"lengths": np.array([3, 4])}
    monkeypatch.setattr(finetuning, "predict", failing())
    with pytest.raises(MemoryError, match="out of memory in prediction; lower `predict_batch_size`"):
        finetuning.predict_packed(FinetuneConfig(output_dir="x"), None, sequences)


def test_other_errors_stay_what_they_are():
    error = backend_error("INTERNAL: not our business")
    with pytest.raises(type(error), match="not our business"), out_of_memory_names("x", "y"):
        raise error


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Packs, a model with its vocabulary, and a text."""
    folder = write_encoder(tmp_path_factory.mktemp("files"))
    write_data(folder)
    (folder / "text.txt").write_text("w1 w2.")
    return folder


def model_of(files):
    return {"init_checkpoint": str(files), "bert_config_file": f"{files}/bert_config.json"}


TEXT = finetuning.TextModel(CONFIG, None, None, Kernels({}, ""), ALONE)
# Each command that makes a model holds this number of copies of its weights at once
COMMANDS = {
    "pretrain": (3, lambda files, out: pretrain(PretrainingConfig(input_file=f"{files}/packed-*", **out))),
    "train": (3, lambda files, out: steps.check(TrainConfig(input_file=f"{files}/text.txt", **out), 6)),
    "fine-tune": (3, lambda files, out: finetuning._build_engine(FinetuneConfig(**out), TEXT, *[None] * 3)),
    "predict": (1, lambda files, out: finetuning._load_model(FinetuneConfig(**out), TEXT, None)),
    "audit": (1, lambda files, out: audit_checkpoint(AuditConfig(f"{files}/packed-*", **model_of(files)))),
    "export": (1, lambda files, out: export_checkpoint(ExportConfig(**model_of(files), output_dir="new"))),
    "encode": (1, lambda files, out: load_encoder(**model_of(files))),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_larger_than_memory_is_named_in_bytes(files, tmp_path, monkeypatch, name):
    """No weight is made before: the backend would fail in the middle, or the system kill the process."""
    num_copies, call = COMMANDS[name]
    needed = num_copies * CONFIG.weight_bytes
    monkeypatch.setattr(packed_model, "build_seeded", lambda *_: pytest.fail("a model is made"))
    monkeypatch.setattr(backend, "device_memory_bytes", lambda: needed - 1)
    out = {"output_dir": str(tmp_path / "out"), "bert_config_file": f"{files}/bert_config.json"}
    out |= {"vocab_file": f"{files}/vocab.txt"} if name == "train" else {}
    out |= {"max_seq_length": 24} if name == "train" else {}
    message = (
        rf"a device's memory of {needed - 1:,} bytes\. Received: hidden_size=16, .* at least {needed:,} bytes"
    )
    with pytest.raises(MemoryError, match=message) as caught:
        call(files, out)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(backend, "device_memory_bytes", lambda: needed)
    backend.check_memory(CONFIG, num_copies)


def test_memory_is_of_a_device_of_this_process(monkeypatch):
    """JAX knows nothing of another process's device, which may be the first of all."""

    def other():
        raise RuntimeError("MemoryStats is only supported for addressable PjRt devices")

    devices = [SimpleNamespace(memory_stats=stats) for stats in (other, lambda: {"bytes_limit": 7})]
    jax = SimpleNamespace(devices=lambda: devices, local_devices=lambda: devices[1:])
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setattr(backend, "devices_here", lambda: SimpleNamespace(platform="gpu"))
    monkeypatch.setattr(backend.keras.backend, "backend", lambda: "jax")
    assert backend.device_memory_bytes() == 7
