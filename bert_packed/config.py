"""The frozen config of a model: its shape, checked once, and what may change of it for a run.

Names are google-research/bert's wherever it has one, and of a Mamba those of Hugging Face.
"""

import dataclasses
from pathlib import Path

from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.core.storage import read_json

DTYPES = ("float32", "mixed_bfloat16")
# Added to what an update is divided by: where a gradient was always 0, as of tokens that no step has seen,
# nothing else keeps 0 / 0 from being NaN. Smaller numbers are 0 in float32
LEAST_EPSILON = 1e-30
ATTENTIONS = ("auto", "dense", "flash")
ACTIVATIONS = ("gelu", "gelu_new", "relu")
DROPOUT_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
SHAPE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
MAMBA = "mamba"  # the `model_type` of its JSON
MAMBA_SHAPE_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The fields of a `bert_config.json`, with BERT-base as default."""

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

    def __post_init__(self):
        check_settings(self)
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                "`num_attention_heads` must divide `hidden_size`. Received: "
                f"num_attention_heads={self.num_attention_heads}, hidden_size={self.hidden_size}."
            )


@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """The fields of the `config.json` of a Mamba, under Hugging Face's names.

    Its sequences have no greatest length, and there is no dropout.
    """

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
    # As in `ModelConfig`
    ablation_no_position_reset: bool = setting(False, "states and convolution go on through the pack")

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


# What `--ablation` names -> the fields of `ModelConfig` that it sets
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
    """The fields of a model's config that ablations set: list of str; `names` is the text of `--ablation`."""
    return [field for name in names.split(",") if name for field in ABLATIONS[name]]


def ablate(config, names):
    """A model's config with ablations switched on; `names` is the text of `--ablation`.

    Raises:
        InputError: a Mamba has nothing to leave out under one of these names.
    """
    fields = ablation_fields(names)
    for field in fields:
        if not hasattr(config, field):
            raise InputError(f"`ablation` must be empty or no_position_reset for a Mamba. Received: {names}.")
    return dataclasses.replace(config, **dict.fromkeys(fields, True))


def ablations(config):
    """Names, in the table's order, of the single ablations that a model's config has on: list of str."""
    return [
        name for name, fields in ABLATIONS.items() if len(fields) == 1 and getattr(config, fields[0], False)
    ]


def parse_ablation(text):
    """`--ablation`: comma-separated keys of `ABLATIONS`, or nothing."""
    if any(name not in ABLATIONS for name in text.split(",") if text):
        raise ValueError(f"empty or a comma-separated list of {', '.join(ABLATIONS)}")
    return text


def _size(num_hidden_layers, hidden_size):
    """One of the published sizes: 64 wide heads, feed-forward four times as wide as the model."""
    return ModelConfig(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
    )


# Turc et al. 2019, Table 1 (tiny to medium); Devlin et al. 2019, Section 3 (base, large)
MODEL_SIZES = {
    "bert-tiny": _size(2, 128),
    "bert-mini": _size(4, 256),
    "bert-small": _size(4, 512),
    "bert-medium": _size(8, 512),
    "bert-base": _size(12, 768),
    "bert-large": _size(24, 1024),
    # "PackMamba", Section 4; the tiny ones are ours
    "mamba-tiny": MambaConfig(num_hidden_layers=2, hidden_size=128),
    "mamba-mini": MambaConfig(num_hidden_layers=4, hidden_size=256),
    "mamba-110m": MambaConfig(num_hidden_layers=16, hidden_size=1024),
    "mamba-1.4b": MambaConfig(num_hidden_layers=48, hidden_size=2048),
    "mamba-2.8b": MambaConfig(num_hidden_layers=64, hidden_size=2560),
}


def load_model_config(name_or_path, vocab_size=None):
    """A model's config by size name or from a `bert_config.json`.

    Args:
        name_or_path: A key of `MODEL_SIZES`, or a path to JSON in google-research/bert's or Hugging Face's
            form.
        vocab_size: The data's vocabulary size, used for a size name; a file's own value is kept. None keeps
            the published one.

    Returns:
        `ModelConfig`, or `MambaConfig` for a Mamba.

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
    return _from_json(path, read_json(path))


def config_json(config):
    """What is stored of a model's config, as `load_model_config` reads it: dict of plain JSON."""
    kind = {"model_type": MAMBA} if isinstance(config, MambaConfig) else {}
    return {**kind, **dataclasses.asdict(config)}


def _from_json(path, content):
    # RoBERTa's tensors have BERT's names and shapes, but its positions start at 2
    kind = content.get("model_type", "bert")
    if kind not in ("bert", MAMBA):
        raise InputError(f"{path}: model_type must be bert or mamba. Received: {kind}.")
    make, needed = (MambaConfig, MAMBA_SHAPE_FIELDS) if kind == MAMBA else (ModelConfig, SHAPE_FIELDS)
    if kind == MAMBA:
        content = _check_mamba(path, content)
    elif content.get("position_embedding_type", "absolute") != "absolute" or content.get("is_decoder"):
        raise InputError(f"{path} must describe an encoder with absolute positions. Received: {content}.")
    missing = [name for name in needed if name not in content]
    if missing:  # else any JSON object would be a BERT-base
        raise InputError(f"{path} must have {', '.join(needed)}. Received: no {missing[0]}.")
    known = {field.name for field in dataclasses.fields(make)}
    try:
        config = make(**{name: value for name, value in content.items() if name in known})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    inner = content.get("intermediate_size")
    if kind == MAMBA and inner not in (None, config.inner_size):
        raise InputError(
            f"{path}: intermediate_size must be expand times hidden_size, {config.inner_size}. "
            f"Received: {inner}."
        )
    return config


def _check_mamba(path, content):
    """The fields of a Mamba's JSON as ours has them; raises `InputError` for what ours does not compute."""
    wanted = {"hidden_act": "silu", "tie_word_embeddings": True, "residual_in_fp32": True}
    for name, value in wanted.items():
        if content.get(name, value) != value:
            raise InputError(f"{path}: {name} must be {value}. Received: {content[name]}.")
    rank = content.get("time_step_rank", 0)
    return {**content, "time_step_rank": 0 if rank == "auto" else rank}


def override_dropout(config, overrides):
    """A model's config with the rates of dropout that a run's config, `overrides`, gives; -1 keeps its own.

    Raises:
        InputError: a rate is given for a Mamba, which has no dropout.
    """
    rates = {name: getattr(overrides, name) for name in DROPOUT_FIELDS if getattr(overrides, name) >= 0}
    for name, rate in rates.items():
        if not hasattr(config, name):
            raise InputError(f"`{name}` must be -1 for a Mamba, which has no dropout. Received: {rate}.")
    return dataclasses.replace(config, **rates)


def check_dropout_overrides(overrides):
    """Raise `InputError` where a run's config has a rate of dropout that is neither a rate nor -1."""
    for name in DROPOUT_FIELDS:
        value = getattr(overrides, name)
        if value < 0 and value != -1:
            raise InputError(f"`{name}` must be at least 0, or -1. Received: {value}.")
