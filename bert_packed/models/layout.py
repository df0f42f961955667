"""How weights and activations lie, and which products join them: here, all on one device.

A model asks its layout for every layer that has a weight matrix. `parallel.optimus` and `parallel.megatron`
spread the matrices over a mesh of devices; models do not know of it.

Legend: B packs per batch, S pack length, D model width, N heads, H head width, V vocabulary, P predictions
per pack, Q = S, P or K tokens of each pack.
"""

import keras
from keras import ops

from bert_packed.models.linear import Linear


def dense(width, config, name, dtype=None):
    """A linear layer with BERT's initial weights: truncated normal, zero bias; None is the policy's dtype."""
    return Linear(width, kernel_initializer=initializer(config), name=name, dtype=dtype)


def initializer(config):
    """BERT's initial weights; the seed comes from Python's `random`, see `modeling.build_seeded`."""
    return keras.initializers.TruncatedNormal(stddev=config.initializer_range)


class Layout:
    """What a model asks for wherever a matrix of weights comes in; another layout overrides what it does
    otherwise.
    """

    def dense(self, width, config, name, dtype=None):
        """A linear layer, as `dense` makes it; what it does depends on its name at most."""
        return dense(width, config, name, dtype)

    def apply_together(self, layers, hidden_BSD):
        """What each of several linear layers of `dense` makes of the same input: list of tensors."""
        return [layer(hidden_BSD) for layer in layers]

    def add_table(self, layer, num_rows, config, name):
        """A table of embeddings, with BERT's initial weights: variable `[num_rows, D]` of a Keras layer."""
        shape = (num_rows, config.hidden_size)
        return layer.add_weight(shape=shape, initializer=initializer(config), name=name)

    def add_vocabulary_bias(self, layer, config, name):
        """What is added to `vocabulary_logits`: float32 variable `[V]`, zeros at first."""
        return layer.add_weight(shape=(config.vocab_size,), initializer="zeros", name=name, autocast=False)

    def look_up(self, table, ids_BS):
        """Rows of a table of `add_table`, float `[B, S, D]`, by int32 `[B, S]`."""
        return ops.take(table, ids_BS, axis=0)

    def vocabulary_logits(self, hidden_BQD, table_VD):
        """How much each token looks like each row of a table of `add_table`: `[B, Q, V]`."""
        # One product of the tokens of all packs: of one a pack, the table's gradient would be B tables
        _, num_tokens, width = hidden_BQD.shape
        logits = ops.matmul(ops.reshape(hidden_BQD, (-1, width)), ops.transpose(table_VD))  # [B * Q, V]
        return ops.reshape(logits, (-1, num_tokens, table_VD.shape[0]))

    def without_padding(self, logits_BQV, num_classes):
        """Logits of which none but the first so many can be the largest or add to a softmax."""
        return logits_BQV

    def attend(self, attend, query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS):
        """What a fused kernel of attention, as of `layers.SelfAttention`, makes of all heads."""
        return attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS)


ONE_DEVICE = Layout()
