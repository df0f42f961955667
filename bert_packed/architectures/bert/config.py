"""Config of a BERT, in the names of google-research/bert."""

import dataclasses

from bert_packed.architectures.base_config import (
    ACTIVATIONS,
    DROPOUT_FIELDS,
    MOST_BLOCKS,
    BaseConfig,
    check_heads_divide,
    real,
    size,
)
from bert_packed.core.settings import check_settings, setting


@dataclasses.dataclass(frozen=True)
class ModelConfig(BaseConfig):
    """The fields of a BERT's `bert_config.json`, with BERT-base as default."""

    vocab_size: int = size(30522, "WordPieces in the vocabulary")
    hidden_size: int = size(768, "width of every layer")
    num_hidden_layers: int = size(12, "encoder blocks", maximum=MOST_BLOCKS)
    num_attention_heads: int = size(12, "attention heads per block")
    intermediate_size: int = size(3072, "width inside the feed-forward layer")
    hidden_act: str = setting("gelu", "gelu (exact), gelu_new (tanh) or relu", choices=ACTIVATIONS)
    hidden_dropout_prob: float = setting(0.1, "dropout of embeddings and layers", maximum=0.99)
    attention_probs_dropout_prob: float = setting(0.1, "dropout of attention", maximum=0.99)
    max_position_embeddings: int = size(512, "longest sequence")
    type_vocab_size: int = size(2, "sentence types (A and B)")
    initializer_range: float = real(0.02, "standard deviation of initial weights")
    layer_norm_eps: float = real(1e-12, "epsilon of layer normalization")
    # Stored with the shape, so that a checkpoint of an experiment can never pass for a sound one
    ablation_no_attention_mask: bool = setting(False, "sequences of a pack see one another")
    ablation_no_position_reset: bool = setting(False, "positions go on through the pack")
    ablation_no_next_sentence: bool = setting(False, "trained without next-sentence loss")

    shape_fields = (*BaseConfig.shape_fields[:2], "num_attention_heads", "vocab_size")
    fixed = (*BaseConfig.fixed, ("position_embedding_type", "absolute"), ("is_decoder", False))
    dropout_fields = tuple((name,) for name in DROPOUT_FIELDS)
    training_fields = (*BaseConfig.training_fields, *DROPOUT_FIELDS)

    def __post_init__(self):
        check_settings(self)
        check_heads_divide(self)

    @property
    def block_weights(self):
        return 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self):
        num_rows = self.max_position_embeddings + self.type_vocab_size
        return super().weight_bytes + 4 * num_rows * self.hidden_size


def _size(num_hidden_layers, hidden_size):
    return ModelConfig(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
    )


# Turc et al. 2019, Table 1 (tiny to medium); Devlin et al. 2019, Section 3 (base, large)
SIZES = {
    "bert-tiny": _size(2, 128),
    "bert-mini": _size(4, 256),
    "bert-small": _size(4, 512),
    "bert-medium": _size(8, 512),
    "bert-base": _size(12, 768),
    "bert-large": _size(24, 1024),
}
