"""The command that exports: what it writes, what it leaves out and what it refuses.

`tests/checkpoints/test_heads.py` compares what other programs compute from it.
"""

import dataclasses

import keras
import pytest
from exports import run_export
from foreign_checkpoints import make_tensors, write_hugging_face
from reference import import_reference
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING, ablate
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.runs import checkpoint_export
from bert_packed.runs.export_config import ExportConfig
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a SavedModel is written by the TensorFlow backend"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output directory of a run."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint.save_weights(folder / "checkpoint-2", make_engine().weights(), CONFIG)
    return folder


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
    for is_lower, ids in ((True, [2, 5, 6, 7, 3]), (False, [2, 1, 1, 3])):
        flags = {"init_checkpoint": trained, "output_dir": tmp_path / f"{is_lower}"}
        assert run_export(**flags, vocab_file=tmp_path / "vocab.txt", do_lower_case=is_lower) == 0
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / f"{is_lower}")
        assert tokenizer("Packed Café")["input_ids"] == ids


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="other backends refuse it")
def test_saved_model_under_another_backend_is_refused(trained, tmp_path, capsys):
    assert run_export(init_checkpoint=trained, output_dir=tmp_path / "saved", format="saved_model") == 2
    assert "must not be saved_model unless KERAS_BACKEND=tensorflow. Received:" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"output_dir": "{full}"}, "`output_dir` must be missing or empty"),
        ({"init_checkpoint": ""}, "`init_checkpoint` must be given"),
        ({"init_checkpoint": "."}, "`init_checkpoint` must be a folder"),
        ({"format": "onnx"}, "`format` must be one of hf, keras, saved_model"),
        ({"format": "keras", "vocab_file": "v"}, "`vocab_file` must be left out"),
        ({"format": "keras", "audit_file": "v"}, "`audit_file` must be left out unless --format=hf"),
        ({"audit_file": "none.json"}, "none.json must be JSON"),
    ],
)
def test_mistakes(trained, tmp_path, capsys, monkeypatch, flags, message):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").touch()
    flags = {"init_checkpoint": trained, "output_dir": tmp_path / "new", **flags}
    assert run_export(**{name: str(v).format(full=full) for name, v in flags.items()}) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["keras", "hf", "saved_model"])
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_tensorflow_alone_writes_a_saved_model(name, backend):
    config = ExportConfig(init_checkpoint="a", output_dir="b", format=name)
    if (name, backend) != ("saved_model", "jax"):
        checkpoint_export.check_backend(config, backend)
        return
    with pytest.raises(InputError, match=r"`format` must not be saved_model .*Received: jax\."):
        checkpoint_export.check_backend(config, backend)


def test_an_output_is_missing_or_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert checkpoint_export.check_output(tmp_path / "new") == tmp_path / "new"
    assert checkpoint_export.check_output(tmp_path / "empty") == tmp_path / "empty"
    for name in ("file", "."):
        with pytest.raises(InputError, match="`output_dir` must be missing or empty"):
            checkpoint_export.check_output(tmp_path / name)
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(InputError, match="`output_dir` must not be the current folder"):
        checkpoint_export.check_output("../empty")


@pytest.mark.parametrize(("length", "fits"), [(MAX_SEQ_LENGTH, True), (MAX_SEQ_LENGTH + 1, False)])
def test_lengths_and_vocabularies_fit_the_model(tmp_path, length, fits):
    """The largest that fits, and one more."""
    words = [f"w{number}" for number in range(CONFIG.vocab_size - len(SPECIAL_TOKENS) + (not fits))]
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]) + "\n")
    for settings, message in (
        ({"format": "saved_model", "max_seq_length": length}, "`max_seq_length` must be at most max_pos"),
        ({"vocab_file": str(tmp_path / "vocab.txt")}, "must be at most vocab_size=31"),
    ):
        config = ExportConfig(init_checkpoint="a", output_dir="b", **settings)
        if fits:
            checkpoint_export.check_fits(config, CONFIG)
            continue
        with pytest.raises(InputError, match=message):
            checkpoint_export.check_fits(config, CONFIG)


def test_an_ablation_is_told(tmp_path, capsys):
    config = ablate(CONFIG, "no_attention_mask")
    checkpoint.save_weights(tmp_path / "model", make_engine(config=config).weights(), config)
    assert run_export(init_checkpoint=tmp_path / "model", output_dir=tmp_path / "hf") == 0
    assert "WARNING: this model was trained with --ablation=no_attention_mask" in capsys.readouterr().out
