"""Exports for Hugging Face open in sentence-transformers and give the vectors of `encode`."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import tiny
from byte_tokenizers import LINES, TOKENIZERS
from encoder_files import WORDS
from exports import run_export
from modern_bert_models import CONFIG as MODERN_BERT
from reference import import_reference

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM
from bert_packed.checkpoints import checkpoint
from bert_packed.checkpoints.sentence_transformers import (
    CONFIG_FILE,
    LENGTH_FILE,
    MODULES_FILE,
    VectorSettings,
    read_settings,
    write_settings,
)
from bert_packed.core.settings import InputError
from bert_packed.evaluation import inference
from bert_packed.text import byte_bpe
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

TEXTS = [*LINES, "Packs of cats.", " ".join(LINES) * 2]  # the last is longer than a model reads
LENGTH = 64
MODELS = {
    "bert": dataclasses.replace(tiny.CONFIG, max_position_embeddings=LENGTH),
    **dict.fromkeys(
        TOKENIZERS,
        dataclasses.replace(
            MODERN_BERT, vocab_size=336, max_position_embeddings=LENGTH, initializer_range=0.3
        ),
    ),
}


def write_vocabulary(name, folder):
    if name in TOKENIZERS:
        byte_bpe.save(TOKENIZERS[name](), folder / "tokenizer.json")
        return folder / "tokenizer.json"
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return folder / "vocab.txt"


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_encode(name, tmp_path):
    import_reference()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        package = pytest.importorskip("sentence_transformers", reason="pip install -e '.[reference]'")
    config = MODELS[name]
    model = build_model(MASKED_LM, config, seed=0)
    checkpoint.save_weights(tmp_path / "ours", named_weights(model), config)
    flags = {"init_checkpoint": tmp_path / "ours", "vocab_file": write_vocabulary(name, tmp_path)}
    assert run_export(**flags, output_dir=tmp_path / "hf", format="hf") == 0
    encoder = inference.load_encoder(tmp_path / "hf", batch_size=2)
    found = encoder.encode(TEXTS)
    assert encoder.packing_factor(TEXTS) > 1 and len(encoder.encode(TEXTS[-1:], "none")[0]) == LENGTH
    theirs = package.SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    want = theirs.encode(TEXTS)
    assert found.shape == want.shape and np.abs(want).max() > 0.1
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()
    assert np.ptp(want, axis=0).max() > 0.1 * np.abs(want).max()  # or all texts would be one


def modules(*types, path=""):
    return [{"type": kind, "path": path if number == 0 else "1_Pooling"} for number, kind in enumerate(types)]


TYPES = [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling")]
ONLY = "modules.json must have Transformer, Pooling and at most Normalize. Received: "
POOLING = "1_Pooling/config.json"
OTHERS = [
    (MODULES_FILE, modules(*TYPES, "sentence_transformers.models.Dense"), f"{ONLY}Transformer, Pooling, D"),
    (MODULES_FILE, modules("custom_st.Transformer", TYPES[1]), f"{ONLY}custom_st.Transformer, Pooling."),
    (MODULES_FILE, modules(TYPES[0]), f"{ONLY}Transformer."),
    (MODULES_FILE, [], f"{ONLY}none."),
    (MODULES_FILE, modules(*TYPES, path="0_Transformer"), "in the folder itself. Received: 0_Transformer."),
    (POOLING, {"pooling_mode": "max"}, "must pool by mean or cls. Received: max."),
    (POOLING, {"pooling_mode": ["cls", "mean"]}, "must pool by mean or cls. Received: cls and mean."),
    (
        POOLING,
        {"pooling_mode_mean_tokens": True, "pooling_mode_weightedmean_tokens": True},
        "Received: mean and pooling_mode_weightedmean_tokens.",
    ),
    (POOLING, {}, "Received: nothing."),
    (POOLING, {"pooling_mode": "cls", "include_prompt": False}, "must have include_prompt"),
    (LENGTH_FILE, {"max_seq_length": 0}, "max_seq_length must be whole. Received: 0."),
    (LENGTH_FILE, {"do_lower_case": True}, "`do_lower_case` must be true, and the tokens WordPieces, by "),
    (LENGTH_FILE, {"processing_kwargs": {"text": {"padding": 8}}}, "processing_kwargs must be left out."),
    (
        LENGTH_FILE,
        {"modality_config": {"text": {"method_output_name": "pooler_output"}}},
        "method_output_name must be last_hidden_state. Received: pooler_output.",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), OTHERS)
def test_a_folder_with_other_vectors_is_refused(tmp_path, name, content, message):
    """By what it has; the cased vocabulary is a folder's that lower-cases texts before it."""
    write_settings(tmp_path, VectorSettings(prompts={"query": "w1"}), 16)
    assert read_settings(tmp_path, False).prompts == {"query": "w1"}
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        read_settings(tmp_path, False)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_newer_settings_of_a_folder_are_read(tmp_path):
    """As version 6 writes them: settings of the transformer, and a pooling by its name."""
    write_settings(tmp_path, VectorSettings(), 16)
    newer = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }
    for path, content in {LENGTH_FILE: newer, POOLING: {"pooling_mode": "cls"}, CONFIG_FILE: {}}.items():
        (tmp_path / path).write_text(json.dumps(content))
    assert read_settings(tmp_path, False) == VectorSettings("cls")
