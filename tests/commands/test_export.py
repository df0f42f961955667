"""The command that exports: tokenizers, what it leaves out and what it refuses, of a BERT and of a Mamba.

`tests/checkpoints/test_heads.py` compares what other programs compute from it.
"""

import dataclasses
import json

import keras
import numpy as np
import pytest
from checkpoint_cases import MAMBA, draw_packs, make_batch, make_model, write_model
from exports import assert_close, run_export
from local_hub import TOKEN, point_to, serve
from recorded_calls import assert_refused, run
from reference import import_reference
from safetensors.numpy import load_file, save_file
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING, ablate
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.runs import checkpoint_export
from bert_packed.runs.checkpoint_export import ExportConfig, export_checkpoint
from bert_packed.schema import CAUSAL_LM
from bert_packed.text import byte_bpe
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.both_backends
needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a SavedModel is written by the TensorFlow backend"
)


def test_what_was_never_trained_is_not_exported(tmp_path):
    folder = write_model(tmp_path / "bare", make_model("bert"), "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: values for name, values in tensors.items() if name.startswith("bert.")}
    save_file(tensors, folder / "model.safetensors")
    assert run_export(init_checkpoint=folder, output_dir=tmp_path / "hf") == 0
    weights = named_weights(build_model(PRETRAINING, CONFIG, seed=1))
    found = starting_weights.load(tmp_path / "hf", weights, CONFIG)
    assert (found.num_used, len(found.missing)) == (len(tensors), 7)


def test_a_model_of_the_hub_is_pushed_to_another_name(models, tmp_path, monkeypatch, capsys):
    with serve() as (hub, url):
        point_to(monkeypatch, url, tmp_path / "cache")
        hub.add("owner/bert", models / "hf")
        flags = {"init_checkpoint": "owner/bert", "push_to_hub": "owner/new"}
        assert run_export(**flags, output_dir=tmp_path / "refused") == 2  # no token
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert run_export(**flags, output_dir=tmp_path / "pushed") == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert "`push_to_hub` must be OWNER/NAME of a repository" in line
    for folder in ("refused", "pushed"):
        found = {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        assert found == hub.uploads["owner/new"] and "model.safetensors" in found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Output directories of runs of a BERT and of a Mamba, and files that do not fit them: their folder."""
    folder = tmp_path_factory.mktemp("models")
    checkpoint.save_weights(folder / "bert" / "checkpoint-2", make_engine().weights(), CONFIG)
    mamba = build_model(CAUSAL_LM, MAMBA, seed=1)
    checkpoint.save_weights(folder / "mamba" / "checkpoint-2", named_weights(mamba), MAMBA)
    (folder / "broken.json").write_text("{")
    write_model(folder / "hf", make_model("bert"), "hf")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "pack", "##ed", "cafe"]) + "\n")
    return folder


def test_a_mamba_has_the_ids_of_its_word_pieces(models, tmp_path):
    flags = {"vocab_file": models / "vocab.txt", "output_dir": tmp_path / "hf"}
    assert run_export(init_checkpoint=models / "mamba", **flags) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (2, 3)


MISTAKES = [
    ("bert", {"push_to_hub": "mine"}, "`push_to_hub` must be OWNER/NAME. Received: mine."),
    ("bert", {"audit_file": "none.json"}, "none.json must be JSON"),
    ("mamba", {"vocab_file": "{models}/broken.json"}, "`vocab_file` must be a tokenizer.json"),
    (
        "mamba",
        {"init_checkpoint": "{models}/hf", "bert_config_file": "mamba-tiny"},
        "must be mamba. Received: bert.",
    ),
    pytest.param(
        "mamba",
        {"format": "saved_model", "max_predictions_per_pack": 76},
        "`max_predictions_per_pack` must be left out for this Mamba, whose SavedModel has no input of that",
        marks=needs_tensorflow,
    ),
]


@pytest.mark.parametrize(("model", "changes", "message"), MISTAKES)
def test_a_mistake_is_one_line(models, tmp_path, model, changes, message):
    changes = {name: str(value).format(models=models) for name, value in changes.items()}
    flags = {"init_checkpoint": models / model, "output_dir": tmp_path / "new", **changes}
    assert_refused(export_checkpoint, ExportConfig, message, **flags)
    assert not list(tmp_path.iterdir())


def test_jax_writes_no_saved_model(models, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_export, "choose_backend", lambda: "jax")
    flags = {"init_checkpoint": models / "bert", "output_dir": tmp_path / "new", "format": "saved_model"}
    message = "`format` must not be saved_model unless KERAS_BACKEND=tensorflow. Received: jax."
    assert_refused(export_checkpoint, ExportConfig, message, **flags)


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


def test_an_ablation_is_told(tmp_path):
    config = ablate(CONFIG, "no_attention_mask")
    checkpoint.save_weights(tmp_path / "model", make_engine(config=config).weights(), config)
    flags = {"init_checkpoint": tmp_path / "model", "output_dir": tmp_path / "hf"}
    seen = run(export_checkpoint, ExportConfig, **flags)
    assert seen.status == 0
    assert "WARNING: this model was trained with --ablation=no_attention_mask" in seen.out


def test_tokenizer_of_bytes(tmp_path):
    _, transformers = import_reference()
    trained = byte_bpe.train([["packs of packs", "packed states"]], 262)
    byte_bpe.save(trained, str(tmp_path / "bpe.json"))
    roomy = dataclasses.replace(
        MAMBA, vocab_size=300, time_step_rank=0
    )  # for every byte; a rank of its width
    checkpoint.save_weights(tmp_path / "ours", named_weights(build_model(CAUSAL_LM, roomy, seed=1)), roomy)
    flags = {"init_checkpoint": tmp_path / "ours", "output_dir": tmp_path / "hf"}
    assert run_export(**flags, vocab_file=tmp_path / "bpe.json") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Packed states, naïvely\n"
    assert tokenizer(text)["input_ids"] == trained.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["bos_token_id"] == config["eos_token_id"] == tokenizer.eos_token_id == 0
    assert (config["time_step_rank"], config["pad_token_id"]) == (1, 0)


@pytest.mark.slow
@needs_tensorflow
def test_saved_model_of_a_mamba(tmp_path):
    import tensorflow as tf

    model, packs = make_model("mamba"), [[one.tokens for one in pack] for pack in draw_packs()]
    write_model(tmp_path / "ours", model, "ours")
    batch, length = make_batch(CAUSAL_LM), MAX_SEQ_LENGTH
    logits = np.asarray(model(batch)["logits"])
    flags = {"init_checkpoint": tmp_path / "ours", "output_dir": tmp_path / "saved", "format": "saved_model"}
    assert run_export(**flags, batch_size=len(packs), max_seq_length=length) == 0
    signatures = tf.saved_model.load(str(tmp_path / "saved")).signatures
    inputs = signatures["packed"].structured_input_signature[1]
    assert inputs.keys() == {"token_ids", "position_ids"}
    assert all(spec.shape.is_fully_defined() for spec in inputs.values())
    got = signatures["packed"](**{name: tf.constant(batch[name]) for name in inputs})
    assert_close(got["logits"], logits)
    assert got["hidden_states"].shape == (len(packs), length, MAMBA.hidden_size)
    # The second sequence of each pack that has one, in a separate row
    rows = {row: len(pack[1]) for row, pack in enumerate(packs) if len(pack) > 1}
    feeds = {name: np.zeros((len(packs), length), np.int32) for name in ("input_ids", "input_mask")}
    for row, size in rows.items():
        feeds["input_ids"][row, :size], feeds["input_mask"][row, :size] = packs[row][1], 1
    for signature in ("unpacked", "serving_default"):
        got = signatures[signature](**{name: tf.constant(values) for name, values in feeds.items()})
        for row, size in rows.items():
            assert_close(got["logits"][row, :size], logits[row][batch["sequence_ids"][row] == 2])
