"""A Mamba's exports give elsewhere what it gives here, and open in transformers with their tokenizer."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from exports import assert_close, run_export
from foreign_mamba import CONFIG, MAX_SEQ_LENGTH, draw_sequences, make_batch, make_tensors, write_hugging_face
from reference import import_reference
from safetensors.numpy import load_file

from bert_packed.architectures.packed_model import build_model
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.schema import CAUSAL_LM
from bert_packed.text import byte_bpe
from bert_packed.training.backend import compiled
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a SavedModel is written by the TensorFlow backend"
)
ROOMY = dataclasses.replace(CONFIG, vocab_size=300, time_step_rank=0)  # for every byte; a rank of its width


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run's output directory, of a model all of whose tensors are random."""
    folder = tmp_path_factory.mktemp("run")
    model = make_model()
    checkpoint.save_weights(folder / "checkpoint-2", named_weights(model), CONFIG)
    return folder


def make_model(config=CONFIG):
    model, rng = build_model(CAUSAL_LM, config, seed=1), np.random.default_rng(1)
    for weight in model.weights:
        weight.assign(np.asarray(weight) + rng.normal(size=weight.shape, scale=0.3))
    return model


@pytest.fixture(scope="module")
def logits():
    """Logits of the model of `run_folder` for the packs of `draw_sequences`."""
    model = make_model()
    return np.asarray(compiled(lambda batch: model(batch)["logits"], model)(make_batch(draw_sequences())))


def test_a_checkpoint_opens_in_transformers(run_folder, logits, tmp_path):
    torch, transformers = import_reference()
    assert run_export(init_checkpoint=run_folder, output_dir=tmp_path / "hf", format="hf") == 0
    reference, info = transformers.MambaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    packs = draw_sequences()
    sequence_ids = make_batch(packs)["sequence_ids"]
    for row, pack in enumerate(packs):
        for slot, tokens in enumerate(pack):
            with torch.no_grad():
                want = reference.eval()(input_ids=torch.tensor([tokens])).logits[0].numpy()
            assert_close(logits[row][sequence_ids[row] == slot + 1], want)


def test_transformers_reads_our_config_as_it_writes_it(tmp_path):
    """Nothing is left to its defaults, which change from version to version."""
    _, transformers = import_reference()
    checkpoint.save_weights(tmp_path / "ours", named_weights(make_model(ROOMY)), ROOMY)
    assert run_export(init_checkpoint=tmp_path / "ours", output_dir=tmp_path / "hf") == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    read = transformers.MambaConfig.from_pretrained(tmp_path / "hf")
    assert {name: getattr(read, name) for name in written} == written
    assert (written["architectures"], written["model_type"]) == (["MambaForCausalLM"], "mamba")
    assert (written["time_step_rank"], written["intermediate_size"]) == (1, 24)
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (None, None, 0)
    shape = {"hidden_act": "silu", "residual_in_fp32": True, "tie_word_embeddings": True, "conv_kernel": 4}
    assert {name: written[name] for name in shape} == shape


def test_round_trip_is_exact(run_folder, tmp_path):
    assert run_export(init_checkpoint=run_folder, output_dir=tmp_path / "hf") == 0
    assert starting_weights.read_config(tmp_path / "hf") == CONFIG
    again = named_weights(build_model(CAUSAL_LM, CONFIG, seed=9))
    found = starting_weights.load(tmp_path / "hf", again, CONFIG)
    assert (found.unused, found.missing) == ([], [])
    for name, variable in named_weights(make_model()).items():
        np.testing.assert_array_equal(again[name].numpy(), variable.numpy(), err_msg=name)
    # Theirs, by way of ours, is as it was
    _, theirs = make_tensors()
    folder = write_hugging_face(tmp_path / "theirs", theirs)
    assert run_export(init_checkpoint=folder, output_dir=tmp_path / "again") == 0
    back = load_file(tmp_path / "again" / "model.safetensors")
    assert back.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(back[name], values, err_msg=name)


def test_tokenizer_of_bytes(tmp_path):
    _, transformers = import_reference()
    trained = byte_bpe.train([["packs of packs", "packed states"]], 262)
    byte_bpe.save(trained, str(tmp_path / "bpe.json"))
    checkpoint.save_weights(tmp_path / "ours", named_weights(make_model(ROOMY)), ROOMY)
    flags = {"init_checkpoint": tmp_path / "ours", "output_dir": tmp_path / "hf"}
    assert run_export(**flags, vocab_file=tmp_path / "bpe.json") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Packed states, naïvely\n"
    assert tokenizer(text)["input_ids"] == trained.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["bos_token_id"] == config["eos_token_id"] == tokenizer.eos_token_id == 0


def test_keras(run_folder, logits, tmp_path):
    assert run_export(init_checkpoint=run_folder, output_dir=tmp_path / "keras", format="keras") == 0
    model = keras.saving.load_model(tmp_path / "keras" / "model.keras")
    got = compiled(lambda batch: model(batch)["logits"], model)(make_batch(draw_sequences()))
    np.testing.assert_array_equal(np.asarray(got), logits)


@pytest.mark.slow
@needs_tensorflow
def test_saved_model(run_folder, logits, tmp_path):
    packs = draw_sequences()
    shapes = {"batch_size": len(packs), "max_seq_length": MAX_SEQ_LENGTH}
    output = tmp_path / "saved"
    assert run_export(init_checkpoint=run_folder, output_dir=output, format="saved_model", **shapes) == 0
    signatures = tf.saved_model.load(str(output)).signatures
    batch = make_batch(packs)
    inputs = signatures["packed"].structured_input_signature[1]
    assert inputs.keys() == {"token_ids", "position_ids"}
    assert all(spec.shape.is_fully_defined() for spec in inputs.values())
    got = signatures["packed"](**{name: tf.constant(batch[name]) for name in inputs})
    assert_close(got["logits"], logits)
    assert got["hidden_states"].shape == (len(packs), MAX_SEQ_LENGTH, CONFIG.hidden_size)
    # The second sequence of each pack that has one, in a separate row
    rows = [row for row, pack in enumerate(packs) if len(pack) > 1]
    feeds = {name: np.zeros((len(packs), MAX_SEQ_LENGTH), np.int32) for name in ("input_ids", "input_mask")}
    for row in rows:
        feeds["input_ids"][row, : len(packs[row][1])] = packs[row][1]
        feeds["input_mask"][row, : len(packs[row][1])] = 1
    for signature in ("unpacked", "serving_default"):
        got = signatures[signature](**{name: tf.constant(values) for name, values in feeds.items()})
        for row in rows:
            want = logits[row][batch["sequence_ids"][row] == 2]
            assert_close(np.asarray(got["logits"])[row, : len(want)], want)
