"""Linear layers and tables whose weights a layout spreads over devices, with rows or columns added where they
do not divide.

Legend: B packs, Q = S, P or K tokens of each pack, S pack length, D model width, V vocabulary, X and Y
widths.
"""

import re

import keras
from jax.sharding import PartitionSpec
from keras import ops

from bert_packed.models.layout import Layout, initializer
from bert_packed.parallel.mesh import on_blocks

# Of a class that is none: far below any logit, and without becoming infinite times 0
NO_LOGIT = -1e9


class LaidDense(keras.layers.Dense):
    """A linear layer that leaves its product to a layout.

    Args:
        layout: `MeshLayout`.
        width: Of the result; the kernel is made wider where the layout needs it.
        kernel_initializer: Of the kernel without what is added, which is 0.
        Others: As of Keras's layer.
    """

    def __init__(self, layout, width, kernel_initializer, **kwargs):
        self.layout = layout
        self.width = width
        units = layout.padded_width(width)
        super().__init__(units, kernel_initializer=_padded(kernel_initializer, 1, width), **kwargs)

    def build(self, input_shape):
        super().build(input_shape)
        self.layout.note_shape(self.kernel, (input_shape[-1], self.width))
        self.layout.note_shape(self.bias, (self.width,))

    def call(self, inputs):
        (outputs,) = self.layout.apply_together([self], inputs)
        return outputs


class MeshLayout(Layout):
    """What layouts over a mesh of devices have in common.

    A layout says by name how a weight lies, what is added to its shape, and how products go: `multiply`,
    `look_up` and the function `_logits` of hidden states and a table.

    Args:
        mesh: `jax.sharding.Mesh` with the axes of `mesh.AXES`.

    Attributes:
        name: As `--layout` has it.
        pack_axes: Axes of the mesh along which packs are divided.
        weights: Dict from regular expressions to how a weight lies whose path has a match; all others are
            whole on every device.
        heads, ids: How `[B, S, N, H]` of attention's heads and `[B, S]` of ids lie in a copy of the model.
    """

    name, pack_axes = None, ()
    weights, heads, ids = {}, None, None

    def __init__(self, mesh):
        self.mesh = mesh
        self._shapes = {}  # by id of a variable whose shape has something added

    def spec(self, path, num_axes):
        """How a weight lies: `PartitionSpec`.

        Args:
            path: Of the variable, below the model or with it.
            num_axes: How many axes it has.
        """
        for pattern, spec in self.weights.items():
            if re.search(pattern, path):
                assert len(spec) == num_axes, (path, num_axes)
                return spec
        return PartitionSpec()

    def padded_rows(self, num_rows):
        """Rows of a table with so many, with those that are added."""
        raise NotImplementedError

    def padded_width(self, width):
        """Columns of the kernel of a linear layer, with those that are added."""
        raise NotImplementedError

    def multiply(self, name, inputs_BQX, kernels):
        """Products of one input with several kernels of linear layers of a kind: list of `[B, Q, Y]`."""
        raise NotImplementedError

    def check(self, model_config, **packs):
        """Check that a model and a step can be spread.

        Args:
            model_config: `ModelConfig`.
            packs: How many packs are computed at once, by name of the flag.

        Raises:
            InputError: a number does not divide; the message names both.
        """
        raise NotImplementedError

    def describe(self, model_config):
        """For people: the mesh, and what is added to the vocabulary; lines of text."""
        copies, rows, columns = self.mesh.devices.shape
        text = f"layout     {self.name}: {copies} x {rows} x {columns} devices (copies, rows, columns)"
        own, padded = model_config.vocab_size, self.padded_rows(model_config.vocab_size)
        if own != padded:
            text += (
                f"\n           the vocabulary is padded from {own:,} to {padded:,} tokens, to be divided "
                "among devices; what is added counts for nothing and is not saved"
            )
        return text

    def dense(self, width, config, name, dtype=None):
        return LaidDense(self, width, initializer(config), name=name, dtype=dtype)

    def apply_together(self, layers, hidden_BSD):
        products = self.multiply(layers[0].name, hidden_BSD, [layer.kernel for layer in layers])
        return [
            (product + layer.bias)[..., : layer.width]
            for product, layer in zip(products, layers, strict=True)
        ]

    def add_table(self, layer, num_rows, config, name):
        is_split = tuple(self.spec(f"/{name}", 2)) != ()
        shape = (self.padded_rows(num_rows) if is_split else num_rows, config.hidden_size)
        rows = _padded(initializer(config), 0, num_rows)
        table = layer.add_weight(shape=shape, initializer=rows, name=name)
        self.note_shape(table, (num_rows, config.hidden_size))
        return table

    def add_vocabulary_bias(self, layer, config, name):
        shape = (self.padded_rows(config.vocab_size),)
        bias = layer.add_weight(shape=shape, initializer="zeros", name=name, autocast=False)
        self.note_shape(bias, (config.vocab_size,))
        return bias

    def vocabulary_logits(self, hidden_BQD, table_VD):
        return self._logits(hidden_BQD, table_VD)

    def attend(self, attend, query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS):
        local = on_blocks(attend, self.mesh, (self.heads, self.heads, self.heads, self.ids), self.heads)
        return local(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS)

    def without_padding(self, logits_BQV, num_classes):
        if logits_BQV.shape[-1] == num_classes:
            return logits_BQV
        classes_V = ops.arange(logits_BQV.shape[-1], dtype="int32")
        return ops.where(classes_V < num_classes, logits_BQV, NO_LOGIT)

    def note_shape(self, variable, shape):
        """Remember the shape of a variable without what is added to it."""
        self._shapes[id(variable)] = variable, tuple(shape)  # which keeps it: no other gets its id

    def shape_of(self, variable):
        """The shape of a variable without what is added to it."""
        return self._shapes.get(id(variable), (variable, tuple(variable.shape)))[1]


def _padded(make, axis, number):
    """An initializer whose values along an axis are those of another for `number` places, then 0."""

    def initialize(shape, dtype=None):
        inner = list(shape)
        inner[axis] = number
        added = [(0, 0)] * len(shape)
        added[axis] = (0, shape[axis] - number)
        return ops.pad(make(tuple(inner), dtype=dtype), added)

    return initialize
