"""Config of a BERT, in the names of google-research/bert."""

import dataclasses

from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.model_configs.base import ACTIVATIONS, DROPOUT_FIELDS, BaseConfig, check_heads_divide


@dataclasses.dataclass(frozen=True)
class ModelConfig(BaseConfig):
    """The fields of a BERT's `bert_config.json`, with BERT-base as default."""

    vocab_size: int = setting(30522, "WordPieces in the vocabulary", minimum=1)
    hidden_size: int = setting(768, "width of every layer", minimum=1)
    num_hidden_layers: int = setting(12, "encoder blocks", minimum=1)
    num_attention_heads: int = setting(12, "attention heads per block", minimum=1)
    intermediate_size: int = setting(3072, "width inside the feed-forward layer", minimum=1)
    hidden_act: str = setting("gelu", "gelu (exact), gelu_new (tanh) or relu", choices=ACTIVATIONS)
    hidden_dropout_prob: float = setting(0.1, "dropout of embeddings and layers", minimum=0, maximum=0.99)
    attention_probs_dropout_prob: float = setting(0.1, "dropout of attention", minimum=0, maximum=0.99)
    max_position_embeddings: int = setting(512, "longest sequence", minimum=1)
    type_vocab_size: int = setting(2, "sentence types (A and B)", minimum=1)
    initializer_range: float = setting(0.02, "standard deviation of initial weights", minimum=0)
    layer_norm_eps: float = setting(1e-12, "epsilon of layer normalization", minimum=0)
    # Stored with the shape, so that a checkpoint of an experiment can never pass for a sound one
    ablation_no_attention_mask: bool = setting(False, "sequences of a pack see one another")
    ablation_no_position_reset: bool = setting(False, "positions go on through the pack")
    ablation_no_next_sentence: bool = setting(False, "trained without next-sentence loss")

    shape_fields = (*BaseConfig.shape_fields[:2], "num_attention_heads", "vocab_size")
    dropout_fields = tuple((name,) for name in DROPOUT_FIELDS)
    training_fields = (*BaseConfig.training_fields, *DROPOUT_FIELDS)

    def __post_init__(self):
        check_settings(self)
        check_heads_divide(self)

    @classmethod
    def from_json(cls, path, content):
        if content.get("position_embedding_type", "absolute") != "absolute" or content.get("is_decoder"):
            raise InputError(f"{path} must describe an encoder with absolute positions. Received: {content}.")
        return super().from_json(path, content)
