"""A tiny ModernBERT."""

from packs import VOCAB_SIZE

from bert_packed.architectures.modern_bert.config import ModernBertConfig

# A local block is between two global ones; packs of 24 tokens are five tiles of the window, the last cut
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
