"""Config of a ModernBERT, in Hugging Face's names."""

import dataclasses

from bert_packed.architectures.base_config import (
    ACTIVATIONS,
    MOST_BLOCKS,
    BaseConfig,
    check_heads_divide,
    field_names,
    real,
    size,
)
from bert_packed.core.settings import InputError, check_settings, setting

POOLINGS = ("cls", "mean")
# Kinds of attention by Hugging Face's name
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
_THETAS = {FULL_ATTENTION: "global_rope_theta", SLIDING_ATTENTION: "local_rope_theta"}


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(BaseConfig):
    """The fields of a ModernBERT's `config.json`, with ModernBERT-base as default."""

    vocab_size: int = size(50368, "tokens in the vocabulary")
    hidden_size: int = size(768, "width of every layer")
    num_hidden_layers: int = size(22, "encoder blocks", maximum=MOST_BLOCKS)
    num_attention_heads: int = size(12, "attention heads per block")
    intermediate_size: int = size(1152, "width inside the feed-forward layer")
    hidden_activation: str = setting(
        "gelu", "of the gates: gelu (exact), gelu_new (tanh) or relu", choices=ACTIVATIONS
    )
    max_position_embeddings: int = size(8192, "longest sequence")
    global_attn_every_n_layers: int = size(3, "global attention in the first of every n blocks")
    local_attention: int = size(
        128, "width of the window of all other blocks; half of it, rounded down, on each side"
    )
    global_rope_theta: float = real(160000.0, "base of the rotary angles of global blocks", minimum=1)
    local_rope_theta: float = real(10000.0, "base of the rotary angles of local blocks", minimum=1)
    embedding_dropout: float = setting(0.0, "dropout of embeddings", maximum=0.99)
    attention_dropout: float = setting(0.0, "dropout of attention and its result", maximum=0.99)
    mlp_dropout: float = setting(0.0, "dropout inside the feed-forward layer", maximum=0.99)
    attention_bias: bool = setting(False, "biases of attention")
    mlp_bias: bool = setting(False, "biases of the feed-forward layer")
    norm_bias: bool = setting(False, "biases of the norms")
    norm_eps: float = real(1e-5, "epsilon of the norms")
    decoder_bias: bool = setting(True, "bias of the vocabulary's logits")
    classifier_bias: bool = setting(False, "bias of the head's first layer")
    classifier_activation: str = setting("gelu", "of the head, as hidden_activation", choices=ACTIVATIONS)
    classifier_pooling: str = setting(
        "mean", "what is classified of a sequence: cls, its first state, or their mean", choices=POOLINGS
    )
    classifier_dropout: float = setting(0.0, "dropout before the classifier", maximum=0.99)
    initializer_range: float = real(0.02, "standard deviation of initial weights")
    initializer_cutoff_factor: float = setting(
        2.0, "standard deviations at which initial weights are cut off", minimum=0.01, maximum=5
    )
    ablation_no_attention_mask: bool = setting(False, "sequences of a pack see one another")
    ablation_no_position_reset: bool = setting(False, "positions go on through the pack")

    shape_fields = (*BaseConfig.shape_fields[:2], "num_attention_heads", "vocab_size")
    fixed = (*BaseConfig.fixed, ("tie_word_embeddings", True), ("rope_scaling", None))
    dropout_fields = (("embedding_dropout", "mlp_dropout", "classifier_dropout"), ("attention_dropout",))
    # Contexts are extended by larger angles and lengths than a checkpoint was trained with
    reported_fields = ("max_position_embeddings", "global_rope_theta", "local_rope_theta")
    training_fields = (
        *BaseConfig.training_fields,
        *("initializer_cutoff_factor", *dropout_fields[0], *dropout_fields[1]),
        *("classifier_pooling", *reported_fields),
    )

    def __post_init__(self):
        check_settings(self)
        check_heads_divide(self)
        if self.hidden_size // self.num_attention_heads % 2:
            raise InputError(
                "`num_attention_heads` must divide `hidden_size` into even widths. Received: "
                f"num_attention_heads={self.num_attention_heads}, hidden_size={self.hidden_size}."
            )

    @property
    def block_weights(self):
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size

    @property
    def window(self):
        """Tokens on each side that a token of a local block attends to."""
        return self.local_attention // 2

    @property
    def layer_types(self):
        """The kind of attention of each block: list of str."""
        every = self.global_attn_every_n_layers
        return [
            SLIDING_ATTENTION if number % every else FULL_ATTENTION
            for number in range(self.num_hidden_layers)
        ]

    @classmethod
    def from_json(cls, path, content):
        # transformers takes the first state where the field is missing
        found = {"classifier_pooling": "cls"}
        found |= {name: content[name] for name in field_names(cls) if name in content}
        if found.get("initializer_cutoff_factor", 0) is None:
            found["initializer_cutoff_factor"] = 3.0  # as in transformers
        # transformers 5 writes these two in the place of three numbers
        angles, layer_types = content.get("rope_parameters") or {}, content.get("layer_types")
        if not isinstance(angles, dict) or not all(map(_is_plain, angles, angles.values())):
            raise InputError(
                f"{path}: rope_parameters must give {' and '.join(_THETAS)} a rope_type of default and a "
                f"rope_theta, and nothing else. Received: {angles!r:.200}."
            )
        for kind, given in angles.items():
            if "rope_theta" in given:
                found[_THETAS[kind]] = given["rope_theta"]
        config = super().from_json(path, {**content, **found})
        if layer_types in (None, config.layer_types):
            return config
        for number in range(1, config.num_hidden_layers + 1):
            other = dataclasses.replace(config, global_attn_every_n_layers=number)
            if layer_types == other.layer_types:
                return other
        raise InputError(
            f"{path}: layer_types must be {FULL_ATTENTION} in the first and then in every n-th layer, "
            f"{SLIDING_ATTENTION} in all others. Received: {layer_types!r:.100}."
        )


def _is_plain(kind, angles):
    """True for an entry of `rope_parameters` that gives a kind of attention no more than a base of angles."""
    is_default = isinstance(angles, dict) and angles.get("rope_type", "default") == "default"
    return kind in _THETAS and is_default and not angles.keys() - {"rope_type", "rope_theta"}


def _size(num_hidden_layers, hidden_size, intermediate_size):
    return ModernBertConfig(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        intermediate_size=intermediate_size,
    )


# Warner et al. 2024, Table 4; the tiny ones are ours
SIZES = {
    "modernbert-tiny": _size(3, 128, 192),
    "modernbert-mini": _size(6, 256, 384),
    "modernbert-base": _size(22, 768, 1152),
    "modernbert-large": _size(28, 1024, 2624),
}
