"""Tables of tensor names, here and in others' checkpoints."""

import dataclasses
from collections.abc import Callable
from typing import Any

from bert_packed.architectures.registry import model_type
from bert_packed.core.settings import InputError

# Names of types in safetensors, then in TensorFlow
FLOAT_TYPES = ("F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64")


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
        """An array of theirs as ours."""
        if self.hugging_face_depthwise:
            # Another rank stays: its shape is refused later, by name
            return values[:, 0].T if values.ndim == 3 and values.shape[1] == 1 else values
        return values.T if self.hugging_face_transposed else values

    def to_hugging_face(self, values):
        """An array of ours as theirs."""
        if self.hugging_face_depthwise:
            return values.T[:, None]
        return values.T if self.hugging_face_transposed else values

    def from_google(self, values):
        return values.T if self.google_transposed else values


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


def check_floats(path, types):
    """Raise `InputError` where a file's weights, a dict from names to types, are quantized.

    Without its scale an int8 or a float8 is a number like any other, but another one.
    """
    for name, found in types.items():
        if found not in FLOAT_TYPES:
            raise InputError(f"{path} must hold {name} in floats of 16, 32 or 64 bits. Received: {found}.")


def check_same_family(path, theirs, ours):
    """Raise `InputError` where a checkpoint's config, `theirs`, is of another architecture than `ours`."""
    if type(theirs) is not type(ours):
        raise InputError(
            f"{path} holds another model: model_type must be {model_type(ours)}. "
            f"Received: {model_type(theirs)}."
        )
