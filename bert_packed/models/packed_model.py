"""What every model of packs is called as, trains as and is audited by, whatever computes in it.

Legend: B packs per batch, S pack length, D model width.
"""

import keras

from bert_packed.models.seeding import seeded


class PackedModel(keras.Model):
    """An encoder of packs with heads on it: what every objective trains, and the audit can look into.

    An architecture has `build_encoder`, `encode`, `embed` and `encode_embedded`. A kind of model gives `head`
    its name, makes its heads in `__init__`, and has `build_heads` and `apply_heads`.

    Called with a dict of int32 arrays; the shapes fix S and K at the first call:

    | input | shape | special values |
    |---|---|---|
    | `token_ids` | `[B, S]` | 0 is padding |
    | `sequence_ids` | `[B, S]` | 1..K, 0 is padding |
    | `position_ids` | `[B, S]` | restarts at 0 in every sequence |

    and what else the architecture and the heads read. Further keys are ignored, so that a whole batch may be
    passed.

    Args:
        config: Of the architecture, with its `hidden_size` and `vocab_size`.
    """

    head = None

    def __init__(self, config, name):
        super().__init__(name=name)
        self.config = config

    def build_encoder(self):
        """Make the variables of the encoder."""
        raise NotImplementedError

    def build_heads(self, hidden_shape):
        """Make the variables of the heads, for hidden states of shape `(None, None, D)`."""
        raise NotImplementedError

    def build(self, *_):
        self.build_encoder()
        self.build_heads((None, None, self.config.hidden_size))
        self.built = True

    def call(self, batch, training=None):
        return self.apply_heads(self.encode(batch, training=training), batch, training=training)

    def encode(self, batch, training=None):
        """Hidden states of every token, float `[B, S, D]`."""
        raise NotImplementedError

    def embed(self, batch):
        """What the encoder's blocks start from, float `[B, S, D]`, without dropout."""
        raise NotImplementedError

    def encode_embedded(self, hidden_BSD, batch):
        """The hidden states of `encode` from those of `embed`, without dropout."""
        raise NotImplementedError

    def apply_heads(self, hidden_BSD, batch, training=None):
        """The outputs of `call`, a dict, from the hidden states of `encode`."""
        raise NotImplementedError


def build_seeded(make_model, seed, dtype="float32"):
    """A model with all its variables, from a seed.

    Args:
        make_model: Function to a Keras model, not yet built.
        seed, dtype: As in `build_pretraining_model`.
    """
    before = keras.config.dtype_policy()
    # The one way to reach every layer, those of other people's blocks too; nothing outside sees it
    keras.config.set_dtype_policy(dtype)
    try:
        with seeded(seed):
            model = make_model()
            model.build()
    finally:
        keras.config.set_dtype_policy(before)
    return model
