"""Exports for Hugging Face open in sentence-transformers and give the vectors of `encode`."""

import dataclasses
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
    assert encoder.packing_factor(TEXTS) > 1 and encoder.count_tokens(TEXTS)[-1] == LENGTH
    theirs = package.SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    want = theirs.encode(TEXTS)
    assert found.shape == want.shape and np.abs(want).max() > 0.1
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()
    assert np.ptp(want, axis=0).max() > 0.1 * np.abs(want).max()  # or all texts would be one
