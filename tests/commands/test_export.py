"""Exports give elsewhere what the model gives here, and a checkpoint trained here opens in transformers."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from exports import assert_close, run_export
from foreign_checkpoints import make_tensors, write_hugging_face
from packs import packed_and_unpacked
from reference import import_reference
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.config import PRETRAINING, ablate
from bert_packed.models.packed_model import build_model
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.optimization import Lamb

pytestmark = pytest.mark.both_backends
needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a SavedModel is written by the TensorFlow backend"
)
SHAPES = {
    "batch_size": 5,
    "max_seq_length": MAX_SEQ_LENGTH,
    "max_sequences_per_pack": 4,
    "max_predictions_per_pack": 12,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model after two training steps, and the output directory of its run."""
    engine, folder = make_engine(optimizer=Lamb(0.05)), tmp_path_factory.mktemp("run")
    for seed in range(2):
        engine.train_step(packed_and_unpacked(seed)[0])
    checkpoint.save_checkpoint(folder, 2, engine, CONFIG, {})
    return engine.model, folder


@pytest.fixture(scope="module")
def batches():
    return packed_and_unpacked(7)


def test_a_trained_checkpoint_opens_in_transformers(trained, batches, tmp_path):
    torch, transformers = import_reference()
    model, folder = trained
    assert run_export(init_checkpoint=folder, output_dir=tmp_path / "hf", format="hf") == 0
    reference, info = transformers.BertForPreTraining.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    packed, unpacked = batches
    outputs = {name: np.asarray(values) for name, values in model(packed).items()}
    sequence, next_sentence = 0, []
    for row in range(5):
        for slot in range(int(packed["sequence_ids"][row].max())):
            length = int(unpacked["sequence_ids"][sequence].sum())
            with torch.no_grad():
                want = reference.eval()(
                    input_ids=torch.tensor(unpacked["token_ids"][sequence : sequence + 1, :length]).long(),
                    token_type_ids=torch.tensor(
                        unpacked["token_type_ids"][sequence : sequence + 1, :length]
                    ).long(),
                )
            next_sentence.append((outputs["nsp_logits"][row, slot], want.seq_relationship_logits[0].numpy()))
            mine = packed["prediction_sequences"][row] == slot + 1
            if mine.any():
                used = unpacked["prediction_sequences"][sequence] > 0
                positions = unpacked["prediction_positions"][sequence][used]
                assert_close(outputs["mlm_logits"][row][mine], want.prediction_logits[0].numpy()[positions])
            sequence += 1
    assert sequence == 11
    # All sequences' at once: two logits near 0 are no measure of rounding
    assert_close(*np.array(next_sentence).swapaxes(0, 1))


def test_round_trip_is_exact(trained, tmp_path):
    model, folder = trained
    assert run_export(init_checkpoint=folder, output_dir=tmp_path / "hf") == 0
    assert starting_weights.read_config(tmp_path / "hf") == CONFIG
    other = build_model(PRETRAINING, CONFIG, seed=9)
    found = starting_weights.load(tmp_path / "hf", named_weights(other), CONFIG)
    assert (found.unused, found.missing) == ([], [])
    for name, variable in named_weights(model).items():
        np.testing.assert_array_equal(named_weights(other)[name].numpy(), variable.numpy(), err_msg=name)


def test_what_was_never_trained_is_not_exported(tmp_path):
    one_layer = dataclasses.replace(CONFIG, num_hidden_layers=1)
    tensors = {n: v for n, v in make_tensors()[1].items() if n.startswith("bert.")}
    folder = write_hugging_face(tmp_path / "bare", tensors, one_layer)
    assert run_export(init_checkpoint=folder, output_dir=tmp_path / "hf") == 0
    found = starting_weights.load(
        tmp_path / "hf", named_weights(build_model(PRETRAINING, one_layer, seed=1)), one_layer
    )
    assert (found.num_used, len(found.missing)) == (len(tensors), 7)


def test_tokenizer(trained, tmp_path):
    _, transformers = import_reference()
    vocabulary = [*SPECIAL_TOKENS, "pack", "##ed", "cafe"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    flags = {"init_checkpoint": trained[1], "output_dir": tmp_path / "hf"}
    assert run_export(**flags, vocab_file=tmp_path / "vocab.txt", do_lower_case=True) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("Packed Café")["input_ids"] == [2, 5, 6, 7, 3]


def test_keras(trained, batches, tmp_path):
    model, folder = trained
    assert run_export(init_checkpoint=folder, output_dir=tmp_path / "keras", format="keras") == 0
    other = keras.saving.load_model(tmp_path / "keras" / "model.keras")
    for name, values in other(batches[0]).items():
        np.testing.assert_array_equal(np.asarray(values), np.asarray(model(batches[0])[name]))


@needs_tensorflow
def test_saved_model(trained, batches, tmp_path):
    model, folder = trained
    output = tmp_path / "saved"
    assert run_export(init_checkpoint=folder, output_dir=output, format="saved_model", **SHAPES) == 0
    signatures = tf.saved_model.load(str(output)).signatures
    packed, unpacked = batches
    inputs = signatures["packed"].structured_input_signature[1]
    assert all(spec.shape.is_fully_defined() for spec in inputs.values())
    got = signatures["packed"](**{name: tf.constant(packed[name]) for name in inputs})
    for name, values in {**model(packed), "hidden_states": model.encode(packed)}.items():
        assert_close(got[name], values)

    one = {name: values[:5] for name, values in unpacked.items()}
    positions = np.pad(one["prediction_positions"], [(0, 0), (0, 4)])
    feeds = {
        "input_ids": one["token_ids"],
        "input_mask": one["sequence_ids"],
        "segment_ids": one["token_type_ids"],
        "masked_lm_positions": positions,
    }
    for signature in ("unpacked", "serving_default"):
        got = signatures[signature](**{name: tf.constant(values) for name, values in feeds.items()})
        want = model({**one, "prediction_positions": positions})
        assert_close(got["mlm_logits"], want["mlm_logits"])
        assert_close(got["nsp_logits"], want["nsp_logits"])


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="other backends refuse it")
def test_saved_model_under_another_backend_is_refused(trained, tmp_path, capsys):
    assert run_export(init_checkpoint=trained[1], output_dir=tmp_path / "saved", format="saved_model") == 2
    assert "must not be saved_model unless KERAS_BACKEND=tensorflow. Received:" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"output_dir": "{full}"}, "`output_dir` must be missing or empty"),
        ({"init_checkpoint": "{full}"}, "`init_checkpoint` must be a folder"),
        ({"init_checkpoint": ""}, "`init_checkpoint` must be given"),
        ({"init_checkpoint": "."}, "`init_checkpoint` must be a folder"),
        ({"output_dir": "."}, "`output_dir` must not be the current folder"),
        ({"format": "onnx"}, "`format` must be one of hf, keras, saved_model"),
        pytest.param(
            {"format": "saved_model"}, "`max_seq_length` must be at most max_pos", marks=needs_tensorflow
        ),
        ({"format": "keras", "vocab_file": "v"}, "`vocab_file` must be left out"),
        ({"format": "keras", "audit_file": "v"}, "`audit_file` must be left out unless --format=hf"),
        ({"audit_file": "none.json"}, "none.json must be JSON"),
        ({"vocab_file": "{long}"}, "`vocab_file` must be at most vocab_size=31 of the model. Received: 32"),
    ],
)
def test_mistakes(trained, tmp_path, capsys, monkeypatch, flags, message):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    full, long = tmp_path / "full", tmp_path / "long.txt"
    full.mkdir()
    (full / "notes").touch()
    long.write_text("word\n" * 32)
    flags = {"init_checkpoint": trained[1], "output_dir": tmp_path / "new", **flags}
    assert run_export(**{name: str(v).format(full=full, long=long) for name, v in flags.items()}) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_ablation_is_told(tmp_path, capsys):
    config = ablate(CONFIG, "no_attention_mask")
    checkpoint.save_weights(tmp_path / "model", make_engine(config=config).weights(), config)
    assert run_export(init_checkpoint=tmp_path / "model", output_dir=tmp_path / "hf") == 0
    assert "WARNING: this model was trained with --ablation=no_attention_mask" in capsys.readouterr().out


def test_config_names_the_architecture(trained, tmp_path):
    assert run_export(init_checkpoint=trained[1], output_dir=tmp_path / "hf") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("bert", ["BertForPreTraining"])
