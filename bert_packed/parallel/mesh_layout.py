"""Base of layouts over a mesh of devices: arrays and variables spread over it, and sharded layers.

A mesh is `[copies of the model, rows, columns]`. One of 2,2,2 has two copies, each on four devices:

    copy 0   0 1     copy 1   4 5
             2 3              6 7

Linear layers and tables have sharded weights, padded so that devices divide them.

Legend: B packs, Q = S, P or K tokens of each pack, S pack length, D model width, V vocabulary, X and Y
widths.
"""

import math

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from keras import ops

from bert_packed.core.settings import InputError
from bert_packed.layers.dropout import RowDropout
from bert_packed.layers.layout import Layout, initializer
from bert_packed.parallel.replicas import AXIS
from bert_packed.parallel.summa import COLUMN, ROW

AXES = (AXIS, ROW, COLUMN)
# Padding has this logit: far below any other, and finite, as infinity times 0 is NaN
NO_LOGIT = -1e9


def make_mesh(shape, devices):
    """`jax.sharding.Mesh` with `AXES` of the first devices; several processes must use all of them.

    Raises:
        InputError: there are too few, or too many, devices for the shape (copies, rows, columns).
    """
    number, processes = math.prod(shape), jax.process_count()
    asked = f"{'x'.join(map(str, shape))} = {number} devices, where there are {len(devices)}"
    if number > len(devices):
        raise InputError(
            f"`mesh` must not have more devices than there are. Received: {asked}. To try it on a CPU: "
            "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{-(-number // processes)}, or to compile only: --compile_only=FOLDER "
            f"--num_virtual_devices={number}."
        )
    if number < len(devices) and processes > 1:
        raise InputError(f"`mesh` must have all devices of all processes. Received: {asked}.")
    return jax.sharding.Mesh(np.array(devices[:number]).reshape(shape), AXES)


def on_blocks(function, mesh, in_specs, out_specs):
    """A function of one device's blocks as one of whole arrays: `jax.shard_map` over `ROW`, `COLUMN`."""
    # A program over copies of the model has its own mesh, which must be taken inside of it
    is_inside = not jax.sharding.get_abstract_mesh().empty
    return jax.shard_map(
        function,
        mesh=None if is_inside else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={ROW, COLUMN},
        check_vma=False,
    )


def differentiable(forward, backward, mesh, in_specs, out_specs):
    """`on_blocks` of a function with its gradient.

    Args:
        forward: Function of one device's blocks.
        backward: Function of these blocks and the gradient of the result, to their gradients; None for
            integers.
        in_specs, out_specs: `PartitionSpec`s, one for a whole list.
    """

    @jax.custom_vjp
    def function(*arguments):
        return on_blocks(forward, mesh, in_specs, out_specs)(*arguments)

    def differentiate(arguments, gradient):
        return on_blocks(backward, mesh, (*in_specs, out_specs), in_specs)(*arguments, gradient)

    function.defvjp(lambda *arguments: (function(*arguments), arguments), differentiate)
    return function


def spread(value, mesh, spec):
    """An array, whole in this process, on the devices of a mesh; one that is there already is returned."""
    sharding = NamedSharding(mesh, spec)
    if isinstance(value, jax.core.Tracer) or getattr(value, "sharding", None) == sharding:
        return value
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda place: whole[place])


class SpreadVariable:
    """A sharded Keras variable, to be read and assigned whole; `shape` is without padding, which stays 0."""

    def __init__(self, variable, mesh, spec, shape):
        self.path, self.dtype, self.shape = variable.path, variable.dtype, tuple(shape)
        self._variable, self._mesh, self._spec = variable, mesh, spec
        self._inside = tuple(slice(length) for length in self.shape)

    def numpy(self):
        """The array in the host's memory. A collective: all processes must call it."""
        value = self._variable.value
        is_here = not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated
        whole = np.asarray(value) if is_here else multihost_utils.process_allgather(value, tiled=True)
        return whole[self._inside]

    def assign(self, values):
        whole = np.zeros(self._variable.shape, self.dtype)
        whole[self._inside] = values
        self._variable.assign(spread(whole, self._mesh, self._spec))


class FetchedVariable:
    """The array of a `SpreadVariable` in the host's memory, or with `keeps=False` only its collective."""

    def __init__(self, variable, keeps=True):
        values = variable.numpy()
        self._values = values if keeps else None

    def numpy(self):
        return self._values


class Snapshot:
    """Variables of an engine in the host's memory; see `Engine.to_save`."""

    def __init__(self, engine, keeps):
        self._weights, self._training_state = (
            {name: FetchedVariable(variable, keeps) for name, variable in variables.items()}
            for variables in (engine.weights(), engine.training_state())
        )

    def weights(self):
        return self._weights

    def training_state(self):
        return self._training_state


class LaidDense(keras.layers.Dense):
    """A linear layer whose product is the layout's. Columns beyond `width` are padding, initialised to 0."""

    def __init__(self, layout, width, kernel_initializer, split, **kwargs):
        self.layout = layout
        self.split = split
        self.width = width
        units = layout.padded_width(width)
        super().__init__(units, kernel_initializer=_padded(kernel_initializer, 1, width), **kwargs)

    def build(self, input_shape):
        super().build(input_shape)
        specs = self.layout.splits.get(self.split, (None, None))
        self.layout.note(self.kernel, (input_shape[-1], self.width), specs[0])
        if self.bias is not None:
            self.layout.note(self.bias, (self.width,), specs[1])

    def call(self, inputs):
        (outputs,) = self.layout.apply_together([self], [inputs])
        return outputs


class MeshLayout(Layout):
    """Base class of layouts. A subclass has the attributes, `multiply`, `check`, `look_up` and `_logits`.

    Args:
        mesh: `jax.sharding.Mesh` with the axes of `AXES`.
        row_divisor: Divisor of a table's rows, padding included.
        column_divisor: Divisor of the columns of a linear layer's kernel, padding included.

    Attributes:
        name: Value of `--layout`.
        pack_axes: Axes of the mesh along which packs are divided.
        splits: Dict from `layout.COLUMNS` and `layout.ROWS` to the `PartitionSpec`s of such a linear layer's
            kernel and bias.
        vocabulary: `PartitionSpec`s of a table of the vocabulary, and of its bias.
        by_axes: Dict from a number of axes to the `PartitionSpec` of all other weights that have as many;
            those that are missing are replicated.
        heads, ids: `PartitionSpec`s of attention's heads `[B, S, N, H]` and of ids `[B, S]`.
    """

    name, pack_axes = None, ()
    splits, vocabulary, by_axes = {}, (None, None), {}
    heads, ids = None, None

    def __init__(self, mesh, row_divisor, column_divisor=1):
        self.mesh = mesh
        self._row_divisor, self._column_divisor = row_divisor, column_divisor
        self._noted = {}  # by id of a variable that this layout has made

    def spec(self, weight):
        """`PartitionSpec` of a Keras variable."""
        if not weight.trainable:  # the seed of a dropout has an axis, too
            return PartitionSpec()
        _, _, spec = self._noted.get(id(weight), (weight, None, None))
        if spec is not None:
            return spec
        spec = self._usual_spec(len(weight.shape))
        sides = [self.mesh.shape[axis] for axis in spec]
        # A layer of a user's block may have any shape
        divides = all(size % side == 0 for size, side in zip(weight.shape, sides, strict=False))
        return spec if divides else PartitionSpec()

    def _usual_spec(self, num_axes):
        return self.by_axes.get(num_axes, PartitionSpec())

    def padded_rows(self, num_rows):
        """Rows of a table, padding included."""
        return -(-num_rows // self._row_divisor) * self._row_divisor

    def padded_width(self, width):
        """Columns of a linear layer's kernel, padding included."""
        return -(-width // self._column_divisor) * self._column_divisor

    def multiply(self, split, inputs_BQX, kernels):
        """Products of one input with the kernels of linear layers of a split: list of `[B, Q, Y]`."""
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

    def dense(self, width, config, name, dtype=None, weights=None, use_bias=True, split=None):
        weights = weights or initializer(config)
        return LaidDense(self, width, weights, split, use_bias=use_bias, name=name, dtype=dtype)

    def apply_together(self, layers, inputs):
        products = self.multiply(layers[0].split, inputs[0], [layer.kernel for layer in layers])
        return [
            (product if layer.bias is None else product + layer.bias)[..., : layer.width]
            for product, layer in zip(products, layers, strict=True)
        ]

    def apply_in_parts(self, layer, num_parts, hidden_BSD):
        # The kernel is cut, not the result, which has more numbers. By `check` devices divide each part
        products = self.multiply(layer.split, hidden_BSD, ops.split(layer.kernel, num_parts, axis=1))
        if layer.bias is None:
            return products
        biases = ops.split(ops.convert_to_tensor(layer.bias), num_parts)
        return [product + bias for product, bias in zip(products, biases, strict=True)]

    def add_table(self, layer, num_rows, config, name, weights=None, is_vocabulary=False):
        spec = (is_vocabulary and self.vocabulary[0]) or self._usual_spec(2)
        shape = (self.padded_rows(num_rows) if tuple(spec) else num_rows, config.hidden_size)
        rows = _padded(weights or initializer(config), 0, num_rows)
        table = layer.add_weight(shape=shape, initializer=rows, name=name, autocast=False)
        self.note(table, (num_rows, config.hidden_size), spec)
        return table

    def add_vocabulary_bias(self, layer, config, name):
        shape = (self.padded_rows(config.vocab_size),)
        bias = layer.add_weight(shape=shape, initializer="zeros", name=name, autocast=False)
        self.note(bias, (config.vocab_size,), self.vocabulary[1])
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

    def note(self, variable, shape, spec):
        """Remember a variable's shape without its padding, and its `PartitionSpec`; None is the usual one."""
        self._noted[id(variable)] = variable, tuple(shape), spec  # held, so that no other gets its id

    def shape_of(self, variable):
        """The shape of a variable without its padding."""
        return self._noted.get(id(variable), (variable, tuple(variable.shape), None))[1]


def _padded(make, axis, number):
    """The initializer `make` for the first `number` places along an axis, 0 beyond."""

    def initialize(shape, dtype=None):
        inner = list(shape)
        inner[axis] = number
        added = [(0, 0)] * len(shape)
        added[axis] = (0, shape[axis] - number)
        return ops.pad(make(tuple(inner), dtype=dtype), added)

    return initialize
