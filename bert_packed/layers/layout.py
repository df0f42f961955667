"""Layout of weights and activations, and the products that join them: here, all on one device.

The layouts of `parallel.layouts` spread the matrices over a mesh of devices.

Legend: B packs per batch, S pack length, D model width, N heads, H head width, V vocabulary, P predictions
per pack, Q = S, P or K tokens of each pack.
"""

import keras
from keras import ops

from bert_packed.layers.fast_gradients import Linear

FEW_ROWS = 4  # of a table, such as that of token types
# Two consecutive linear layers are marked: a layout may split the first by columns and the second by rows, so
# that nothing is exchanged in between
COLUMNS, ROWS = "columns", "rows"


def dense(width, config, name, dtype=None, weights=None, use_bias=True):
    """A linear layer; `weights` makes its first kernel, None as BERT's. A dtype of None is the policy's."""
    weights = weights or initializer(config)
    return Linear(width, use_bias=use_bias, kernel_initializer=weights, name=name, dtype=dtype)


def initializer(config):
    """BERT's initial weights; the seed comes from Python's `random`, see `packed_model.seeded`."""
    return keras.initializers.TruncatedNormal(stddev=config.initializer_range)


class Layout:
    """Layers, tables and products of a model on one device; other layouts override them."""

    def dense(self, width, config, name, dtype=None, weights=None, use_bias=True, split=None):
        """A linear layer as by the function `dense`; `split` is `COLUMNS`, `ROWS` or None."""
        return dense(width, config, name, dtype, weights, use_bias)

    def apply_together(self, layers, inputs):
        """Results of several linear layers of `dense` for the same input, of which `inputs` are `copies`."""
        return [layer(hidden_BSD) for layer, hidden_BSD in zip(layers, inputs, strict=True)]

    def apply_in_parts(self, layer, num_parts, hidden_BSD):
        """Equal parts of the columns of a linear layer's result: list of float `[B, S, Y]`."""
        return ops.split(layer(hidden_BSD), num_parts, axis=-1)

    def add_table(self, layer, num_rows, config, name, weights=None, is_vocabulary=False):
        """Float32 variable `[num_rows, D]` of a Keras layer; initial weights as those of `dense`."""
        shape, weights = (num_rows, config.hidden_size), weights or initializer(config)
        return layer.add_weight(shape=shape, initializer=weights, name=name, autocast=False)

    def add_vocabulary_bias(self, layer, config, name):
        """Bias of `vocabulary_logits`: float32 variable `[V]`, zeros at first."""
        return layer.add_weight(shape=(config.vocab_size,), initializer="zeros", name=name, autocast=False)

    def look_up(self, table, ids_BS):
        """Rows of a table of `add_table`: float32 `[B, S, D]`.

        Float32, since the gradients of all tokens add up in a row. In bfloat16 256 + 1 is 256.
        """
        num_rows = table.shape[0]
        if num_rows > FEW_ROWS:
            return ops.take(table, ids_BS, axis=0)
        # Its gradient is a sum for each row. That of `take` lets the tokens add to a row one after another,
        # which is half of a step on a GPU (docs/evidence/results.md)
        table, ids_BS1 = ops.convert_to_tensor(table), ids_BS[..., None]
        found_BSD = ops.broadcast_to(table[0], (*ops.shape(ids_BS), table.shape[1]))
        for row in range(1, num_rows):
            found_BSD = ops.where(ids_BS1 == row, table[row], found_BSD)
        return found_BSD

    def float32_logits(self, hidden_BQD, table_VD):
        """The `vocabulary_logits` of float32 numbers."""
        # Cast before the product, not after: its sums would be rounded to bfloat16 in between
        return self.vocabulary_logits(*(ops.cast(values, "float32") for values in (hidden_BQD, table_VD)))

    def vocabulary_logits(self, hidden_BQD, table_VD):
        """Products of each token with each row of a table of `add_table`: `[B, Q, V]`."""
        # One product serves the tokens of all packs: one per pack would make B gradients of the table
        _, num_tokens, width = hidden_BQD.shape
        logits = ops.matmul(ops.reshape(hidden_BQD, (-1, width)), ops.transpose(table_VD))  # [B * Q, V]
        return ops.reshape(logits, (-1, num_tokens, table_VD.shape[0]))

    def without_padding(self, logits_BQV, num_classes):
        """Logits of which only the first `num_classes` can be the largest or add to a softmax."""
        return logits_BQV

    def attend(self, attend, query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, **dropout):
        """Result of a fused attention kernel for all heads; `dropout` as in `layers.SelfAttention`."""
        return attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, **dropout)


ONE_DEVICE = Layout()
