"""What checkpoints must know of a kind of model: its tensors' names, its heads, its config elsewhere."""

import dataclasses
from collections.abc import Callable
from typing import Any

from bert_packed.config import ModelConfig, config_json
from bert_packed.core.settings import InputError


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One tensor of a model with its heads.

    Attributes:
        ours: Name in our checkpoints, the path of the Keras variable.
        hugging_face: Name in `model.safetensors` of transformers.
        google: Name of the variable in google-research/bert; "" where it has none.
        hugging_face_transposed, google_transposed: The stored matrix is the transpose of ours.
        hugging_face_depthwise: A kernel that convolves each channel by itself, stored as
            channels × 1 × taps there, as taps × channels here.
    """

    ours: str
    hugging_face: str
    google: str = ""
    hugging_face_transposed: bool = False
    google_transposed: bool = False
    hugging_face_depthwise: bool = False

    def from_hugging_face(self, values):
        """An array of theirs as ours. One of another rank stays: its shape is refused later, by name."""
        if self.hugging_face_depthwise:
            return values[:, 0].T if values.ndim == 3 and values.shape[1] == 1 else values
        return values.T if self.hugging_face_transposed else values

    def to_hugging_face(self, values):
        """An array of ours as theirs."""
        if self.hugging_face_depthwise:
            return values.T[:, None]
        return values.T if self.hugging_face_transposed else values

    def from_google(self, values):
        """As `from_hugging_face`."""
        return values.T if self.google_transposed else values


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One kind of model, as checkpoints of ours and of others have it.

    Attributes:
        name: What people call it, as in "a BERT".
        config_class: Of `bert_packed.config`; it tells the architecture.
        tensor_names: Function (config, head) to a list of `TensorName`, every tensor of the model once.
        build_model: Function (head, config, num_outputs, seed) to a Keras model.
        classes: Dict from each head to the class of transformers that has it. The first is what a checkpoint
            without any head counts as.
        outputs: Dict from each head to the `TensorName` of one that no head before it has, a row for each
            output. Two heads may call it the same elsewhere; which of them it is, `config.json` says there,
            by the class, and without a word the later.
        encoder: How our names of the tensors begin that a checkpoint must hold.
        prefix: How Hugging Face's begin, and what a bare encoder's lack.
        bare_parts: First parts of names in such a bare encoder.
        spellings: Pairs of (older, newer): parts of Hugging Face's names that changed.
        tied: Pairs of Hugging Face's names that are one tensor here, the second ours.
        shapeless: Fields of the config that no tensor's shape tells, and that would silently change every
            output.
        hugging_face_config: Function of a model to what `config.json` holds besides the class.
        vocabularies: Files that its tokenizer may be in.
    """

    name: str
    config_class: type
    tensor_names: Callable[[Any, str], list[TensorName]]
    build_model: Callable[..., Any]
    classes: dict[str, str]
    outputs: dict[str, TensorName]
    encoder: str
    prefix: str
    bare_parts: tuple[str, ...]
    spellings: tuple[tuple[str, str], ...]
    tied: tuple[tuple[str, str], ...]
    shapeless: tuple[str, ...]
    hugging_face_config: Callable[[Any], dict]
    vocabularies: tuple[str, ...]

    @property
    def first_head(self):
        """The head that a checkpoint without any counts as having."""
        return next(iter(self.classes))

    def full_name(self, name):
        """A name of Hugging Face's as newer files have it: with the prefix, in the newer spelling."""
        if name.split(".")[0] in self.bare_parts:
            name = self.prefix + name
        for old, new in self.spellings:
            name = name.replace(old, new)
        return name


def check_same_architecture(path, theirs, ours):
    """Raise `InputError` where the config of a checkpoint, `theirs`, is not of the kind that a model's is."""
    if type(theirs) is not type(ours):
        raise InputError(
            f"{path} holds another model: model_type must be {_model_type(ours)}. "
            f"Received: {_model_type(theirs)}."
        )


def check_is_bert(config, given):
    """Raise `InputError` where a config is of another kind of model: what has heads of BERT's takes no other.

    Args:
        config: Of the model.
        given: What the user gave to say so, for the message.
    """
    if not isinstance(config, ModelConfig):
        raise InputError(f"`{given}` must be of a BERT. Received: model_type {_model_type(config)}.")


def _model_type(config):
    return config_json(config).get("model_type", "bert")
