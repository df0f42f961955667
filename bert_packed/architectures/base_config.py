"""Base class of the model configs: fields of any architecture, and how `config.json` becomes one."""

import dataclasses

from bert_packed.core.settings import InputError, setting

ACTIVATIONS = ("gelu", "gelu_new", "relu")
DROPOUT_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
# These limits hold for a `config.json`. A block is many objects of Python: a slip in the number of blocks
# would take all memory before anything knows how large the model is
MOST_BLOCKS, LARGEST_SIZE = 4096, 2**24
LARGEST_FLOAT32 = 3.4028234663852886e38


def size(default, help, minimum=1, maximum=LARGEST_SIZE):
    """A setting that is a number of units, tokens or blocks."""
    return setting(default, help, minimum=minimum, maximum=maximum)


def real(default, help, minimum=0, maximum=LARGEST_FLOAT32):
    """A setting that a model computes with in float32."""
    return setting(default, help, minimum=minimum, maximum=maximum)


class BaseConfig:
    """Fields that other code may read of any model's config; a field of the dataclass overrides them.

    Attributes:
        shape_fields: Fields that a JSON file must have. Without them any JSON object would be a model.
        fixed: Pairs of a name in a JSON file and the only value that this model computes. It may be missing;
            false, [] and None may be null, too.
        training_fields: Fields that may differ from those of the checkpoint that a model starts from.
        reported_fields: Fields of these that a start names where they differ.
        max_position_embeddings: Longest sequence; None for any length.
        type_vocab_size: Sentence types; None where they are not read.
        dropout_fields: Fields that each of `DROPOUT_FIELDS` sets, in their order; () without dropout.
        without_attention: Description of how tokens mix where the model has no attention; else "".
        block_weights: Weights in the matrices of a block, nearly all that it has; 0 where not known.
        kernels: Options of its model that a fused kernel may compute; `attend` only where it attends.
        chunk_size: Tokens that a scan computes at once, which changes roundings alone; None without a scan.
    """

    shape_fields = ("hidden_size", "num_hidden_layers", "vocab_size")
    fixed = (("quantization_config", None),)
    training_fields = ("initializer_range",)
    reported_fields = ()
    max_position_embeddings = type_vocab_size = None
    dropout_fields = ()
    without_attention = ""
    block_weights = 0
    kernels = ("attend",)
    chunk_size = None
    ablation_no_attention_mask = ablation_no_position_reset = ablation_no_next_sentence = False

    @property
    def weight_bytes(self):
        """Bytes of the weights of blocks and embeddings in float32; no model has fewer."""
        return 4 * (self.vocab_size * self.hidden_size + self.num_hidden_layers * self.block_weights)

    @classmethod
    def from_json(cls, path, content):
        """The config of a JSON object; `InputError` for what this model cannot compute."""
        for name, value in cls.fixed:
            found = content.get(name, value)
            if found != value and (found is not None or value):
                raise InputError(f"{path}: {name} must be {value}. Received: {content[name]!s:.100}.")
        missing = [name for name in cls.shape_fields if name not in content]
        if missing:
            raise InputError(f"{path} must have {', '.join(cls.shape_fields)}. Received: no {missing[0]}.")
        try:
            return cls(**{name: value for name, value in content.items() if name in field_names(cls)})
        except InputError as error:
            raise InputError(f"{path}: {error}") from error


def check_heads_divide(config):
    if config.hidden_size % config.num_attention_heads:
        raise InputError(
            "`num_attention_heads` must divide `hidden_size`. Received: "
            f"num_attention_heads={config.num_attention_heads}, hidden_size={config.hidden_size}."
        )


def field_names(config):
    return {field.name for field in dataclasses.fields(config)}
