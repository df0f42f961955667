"""Base of layouts over a mesh: linear layers and tables with sharded weights, padded to divide.

Legend: B packs, Q = S, P or K tokens of each pack, S pack length, D model width, V vocabulary, X and Y
widths.
"""

import re

import keras
from jax.sharding import PartitionSpec
from keras import ops

from bert_packed.layers.dropout import RowDropout
from bert_packed.layers.layout import Layout, initializer
from bert_packed.parallel.mesh import on_blocks

# Logit of padding: far below any other, and finite, as infinity times 0 is NaN
NO_LOGIT = -1e9


class LaidDense(keras.layers.Dense):
    """A linear layer whose product is the layout's. Columns beyond `width` are padding, initialised to 0."""

    def __init__(self, layout, width, kernel_initializer, **kwargs):
        self.layout = layout
        self.width = width
        units = layout.padded_width(width)
        super().__init__(units, kernel_initializer=_padded(kernel_initializer, 1, width), **kwargs)

    def build(self, input_shape):
        super().build(input_shape)
        self.layout.note_shape(self.kernel, (input_shape[-1], self.width))
        if self.bias is not None:
            self.layout.note_shape(self.bias, (self.width,))

    def call(self, inputs):
        (outputs,) = self.layout.apply_together([self], inputs)
        return outputs


class MeshLayout(Layout):
    """Base class of layouts. A subclass has the attributes, the padding, `multiply`, `look_up` and `_logits`.

    Args:
        mesh: `jax.sharding.Mesh` with the axes of `mesh.AXES`.

    Attributes:
        name: Value of `--layout`.
        pack_axes: Axes of the mesh along which packs are divided.
        weights: Dict from regular expressions of paths to `PartitionSpec`s; other weights are replicated.
        heads, ids: `PartitionSpec`s of attention's heads `[B, S, N, H]` and of ids `[B, S]`.
    """

    name, pack_axes = None, ()
    weights, heads, ids = {}, None, None

    def __init__(self, mesh):
        self.mesh = mesh
        self._shapes = {}  # by id of a variable whose shape has something added

    def spec(self, path, num_axes):
        """`PartitionSpec` of the weight at a path."""
        for pattern, spec in self.weights.items():
            if re.search(pattern, path):
                assert len(spec) == num_axes, (path, num_axes)
                return spec
        return PartitionSpec()

    def padded_rows(self, num_rows):
        """Rows of a table, padding included."""
        raise NotImplementedError

    def padded_width(self, width):
        """Columns of a linear layer's kernel, padding included."""
        raise NotImplementedError

    def multiply(self, name, inputs_BQX, kernels):
        """Products of one input with the kernels of linear layers of a name: list of `[B, Q, Y]`."""
        raise NotImplementedError

    def check(self, model_config, **packs):
        """Raise `InputError` if the mesh does not divide the model or `packs`, counts by name of the flag."""
        raise NotImplementedError

    def describe(self, model_config):
        """Lines of text for people: the mesh, and the padding of the vocabulary."""
        copies, rows, columns = self.mesh.devices.shape
        text = f"layout     {self.name}: {copies} x {rows} x {columns} devices (copies, rows, columns)"
        own, padded = model_config.vocab_size, self.padded_rows(model_config.vocab_size)
        if own != padded:
            text += (
                f"\n           the vocabulary is padded from {own:,} to {padded:,} tokens, to be divided "
                "among devices; what is added counts for nothing and is not saved"
            )
        return text

    def dense(self, width, config, name, dtype=None, weights=None, use_bias=True):
        weights = weights or initializer(config)
        return LaidDense(self, width, weights, use_bias=use_bias, name=name, dtype=dtype)

    def apply_together(self, layers, hidden_BSD):
        products = self.multiply(layers[0].name, hidden_BSD, [layer.kernel for layer in layers])
        return [
            (product if layer.bias is None else product + layer.bias)[..., : layer.width]
            for product, layer in zip(products, layers, strict=True)
        ]

    def apply_in_parts(self, layer, num_parts, hidden_BSD):
        # The kernel is cut, not the result, which has more numbers. By `check` devices divide each part
        products = self.multiply(layer.name, hidden_BSD, ops.split(layer.kernel, num_parts, axis=1))
        if layer.bias is None:
            return products
        biases = ops.split(ops.convert_to_tensor(layer.bias), num_parts)
        return [product + bias for product, bias in zip(products, biases, strict=True)]

    def add_table(self, layer, num_rows, config, name, weights=None):
        is_split = tuple(self.spec(f"/{name}", 2)) != ()
        shape = (self.padded_rows(num_rows) if is_split else num_rows, config.hidden_size)
        rows = _padded(weights or initializer(config), 0, num_rows)
        table = layer.add_weight(shape=shape, initializer=rows, name=name, autocast=False)
        self.note_shape(table, (num_rows, config.hidden_size))
        return table

    def add_vocabulary_bias(self, layer, config, name):
        shape = (self.padded_rows(config.vocab_size),)
        bias = layer.add_weight(shape=shape, initializer="zeros", name=name, autocast=False)
        self.note_shape(bias, (config.vocab_size,))
        return bias

    def vocabulary_logits(self, hidden_BQD, table_VD):
        return self._logits(hidden_BQD, table_VD)

    def attend(self, attend, query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
        rate, *words_BNS = dropout or (0.0,)
        packs, tokens, heads, _ = self.heads
        rows = PartitionSpec(packs, heads, tokens)

        def local(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, *words_BNS):
            # The rows' words are cut, not made here: a device's heads and packs have their numbers among all
            given = {"dropout": RowDropout(rate, *words_BNS)} if words_BNS else {}
            return attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, **given)

        specs = (self.heads, self.heads, self.heads, self.ids, *(rows for _ in words_BNS))
        arrays = (query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, *words_BNS)
        return on_blocks(local, self.mesh, specs, self.heads)(*arrays)

    def without_padding(self, logits_BQV, num_classes):
        if logits_BQV.shape[-1] == num_classes:
            return logits_BQV
        classes_V = ops.arange(logits_BQV.shape[-1], dtype="int32")
        return ops.where(classes_V < num_classes, logits_BQV, NO_LOGIT)

    def note_shape(self, variable, shape):
        """Remember the shape of a variable without its padding."""
        self._shapes[id(variable)] = variable, tuple(shape)  # held, so that no other gets its id

    def shape_of(self, variable):
        """The shape of a variable without its padding."""
        return self._shapes.get(id(variable), (variable, tuple(variable.shape)))[1]


def _padded(make, axis, number):
    """The initializer `make` for the first `number` places along an axis, 0 beyond."""

    def initialize(shape, dtype=None):
        inner = list(shape)
        inner[axis] = number
        added = [(0, 0)] * len(shape)
        added[axis] = (0, shape[axis] - number)
        return ops.pad(make(tuple(inner), dtype=dtype), added)

    return initialize
