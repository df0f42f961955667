"""Base class of every model of packs, and models by head, config and seed.

Legend: B packs per batch, S pack length, K sequences per pack, D model width.
"""

import contextlib
import dataclasses
import inspect
import random

import keras

from bert_packed.architectures.registry import check_heads, family_of
from bert_packed.core.settings import InputError


class PackedModel(keras.Model):
    """An encoder of packs with heads.

    An architecture has `encode`, `embed` and `encode_embedded`. A kind of model names its `head` (one of
    those in `registry.py`), makes its layers in `__init__`, and has `apply_heads`.

    Called with a dict of int32 arrays `[B, S]`, whose other keys are ignored. The first call fixes S and K:

        token_ids       0 is padding
        sequence_ids    1..K, 0 is padding
        position_ids    restarts at 0 in every sequence
    """

    config_class = None
    head = None
    encoder_inputs = ("token_ids", "sequence_ids", "position_ids")  # the inputs `[B, S]` that it reads

    def __init__(self, config, name, num_classes=None):
        super().__init__(name=name)
        self.config = config
        self.num_classes = num_classes

    def build(self, *_):
        for layer in self.layers:
            layer.build((None, None, self.config.hidden_size))  # hidden states, which the heads read
        self.add_weights()
        undecayed = family_of(self.config).undecayed
        for variable in self.trainable_variables:
            is_matrix = len(variable.shape) > 1 and variable.name not in undecayed
            variable.is_decayed = getattr(variable, "is_decayed", is_matrix)  # as its layer says

    def add_weights(self):
        """Make the variables that the model has besides those of its layers."""

    def call(self, batch, training=None):
        return self.apply_heads(self.encode(batch, training=training), batch, training=training)

    def encode(self, batch, training=None):
        """Hidden states of every token, float `[B, S, D]`."""
        raise NotImplementedError

    def embed(self, batch):
        """Input of the encoder's first block, float `[B, S, D]`, without dropout."""
        raise NotImplementedError

    def encode_embedded(self, hidden_BSD, batch):
        """The hidden states of `encode` from the output of `embed`, without dropout."""
        raise NotImplementedError

    def apply_heads(self, hidden_BSD, batch, training=None):
        """The outputs of `call`, a dict, from the hidden states of `encode`."""
        raise NotImplementedError

    def get_config(self):
        """Arguments to make the model again from a `.keras` file, without options of its encoder."""
        classes = {} if self.num_classes is None else {"num_classes": self.num_classes}
        return {"config": dataclasses.asdict(self.config), "name": self.name, **classes}

    @classmethod
    def from_config(cls, config):
        """The model of `get_config`, with all its variables."""
        model = cls(**{**config, "config": cls.config_class(**config["config"])})
        model.build()
        return model


def build_model(head, config, seed, dtype="float32", num_outputs=None, **encoder):
    """A model with all its variables, from a seed: `PackedModel`.

    Args:
        seed: Integer that initial weights and dropout follow from.
        dtype: Keras policy of every layer: "float32", or "mixed_bfloat16", which computes in bfloat16 from
            float32 weights; softmax, norms' statistics, states and logits stay float32, unrounded.
        num_outputs: Classes of a classification, 1 for a number; None for other heads.
        encoder: Options of the architecture's encoder, such as `remat`; None is the default of each.

    Raises:
        InputError: the family has no such head, or its encoder no such option.
    """
    check_heads(config, [head], "bert_config_file")
    encoder = {name: value for name, value in encoder.items() if value is not None}
    check_options(config, **encoder)
    make_model = family_of(config).load_models().make_model
    return build_seeded(lambda: make_model(head, config, num_outputs, **encoder), seed, dtype)


def check_options(config, **encoder):
    """Raise `InputError` where the encoder of a config's architecture has no such option."""
    family = family_of(config)
    known = inspect.signature(family.load_models().make_model).parameters
    for name in encoder.keys() - known.keys():
        raise InputError(f"`{name}` must be left out for a {family.name}. Received: {encoder[name]}.")


def build_seeded(make_model, seed, dtype="float32"):
    """The Keras model that a function makes, with all its variables; arguments as in `build_model`."""
    before = keras.config.dtype_policy()
    # No other way reaches every layer, those of users' blocks too. The policy is put back below
    keras.config.set_dtype_policy(dtype)
    try:
        with seeded(seed):
            model = make_model()
            model.build()
    finally:
        keras.config.set_dtype_policy(before)
    return model


@contextlib.contextmanager
def seeded(seed):
    """Run the body with Python's `random` seeded: Keras draws seeds of weights and dropout from it."""
    # `keras.utils.set_random_seed` sets the states of Python, NumPy and TensorFlow for good: a program that
    # loads a model would draw other numbers afterwards
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
