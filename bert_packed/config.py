"""The two frozen configs of a run: the model's shape and the training recipe, checked once.

Names are google-research/bert's wherever it has one.
"""

import dataclasses
import json
from pathlib import Path

from data_gen.cli.settings import InputError, check_divides, check_settings, setting

DTYPES = ("float32", "mixed_bfloat16")
# Added to what an update is divided by: where a gradient was always 0, as of tokens that no step has seen,
# nothing else keeps 0 / 0 from being NaN. Smaller numbers are 0 in float32
LEAST_EPSILON = 1e-30
ATTENTIONS = ("auto", "dense", "flash")
ACTIVATIONS = ("gelu", "gelu_new", "relu")
SHAPE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


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


def ablate(config, names):
    """A `ModelConfig` with ablations switched on; `names` is the text of `--ablation`."""
    fields = [field for name in names.split(",") if name for field in ABLATIONS[name]]
    return dataclasses.replace(config, **dict.fromkeys(fields, True))


def ablations(config):
    """Names, in the table's order, of the single ablations that a `ModelConfig` has on: list of str."""
    return [name for name, fields in ABLATIONS.items() if len(fields) == 1 and getattr(config, fields[0])]


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
}


def load_model_config(name_or_path, vocab_size=None):
    """A model's config by size name or from a `bert_config.json`.

    Args:
        name_or_path: A key of `MODEL_SIZES`, or a path to JSON in google-research/bert's or Hugging Face's
            form.
        vocab_size: The data's vocabulary size, used for a size name; a file's own value is kept. None keeps
            BERT's 30,522.

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
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be JSON. Received: {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object. Received: {type(content).__name__}.")
    return _from_json(path, content)


def _from_json(path, content):
    # RoBERTa's tensors have BERT's names and shapes, but its positions start at 2
    if content.get("model_type", "bert") != "bert":
        raise InputError(f"{path}: model_type must be bert. Received: {content['model_type']}.")
    if content.get("position_embedding_type", "absolute") != "absolute" or content.get("is_decoder"):
        raise InputError(f"{path} must describe an encoder with absolute positions. Received: {content}.")
    missing = [name for name in SHAPE_FIELDS if name not in content]
    if missing:  # else any JSON object would be a BERT-base
        raise InputError(f"{path} must have {', '.join(SHAPE_FIELDS)}. Received: no {missing[0]}.")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    try:
        return ModelConfig(**{name: value for name, value in content.items() if name in known})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Every flag of `run_pretraining.py`."""

    input_file: str = setting("", "packed training TFRecords: comma-separated paths or globs")
    eval_input_file: str = setting("", "packed held-out TFRecords; empty = no evaluation")
    output_dir: str = setting("", "where checkpoints, metrics.csv and TensorBoard events go", changeable=True)
    bert_config_file: str = setting(
        "bert-base", f"size name ({', '.join(MODEL_SIZES)}) or path of a bert_config.json"
    )
    init_checkpoint: str = setting(
        "",
        "local checkpoint whose weights start this run: a folder of ours or Hugging Face's, or a TensorFlow "
        "checkpoint or SavedModel of google-research/bert; empty = random",
    )
    train_batch_size: int = setting(32, "packs per optimizer step", minimum=1)
    micro_batch_size: int = setting(
        0,
        "packs computed at once; gradients of a step's micro-batches add up; 0 = train_batch_size",
        minimum=0,
    )
    eval_batch_size: int = setting(8, "packs per evaluation batch", minimum=1)
    num_train_steps: int = setting(100_000, "optimizer steps", minimum=1)
    num_warmup_steps: int = setting(10_000, "steps over which the learning rate rises linearly", minimum=0)
    learning_rate: float = setting(1e-3, "peak learning rate", minimum=0)
    end_learning_rate: float = setting(0.0, "learning rate after the last step", minimum=0)
    decay_power: float = setting(1.0, "power of the polynomial decay; 1 = linear", minimum=0)
    weight_decay: float = setting(0.01, "weight decay inside LAMB's trust ratio", minimum=0)
    beta_1: float = setting(0.9, "LAMB's decay of momentum", minimum=0, maximum=0.999999)
    beta_2: float = setting(0.999, "LAMB's decay of velocity", minimum=0, maximum=0.9999999)
    epsilon: float = setting(1e-6, "LAMB's epsilon", minimum=LEAST_EPSILON)
    max_grad_norm: float = setting(1.0, "clip gradients to this global norm; 0 = never", minimum=0)
    mlm_loss: str = setting(
        "per_sequence",
        "weight of a prediction: every sequence alike, or every token alike (google-research/bert)",
        choices=("per_sequence", "per_token"),
    )
    packing_correction: str = setting(
        "none",
        "betas: beta_1 and beta_2 to the power of the data's packing factor (Efficient Sequence Packing, "
        "Section 3.3)",
        choices=("none", "betas"),
    )
    ablation: str = setting(
        "",
        "BREAKS PACKING, for experiments only: comma-separated no_attention_mask, no_position_reset, "
        "no_next_sentence, separator_only (all three); empty = sound packing",
        parse=parse_ablation,
    )
    dtype: str = setting(
        "float32",
        "mixed_bfloat16 computes layers in bfloat16, for accelerators; weights, softmax, layer-norm "
        "statistics and losses stay float32",
        choices=DTYPES,
    )
    attention: str = setting(
        "auto",
        "flash is the platform's fused kernel, on GPU and TPU under KERAS_BACKEND=jax and without attention "
        "dropout; auto takes it where it can",
        choices=ATTENTIONS,
    )
    remat: bool = setting(
        False, "compute each encoder block again in the backward pass: less memory, more time"
    )
    hidden_dropout_prob: float = setting(-1.0, "overrides the model's; -1 = as the model says", maximum=0.99)
    attention_probs_dropout_prob: float = setting(
        -1.0, "overrides the model's; -1 = as the model says", maximum=0.99
    )
    random_seed: int = setting(12345, "seed of weights, dropout and data order", minimum=0, maximum=2**31 - 1)
    shuffle_buffer_size: int = setting(1000, "packs held to shuffle; 1 = the order on disk", minimum=1)
    log_steps: int = setting(10, "steps between rows of metrics.csv", minimum=1)
    eval_steps: int = setting(0, "steps between evaluations; 0 = only at the end", minimum=0)
    max_eval_steps: int = setting(0, "evaluation batches; 0 = all of the held-out data", minimum=0)
    save_checkpoints_steps: int = setting(1000, "steps between checkpoints", minimum=1, changeable=True)
    keep_checkpoint_max: int = setting(3, "newest checkpoints kept", minimum=1, changeable=True)
    sample_data: bool = setting(
        False,
        "build the embedded sample corpus and its packed records where they are missing",
        changeable=True,
    )
    unpacked_input_file: str = setting(
        "",
        "the same data packed at depth 1; if given, the run ends with measured packed and unpacked speed",
        changeable=True,
    )
    overwrite: bool = setting(False, "start anew, removing an earlier run in output_dir", transient=True)
    json: str = setting("", "also write the final tables to this file, as JSON", transient=True)

    def __post_init__(self):
        check_settings(self)
        for name in ("input_file", "output_dir"):
            if not getattr(self, name):
                raise InputError(f"`{name}` must be given. Received: nothing.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if getattr(self, name) < 0 and getattr(self, name) != -1:
                raise InputError(f"`{name}` must be at least 0, or -1. Received: {getattr(self, name)}.")
        check_divides(self, "micro_batch_size", "train_batch_size")

    @property
    def packs_at_once(self):
        """Packs in one micro-batch."""
        return self.micro_batch_size or self.train_batch_size
