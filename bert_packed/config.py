"""Configs of models, their published sizes and ablations, and the registry of architectures; no Keras.

Fields have the names of google-research/bert where it has one, and Hugging Face's for other architectures.
"""

import dataclasses
import importlib
from pathlib import Path

from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.core.storage import read_json
from bert_packed.schema import CAUSAL_LM, MLM, MLM_NSP

FLOAT32, MIXED = "float32", "mixed_bfloat16"
DTYPES = (FLOAT32, MIXED)
AUTO = "auto"  # `--dtype=auto`, see `run_directory.as_begun`
# The smallest epsilon of an optimizer: the gradient of a token that no step has seen is 0, and 0 / 0 would be
# NaN. Smaller numbers are 0 in float32
LEAST_EPSILON = 1e-30
ATTENTIONS = ("auto", "dense", "flash")
WEIGHTINGS = ("per_sequence", "per_token")  # of predictions in a loss
POOLINGS = ("cls", "mean")
ACTIVATIONS = ("gelu", "gelu_new", "relu")
DROPOUT_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
# Heads of models: masked tokens and next sentences, masked tokens alone, answer spans, a label for each
# sequence, a label for each token; and `CAUSAL_LM`, that of every next token
PRETRAINING, MASKED_LM, QUESTION_ANSWERING, CLASSIFICATION, TOKEN_CLASSIFICATION = (
    "pretraining",
    "masked_lm",
    "question_answering",
    "classification",
    "token_classification",
)
FINETUNING_HEADS = (QUESTION_ANSWERING, CLASSIFICATION, TOKEN_CLASSIFICATION)
OBJECTIVE_HEADS = {MLM_NSP: PRETRAINING, MLM: MASKED_LM, CAUSAL_LM: CAUSAL_LM}  # by `--objective`


class BaseConfig:
    """Fields that other code may read of any model's config; a field of the dataclass overrides them.

    Attributes:
        shape_fields: Fields that a JSON file must have. Without them any JSON object would be a model.
        training_fields: Fields that may differ from those of the checkpoint that a model starts from.
        max_position_embeddings: Longest sequence; None for any length.
        type_vocab_size: Sentence types; None where they are not read.
        dropout_fields: Fields that each of `DROPOUT_FIELDS` sets, in their order; () without dropout.
        without_attention: Description of how tokens mix where the model has no attention; else "".
    """

    shape_fields = ("hidden_size", "num_hidden_layers", "vocab_size")
    training_fields = ("initializer_range",)
    max_position_embeddings = type_vocab_size = None
    dropout_fields = ()
    without_attention = ""
    ablation_no_attention_mask = ablation_no_position_reset = ablation_no_next_sentence = False

    @classmethod
    def from_json(cls, path, content):
        """The config of a JSON object; `InputError` for what this model cannot compute."""
        missing = [name for name in cls.shape_fields if name not in content]
        if missing:
            raise InputError(f"{path} must have {', '.join(cls.shape_fields)}. Received: no {missing[0]}.")
        try:
            return cls(**{name: value for name, value in content.items() if name in _field_names(cls)})
        except InputError as error:
            raise InputError(f"{path}: {error}") from error


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
        _check_heads_divide(self)

    @classmethod
    def from_json(cls, path, content):
        if content.get("position_embedding_type", "absolute") != "absolute" or content.get("is_decoder"):
            raise InputError(f"{path} must describe an encoder with absolute positions. Received: {content}.")
        return super().from_json(path, content)


@dataclasses.dataclass(frozen=True)
class MambaConfig(BaseConfig):
    """The fields of a Mamba's `config.json`. Sequences may have any length, and there is no dropout."""

    vocab_size: int = setting(50280, "tokens in the vocabulary", minimum=1)
    hidden_size: int = setting(768, "width of every layer", minimum=1)
    num_hidden_layers: int = setting(32, "Mamba blocks", minimum=1)
    state_size: int = setting(16, "states of a channel", minimum=1)
    expand: int = setting(2, "inner width, of the width", minimum=1)
    conv_kernel: int = setting(4, "taps of the convolution", minimum=2)
    time_step_rank: int = setting(0, "rank of the step sizes; 0 = hidden_size / 16, rounded up", minimum=0)
    use_bias: bool = setting(False, "biases of the input and output projections")
    use_conv_bias: bool = setting(True, "bias of the convolution")
    initializer_range: float = setting(0.02, "standard deviation of initial embeddings", minimum=0)
    layer_norm_epsilon: float = setting(1e-5, "epsilon of the norms", minimum=0)
    time_step_min: float = setting(0.001, "least initial step size", minimum=1e-9)
    time_step_max: float = setting(0.1, "largest initial step size", minimum=1e-9)
    time_step_floor: float = setting(1e-4, "no initial step size is below it", minimum=1e-9)
    ablation_no_position_reset: bool = setting(False, "states and convolution go on through the pack")

    without_attention = "states go from token to token"
    # The rank shows in shapes: 0 and the number that it means are one
    training_fields = (
        *BaseConfig.training_fields,
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
    )

    def __post_init__(self):
        check_settings(self)
        if self.time_step_min > self.time_step_max:
            raise InputError(
                "`time_step_min` must be at most time_step_max. Received: "
                f"time_step_min={self.time_step_min}, time_step_max={self.time_step_max}."
            )

    @property
    def inner_size(self):
        """E, channels of convolution and scan."""
        return self.expand * self.hidden_size

    @property
    def step_rank(self):
        """L, rank of the step sizes."""
        return self.time_step_rank or -(-self.hidden_size // 16)

    @classmethod
    def from_json(cls, path, content):
        wanted = {"hidden_act": "silu", "tie_word_embeddings": True, "residual_in_fp32": True}
        for name, value in wanted.items():
            if content.get(name, value) != value:
                raise InputError(f"{path}: {name} must be {value}. Received: {content[name]}.")
        rank = content.get("time_step_rank", 0)
        config = super().from_json(path, {**content, "time_step_rank": 0 if rank == "auto" else rank})
        inner = content.get("intermediate_size")
        if inner not in (None, config.inner_size):
            raise InputError(
                f"{path}: intermediate_size must be expand times hidden_size, {config.inner_size}. "
                f"Received: {inner}."
            )
        return config


# Kinds of attention by Hugging Face's name
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
_THETAS = {FULL_ATTENTION: "global_rope_theta", SLIDING_ATTENTION: "local_rope_theta"}


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(BaseConfig):
    """The fields of a ModernBERT's `config.json`, with ModernBERT-base as default."""

    vocab_size: int = setting(50368, "tokens in the vocabulary", minimum=1)
    hidden_size: int = setting(768, "width of every layer", minimum=1)
    num_hidden_layers: int = setting(22, "encoder blocks", minimum=1)
    num_attention_heads: int = setting(12, "attention heads per block", minimum=1)
    intermediate_size: int = setting(1152, "width inside the feed-forward layer", minimum=1)
    hidden_activation: str = setting(
        "gelu", "of the gates: gelu (exact), gelu_new (tanh) or relu", choices=ACTIVATIONS
    )
    max_position_embeddings: int = setting(8192, "longest sequence", minimum=1)
    global_attn_every_n_layers: int = setting(3, "global attention in the first of every n blocks", minimum=1)
    local_attention: int = setting(
        128, "width of the window of all other blocks; half of it, rounded down, on each side", minimum=1
    )
    global_rope_theta: float = setting(160000.0, "base of the rotary angles of global blocks", minimum=1)
    local_rope_theta: float = setting(10000.0, "base of the rotary angles of local blocks", minimum=1)
    embedding_dropout: float = setting(0.0, "dropout of embeddings", minimum=0, maximum=0.99)
    attention_dropout: float = setting(0.0, "dropout of attention and its result", minimum=0, maximum=0.99)
    mlp_dropout: float = setting(0.0, "dropout inside the feed-forward layer", minimum=0, maximum=0.99)
    attention_bias: bool = setting(False, "biases of attention")
    mlp_bias: bool = setting(False, "biases of the feed-forward layer")
    norm_bias: bool = setting(False, "biases of the norms")
    norm_eps: float = setting(1e-5, "epsilon of the norms", minimum=0)
    decoder_bias: bool = setting(True, "bias of the vocabulary's logits")
    classifier_bias: bool = setting(False, "bias of the head's first layer")
    classifier_activation: str = setting("gelu", "of the head, as hidden_activation", choices=ACTIVATIONS)
    classifier_pooling: str = setting(
        "mean", "what is classified of a sequence: cls, its first state, or their mean", choices=POOLINGS
    )
    classifier_dropout: float = setting(0.0, "dropout before the classifier", minimum=0, maximum=0.99)
    initializer_range: float = setting(0.02, "standard deviation of initial weights", minimum=0)
    initializer_cutoff_factor: float = setting(
        2.0, "standard deviations at which initial weights are cut off", minimum=0.01, maximum=5
    )
    ablation_no_attention_mask: bool = setting(False, "sequences of a pack see one another")
    ablation_no_position_reset: bool = setting(False, "positions go on through the pack")

    shape_fields = (*BaseConfig.shape_fields[:2], "num_attention_heads", "vocab_size")
    dropout_fields = (("embedding_dropout", "mlp_dropout", "classifier_dropout"), ("attention_dropout",))
    # Contexts are extended by larger angles and lengths than a checkpoint was trained with
    training_fields = (
        *BaseConfig.training_fields,
        *("initializer_cutoff_factor", *dropout_fields[0], *dropout_fields[1]),
        *("max_position_embeddings", "global_rope_theta", "local_rope_theta", "classifier_pooling"),
    )

    def __post_init__(self):
        check_settings(self)
        _check_heads_divide(self)
        if self.hidden_size // self.num_attention_heads % 2:
            raise InputError(
                "`num_attention_heads` must divide `hidden_size` into even widths. Received: "
                f"num_attention_heads={self.num_attention_heads}, hidden_size={self.hidden_size}."
            )

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
        wanted = {"tie_word_embeddings": True, "rope_scaling": None}
        for name, value in wanted.items():
            if content.get(name, value) != value:
                raise InputError(f"{path}: {name} must be {value}. Received: {content[name]}.")
        # Without the field transformers takes the first state
        found = {"classifier_pooling": "cls"}
        found |= {name: content[name] for name in _field_names(cls) if name in content}
        if found.get("initializer_cutoff_factor", 0) is None:
            found["initializer_cutoff_factor"] = 3.0  # as in transformers
        # transformers 5 writes these two in the place of three numbers
        angles, layer_types = content.get("rope_parameters") or {}, content.get("layer_types")
        for kind, given in angles.items():
            is_plain = isinstance(given, dict) and given.get("rope_type", "default") == "default"
            if kind not in _THETAS or not is_plain or given.keys() - {"rope_type", "rope_theta"}:
                raise InputError(
                    f"{path}: rope_parameters must give {' and '.join(_THETAS)} a rope_type of default and a "
                    f"rope_theta, and nothing else. Received: {angles}."
                )
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


def _check_heads_divide(config):
    if config.hidden_size % config.num_attention_heads:
        raise InputError(
            "`num_attention_heads` must divide `hidden_size`. Received: "
            f"num_attention_heads={config.num_attention_heads}, hidden_size={config.hidden_size}."
        )


def _bert(num_hidden_layers, hidden_size):
    return ModelConfig(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
    )


def _modern_bert(num_hidden_layers, hidden_size, intermediate_size):
    return ModernBertConfig(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        intermediate_size=intermediate_size,
    )


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """One architecture, as all code outside its own files knows it.

    Attributes:
        heads: Heads that its models may have. A checkpoint without any counts as having the first.
        models: Module that needs Keras: `make_model(head, config, num_outputs, **encoder)` gives a
            `PackedModel`, `count_flops(head, config, sums)` the operations to learn from sequences.
        names: Module with `NAMES`, a `CheckpointNames`.
    """

    name: str  # as in "a BERT"
    config_class: type
    sizes: dict[str, BaseConfig]
    heads: tuple[str, ...]
    models: str
    names: str

    def load_models(self):
        """The module `models`, imported when it is first needed."""
        return importlib.import_module(self.models)

    def load_names(self):
        """The `CheckpointNames` of the module `names`."""
        return importlib.import_module(self.names).NAMES


# By the `model_type` of `config.json`
FAMILIES = {
    "bert": ModelFamily(
        "BERT",
        ModelConfig,
        {  # Turc et al. 2019, Table 1 (tiny to medium); Devlin et al. 2019, Section 3 (base, large)
            "bert-tiny": _bert(2, 128),
            "bert-mini": _bert(4, 256),
            "bert-small": _bert(4, 512),
            "bert-medium": _bert(8, 512),
            "bert-base": _bert(12, 768),
            "bert-large": _bert(24, 1024),
        },
        (PRETRAINING, MASKED_LM, QUESTION_ANSWERING, TOKEN_CLASSIFICATION, CLASSIFICATION),
        "bert_packed.models.heads",
        "bert_packed.checkpoints.bert_names",
    ),
    "mamba": ModelFamily(
        "Mamba",
        MambaConfig,
        {  # "PackMamba", Section 4; the tiny ones are ours
            "mamba-tiny": MambaConfig(num_hidden_layers=2, hidden_size=128),
            "mamba-mini": MambaConfig(num_hidden_layers=4, hidden_size=256),
            "mamba-110m": MambaConfig(num_hidden_layers=16, hidden_size=1024),
            "mamba-1.4b": MambaConfig(num_hidden_layers=48, hidden_size=2048),
            "mamba-2.8b": MambaConfig(num_hidden_layers=64, hidden_size=2560),
        },
        (CAUSAL_LM,),
        "bert_packed.models.mamba",
        "bert_packed.checkpoints.mamba_names",
    ),
    "modernbert": ModelFamily(
        "ModernBERT",
        ModernBertConfig,
        {  # Warner et al. 2024, Table 4; the tiny ones are ours
            "modernbert-tiny": _modern_bert(3, 128, 192),
            "modernbert-mini": _modern_bert(6, 256, 384),
            "modernbert-base": _modern_bert(22, 768, 1152),
            "modernbert-large": _modern_bert(28, 1024, 2624),
        },
        (MASKED_LM, QUESTION_ANSWERING, TOKEN_CLASSIFICATION, CLASSIFICATION),
        "bert_packed.models.modern_bert",
        "bert_packed.checkpoints.modern_bert_names",
    ),
}
DEFAULT_TYPE = "bert"  # of a file without `model_type`, as google-research/bert writes it
MODEL_SIZES = {name: size for family in FAMILIES.values() for name, size in family.sizes.items()}
ENCODER_SIZES = [  # of families that mask tokens
    name for family in FAMILIES.values() if MASKED_LM in family.heads for name in family.sizes
]


def family_of(config):
    """The `ModelFamily` of a model's config."""
    return FAMILIES[model_type(config)]


def model_type(config):
    """The key of `FAMILIES` of a model's config."""
    return next(name for name, family in FAMILIES.items() if type(config) is family.config_class)


def load_model_config(name_or_path, vocab_size=None):
    """A model's config by size name or from a JSON file.

    Args:
        name_or_path: A key of `MODEL_SIZES`, or a path to JSON in google-research/bert's or Hugging Face's
            form.
        vocab_size: Used for a size name only; None keeps the published one.

    Raises:
        InputError: no such name or file, no JSON object, or a value that this model cannot honour.
    """
    if name_or_path in MODEL_SIZES:
        config = MODEL_SIZES[name_or_path]
        return dataclasses.replace(config, vocab_size=vocab_size) if vocab_size else config
    path = Path(name_or_path)
    if not path.is_file():
        raise InputError(
            f"`bert_config_file` must be one of {', '.join(MODEL_SIZES)} or an existing file. "
            f"Received: {name_or_path!r}."
        )
    content = read_json(path)
    # RoBERTa's tensors have BERT's names and shapes, but its positions start at 2
    kind = content.get("model_type", DEFAULT_TYPE)
    if kind not in FAMILIES:
        raise InputError(f"{path}: model_type must be {' or '.join(FAMILIES)}. Received: {kind}.")
    return FAMILIES[kind].config_class.from_json(path, content)


def config_json(config):
    """A model's config as `load_model_config` reads it: dict of plain JSON."""
    kind = model_type(config)
    return {**({"model_type": kind} if kind != DEFAULT_TYPE else {}), **dataclasses.asdict(config)}


def check_heads(config, heads, given):
    """Check that a model's family has all of some heads; `given` names the user's argument in the message."""
    if not {*heads} <= {*family_of(config).heads}:
        able = [family.name for family in FAMILIES.values() if {*heads} <= {*family.heads}]
        raise InputError(
            f"`{given}` must be of a {' or '.join(able)}. Received: model_type {model_type(config)}."
        )


def check_at_most(config, limit_name, what, value, model="the model"):
    """Check that a vocabulary or a length fits a model's tables.

    Args:
        limit_name: Field of the config; None in it is no limit.
        what: Subject of the message, as "the vocabulary of `input_file`".
        model: Name of the model in the message.
    """
    limit = getattr(config, limit_name)
    if limit is not None and value > limit:
        raise InputError(f"{what} must be at most {limit_name}={limit} of {model}. Received: {value}.")


# By the names of `--ablation`: the fields that each sets
ABLATIONS = {
    "no_attention_mask": ("ablation_no_attention_mask",),
    "no_position_reset": ("ablation_no_position_reset",),
    "no_next_sentence": ("ablation_no_next_sentence",),
    # [SEP] alone keeps sequences apart, as in RoBERTa and T5 (Section I): no next-sentence loss either
    "separator_only": (
        "ablation_no_attention_mask",
        "ablation_no_position_reset",
        "ablation_no_next_sentence",
    ),
}


def ablation_fields(names):
    """The fields of a model's config that ablations set; `names` is the text of `--ablation`."""
    return [field for name in names.split(",") if name for field in ABLATIONS[name]]


def ablate(config, names):
    """A model's config with ablations switched on; `InputError` where it lacks one of their fields."""
    fields, known = ablation_fields(names), _field_names(config)
    if not {*fields} <= known:
        able = [name for name, its_fields in ABLATIONS.items() if {*its_fields} <= known]
        raise InputError(
            f"`ablation` must be {' or '.join(['empty', *able])} for a {family_of(config).name}. "
            f"Received: {names}."
        )
    return dataclasses.replace(config, **dict.fromkeys(fields, True))


def ablations(config):
    """Names of the single ablations that a model's config has on, in the order of `ABLATIONS`."""
    return [name for name, fields in ABLATIONS.items() if len(fields) == 1 and getattr(config, fields[0])]


def parse_ablation(text):
    """`--ablation`: comma-separated keys of `ABLATIONS`, or nothing."""
    if any(name not in ABLATIONS for name in text.split(",") if text):
        raise ValueError(f"empty or a comma-separated list of {', '.join(ABLATIONS)}")
    return text


def override_dropout(config, overrides):
    """A model's config with the dropout rates of a run's config, `overrides`; -1 keeps its own.

    `InputError` for a rate given for a model without dropout.
    """
    given = {name: getattr(overrides, name) for name in DROPOUT_FIELDS if getattr(overrides, name) >= 0}
    rates = {}
    for name, rate in given.items():
        if not config.dropout_fields:
            kind = family_of(config).name
            raise InputError(f"`{name}` must be -1 for a {kind}, which has no dropout. Received: {rate}.")
        rates |= dict.fromkeys(config.dropout_fields[DROPOUT_FIELDS.index(name)], rate)
    return dataclasses.replace(config, **rates)


def without_dropout(config):
    """A model's config with all rates of dropout 0."""
    rates = [name for fields in config.dropout_fields for name in fields]
    return dataclasses.replace(config, **dict.fromkeys(rates, 0.0))


def _field_names(config):
    return {field.name for field in dataclasses.fields(config)}
