"""Table of architectures, what each has to give to it, and what is done to any config; no Keras."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_packed.architectures.base_config import DROPOUT_FIELDS, BaseConfig, field_names
from bert_packed.architectures.bert import config as bert
from bert_packed.architectures.mamba import config as mamba
from bert_packed.architectures.mamba2 import config as mamba2
from bert_packed.architectures.modern_bert import config as modern_bert
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json
from bert_packed.schema import CAUSAL_LM, MLM, MLM_NSP

FLOAT32, MIXED = "float32", "mixed_bfloat16"
DTYPES = (FLOAT32, MIXED)
AUTO = "auto"  # `--dtype=auto`, see `run_directory.as_begun`
# An optimizer needs an epsilon of at least this: the gradient of a token that no step has seen is 0, and 0 /
# 0 would be NaN. Smaller numbers are 0 in float32
LEAST_EPSILON = 1e-30
ATTENTIONS = ("auto", "dense", "flash")
WEIGHTINGS = ("per_sequence", "per_token")  # of predictions in a loss
CONTEXT_FIELDS = ("max_position_embeddings", "global_rope_theta")
# Heads of models: masked tokens and next sentences, masked tokens alone, answer spans, a label for each
# sequence, a label for each token, none; and `CAUSAL_LM`, that of every next token
PRETRAINING, MASKED_LM, QUESTION_ANSWERING = "pretraining", "masked_lm", "question_answering"
CLASSIFICATION, TOKEN_CLASSIFICATION, EMBEDDING = "classification", "token_classification", "embedding"
CLASSIFYING_HEADS = (CLASSIFICATION, TOKEN_CLASSIFICATION)  # a task knows their number of outputs
FINETUNING_HEADS = (QUESTION_ANSWERING, TOKEN_CLASSIFICATION, CLASSIFICATION, EMBEDDING)
OBJECTIVE_HEADS = {MLM_NSP: PRETRAINING, MLM: MASKED_LM, CAUSAL_LM: CAUSAL_LM}  # by `--objective`


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One tensor of a model with its heads."""

    ours: str  # path of the Keras variable
    hugging_face: str  # in `model.safetensors`
    google: str = ""  # in google-research/bert; "" where it has none
    hugging_face_transposed: bool = False  # the stored matrix is the transpose of ours
    google_transposed: bool = False
    hugging_face_depthwise: bool = False  # channels × 1 × taps there, taps × channels here

    def from_hugging_face(self, values):
        if self.hugging_face_depthwise:
            # Another rank stays: its shape is refused later, by name
            return values[:, 0].T if values.ndim == 3 and values.shape[1] == 1 else values
        return values.T if self.hugging_face_transposed else values

    def to_hugging_face(self, values):
        if self.hugging_face_depthwise:
            return values.T[:, None]
        return values.T if self.hugging_face_transposed else values

    def from_google(self, values):
        return values.T if self.google_transposed else values


def linear_names(ours, theirs, has_bias=True):
    """The rows of a linear layer: list of `TensorName`, without names of Google's."""
    rows = [TensorName(f"{ours}/kernel", f"{theirs}.weight", hugging_face_transposed=True)]
    return rows + ([TensorName(f"{ours}/bias", f"{theirs}.bias")] if has_bias else [])


@dataclasses.dataclass(frozen=True)
class CheckpointNames:
    """Tensors and config of one architecture in checkpoints of ours and of others.

    Attributes:
        tensor_names: Function (config, head) to a list of `TensorName`, every tensor of the model once.
        outputs: Dict from each head to the `TensorName` of one that no head before it has. Where Hugging Face
            names two heads' tensors alike, the class in `config.json` decides, and without it the later wins.
        encoder: First part of our names that a checkpoint must hold.
        prefix: First part of Hugging Face's names, which a bare encoder lacks.
        bare_parts: First parts of names in such a bare encoder.
        spellings: Pairs of (older, newer): parts of Hugging Face's names that changed.
        tied: Pairs of Hugging Face's names that are one tensor here, the second ours. Those of which a
            config's table has both are two.
        shapeless: Fields of the config that no tensor's shape shows, but that change every output.
        classes: Dict from head to the class of transformers that has it; a head without one has no export.
        hugging_face_config: Function of a model to the content of `config.json` besides the class.
        token_ids: Function of the path of a vocabulary, or "", to the ids of special tokens in `config.json`;
            a dict in which None is an id that is not known.
        vocabularies: File names that its tokenizer may have, the usual one first.
    """

    tensor_names: Callable[[Any, str], list[TensorName]]
    outputs: dict[str, TensorName]
    encoder: str
    prefix: str = ""
    bare_parts: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    shapeless: tuple[str, ...] = ()
    classes: dict[str, str] = dataclasses.field(default_factory=dict)
    hugging_face_config: Callable[[Any], dict] | None = None
    token_ids: Callable[[str], dict] = lambda vocab_file: {}  # the default ids of transformers are right
    vocabularies: tuple[str, ...] = ("vocab.txt",)

    def full_name(self, name):
        """A name of Hugging Face's with the prefix and in the newer spelling."""
        if name.split(".")[0] in self.bare_parts:
            name = self.prefix + name
        for old, new in self.spellings:
            name = name.replace(old, new)
        return name


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """One architecture, as all code outside its own folder knows it.

    Attributes:
        config_class: Config. Beside its module, `model`, which needs Keras, has `make_model(head, config,
            num_outputs, **encoder)`, which gives a `PackedModel`, and `count_flops(head, config, sums)`, the
            operations to learn from sequences; and `checkpoint_names` has `NAMES`, a `CheckpointNames`.
        sizes: Published sizes by name.
        heads: Heads that its models may have. A checkpoint without any counts as having the first.
        undecayed: Names of variables without weight decay and, under LAMB, without trust ratio. Vectors, such
            as scales of norms, have neither, whatever their names.
    """

    name: str  # as in "a BERT"
    config_class: type
    sizes: dict[str, BaseConfig]
    heads: tuple[str, ...]
    undecayed: tuple[str, ...] = ("bias",)

    def load_models(self):
        return self._module("model")

    def load_names(self):
        return self._module("checkpoint_names").NAMES

    def _module(self, name):
        # Imported when it is asked for: a config is read without Keras
        folder, _, _ = self.config_class.__module__.rpartition(".")
        return importlib.import_module(f"{folder}.{name}")


# The keys are the values of `model_type` in `config.json`
FAMILIES = {
    "bert": ModelFamily("BERT", bert.ModelConfig, bert.SIZES, (PRETRAINING, MASKED_LM, *FINETUNING_HEADS)),
    "mamba": ModelFamily("Mamba", mamba.MambaConfig, mamba.SIZES, (CAUSAL_LM,), mamba.UNDECAYED),
    "mamba2": ModelFamily("Mamba-2", mamba2.Mamba2Config, mamba2.SIZES, (CAUSAL_LM,), mamba.UNDECAYED),
    "modernbert": ModelFamily(
        "ModernBERT", modern_bert.ModernBertConfig, modern_bert.SIZES, (MASKED_LM, *FINETUNING_HEADS)
    ),
}
DEFAULT_TYPE = "bert"  # of a file without `model_type`, as google-research/bert writes it
MODEL_SIZES = {name: size for family in FAMILIES.values() for name, size in family.sizes.items()}
ENCODER_SIZES = [  # of families that mask tokens
    name for family in FAMILIES.values() if MASKED_LM in family.heads for name in family.sizes
]


def family_of(config):
    return FAMILIES[model_type(config)]


def model_type(config):
    """The key of `FAMILIES` of a model's config."""
    return next(name for name, family in FAMILIES.items() if type(config) is family.config_class)


def load_model_config(name_or_path, vocab_size=None):
    """A model's config by size name or from a JSON file.

    Args:
        name_or_path: A key of `MODEL_SIZES`, or a path to JSON in google-research/bert's or Hugging Face's
            form.
        vocab_size: Rows of the vocabulary for a size name; None keeps the published number.

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
    if kind not in [*FAMILIES]:  # a list: JSON may have what no dict can look up
        raise InputError(f"{path}: model_type must be {' or '.join(FAMILIES)}. Received: {kind!s:.100}.")
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


def check_same_family(path, theirs, ours):
    """Raise `InputError` where a checkpoint's config, `theirs`, is of another architecture than `ours`."""
    if type(theirs) is not type(ours):
        raise InputError(
            f"{path} holds another model: model_type must be {model_type(ours)}. "
            f"Received: {model_type(theirs)}."
        )


def check_at_most(config, limit_name, what, value, model="the model"):
    """Check that a vocabulary or a length, `what` in the message, fits a model's tables."""
    limit = getattr(config, limit_name)
    if limit is not None and value > limit:
        raise InputError(f"{what} must be at most {limit_name}={limit} of {model}. Received: {value}.")


# The names of `--ablation`, and the fields that each sets
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
    fields, known = ablation_fields(names), field_names(config)
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
    """Check the text of `--ablation`."""
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


def override_context(config, overrides):
    """A model's config with the context of a run's config, `overrides`; 0 keeps its own.

    `InputError` for a value given for a model that cannot change it: a BERT's positions are learned.
    """
    given = {name: value for name in CONTEXT_FIELDS if (value := getattr(overrides, name))}
    for name, value in given.items():
        if name not in config.training_fields:
            kind = family_of(config).name
            raise InputError(f"`{name}` must be 0 for a {kind}, which cannot change it. Received: {value}.")
    return dataclasses.replace(config, **given)


def without_dropout(config):
    """A model's config with all rates of dropout 0."""
    rates = [name for fields in config.dropout_fields for name in fields]
    return dataclasses.replace(config, **dict.fromkeys(rates, 0.0))
