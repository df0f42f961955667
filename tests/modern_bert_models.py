"""A tiny ModernBERT, and the same model of transformers with random weights."""

import dataclasses

from packs import VOCAB_SIZE
from reference import import_reference
from reference_models import random_reference

from bert_packed.architectures.modern_bert.config import ModernBertConfig

# A local block between two global ones; packs of 24 tokens are five tiles of the window, the last cut short
CONFIG = ModernBertConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=16,
    num_hidden_layers=3,
    global_attn_every_n_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=64,
    local_attention=10,
    global_rope_theta=5000.0,
    local_rope_theta=20.0,
)
BIASES = {
    "as_published": {},
    "all": dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
    "no_decoder_bias": {"decoder_bias": False},
}


def make_reference(config=CONFIG, kind="ModernBertForMaskedLM"):
    """A model of transformers in which every tensor is random, those that start at 0 or 1 too."""
    _, transformers = import_reference()
    given = {k: value for k, value in dataclasses.asdict(config).items() if not k.startswith("ablation")}
    ids = dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep"))
    return random_reference(kind, transformers.ModernBertConfig(**given, **ids))
