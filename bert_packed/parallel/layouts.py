"""Layouts of a model over a mesh, Optimus and Megatron, and the choice by `--layout`.

Both are of "An Efficient 2D Method for Training Super-Large Deep Learning Models". Optimus, Section 3.2, has
weights and activations in blocks on a square mesh of q x q = p devices, multiplied by SUMMA:

| array | shape | sharding |
|---|---|---|
| kernels, tables of embeddings | `[X, Y]` | X over rows, Y over columns: 1/p on a device |
| biases, scales and shifts of norms | `[Y]` | Y over columns, the same in every row |
| hidden states, logits | `[B, S, D]`, `[B, P, V]` | B over rows, D or V over columns |
| heads of attention | `[B, S, N, H]` | B over rows, N over columns |
| ids, positions, labels | `[B, ...]` | B over rows |

The paper keeps biases in the first row alone and broadcasts them; here each row has them, and their gradient
is added up over the rows. All but products with weights is left to XLA's partitioner.

Megatron, Section 2.2, splits the first of two consecutive matrices by columns over all p devices of a mesh,
the second by rows:

| array | shape | sharding |
|---|---|---|
| queries, keys, values, the first layer of the feed-forward network | `[X, Y]` | Y over devices |
| the layer after each of them | `[X, Y]` | X over devices |
| token embeddings | `[V, D]` | V over devices |
| heads of attention; logits | `[B, S, N, H]`; `[B, P, V]` | N; V over devices |
| all others | | replicated |

Two sums over all devices in the forward pass of a block, and two in the backward pass.

Legend: B packs, S pack length, D model width, N heads, H head width, V vocabulary, P predictions per pack,
Q = S, P or K tokens of each pack, T tokens of a device, X, Y widths.
"""

import itertools

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from bert_packed.core.settings import InputError
from bert_packed.layers.layout import COLUMNS, ROWS
from bert_packed.parallel.mesh_layout import MeshLayout, differentiable, make_mesh
from bert_packed.parallel.replicas import (
    AXIS,
    Replicas,
    check_divides,
    check_processes,
    count_replicas,
    num_processes,
)
from bert_packed.parallel.summa import COLUMN, ROW, TRANSPORTS

# Optimus shards arrays over both axes
BLOCKS = PartitionSpec(ROW, COLUMN)
BY_AXES = {1: PartitionSpec(COLUMN), 2: BLOCKS}
HIDDEN, IDS = PartitionSpec(ROW, None, COLUMN), PartitionSpec(ROW)
# Megatron shards them over both axes as one
ALL = (ROW, COLUMN)  # as one axis
WHOLE = PartitionSpec()
BY_COLUMNS, BY_ROWS, BY_PARTS = PartitionSpec(None, ALL), PartitionSpec(ALL, None), PartitionSpec(ALL)
SPLITS = {COLUMNS: (BY_COLUMNS, BY_PARTS), ROWS: (BY_ROWS, WHOLE)}
LAST_SPLIT = PartitionSpec(None, None, ALL)


def make_layout_replicas(layout, mesh_shape, transport="gather", distribution="none", target=None):
    """`Replicas` of "optimus2d" or "megatron1d" on a mesh (copies of the model, rows, columns).

    Args:
        transport: Argument of `Optimus2D`.
        distribution: "none" for devices of this process, "multi_worker" for those of all processes.
        target: `Target` whose devices it is where they need not be here.

    Raises:
        InputError: the devices do not make the mesh.
    """
    devices = target and target.devices
    if not devices:
        devices = jax.devices() if distribution == "multi_worker" else jax.local_devices()
    # A process has consecutive devices, so that its packs follow from its number alone, `group_of`
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    mesh = make_mesh(mesh_shape, devices)
    num = count_replicas(layout, mesh_shape)
    check_processes(num_processes(mesh), num)
    chosen = Optimus2D(mesh, transport) if layout == "optimus2d" else Megatron1D(mesh)
    num_local, on_cpus = max(num // num_processes(mesh), 1), devices[0].platform == "cpu"
    return Replicas(num, num_local, on_cpus, mesh=mesh, layout=chosen)


class Optimus2D(MeshLayout):
    """Optimus, by SUMMA; `transport` is one of `summa.TRANSPORTS`.

    Raises:
        InputError: the mesh is not square.
    """

    name, pack_axes = "optimus2d", (AXIS, ROW)
    by_axes = BY_AXES
    heads, ids = PartitionSpec(ROW, None, COLUMN, None), IDS

    def __init__(self, mesh, transport="gather"):
        self.side = mesh.shape[ROW]
        super().__init__(mesh, row_divisor=self.side, column_divisor=self.side)
        if mesh.shape[COLUMN] != self.side:
            raise InputError(
                "`mesh` must have as many rows as columns for optimus2d. Received: "
                f"{mesh.shape[ROW]} rows, {mesh.shape[COLUMN]} columns."
            )
        chosen = TRANSPORTS[transport]
        self._multiply = _products(mesh, chosen)
        # Logits are never gathered: a row of them is the largest array of a step
        self._logits = _logits(mesh, TRANSPORTS["ring"] if transport == "gather" else chosen)
        self._look_up = _look_up(mesh, chosen)

    def check(self, model_config, **packs):
        copies, side = self.mesh.shape[AXIS], self.side
        rule = f"the copies of the model times the rows of the mesh, {copies} x {side}"
        check_divides(copies * side, packs, rule, "{value} packs")
        sizes = _sizes(model_config, "hidden_size", "num_attention_heads", "intermediate_size")
        rule = "the side of the mesh for optimus2d"
        check_divides(side, sizes, rule, f"{{name}}={{value}}, a side of {side}")

    def multiply(self, split, inputs_BQX, kernels):
        return self._multiply(inputs_BQX, list(map(jnp.asarray, kernels)))

    def look_up(self, table, ids_BS):
        return self._look_up(jnp.asarray(table), ids_BS)


def _products(mesh, transport):
    """C = AB for one A and several B, whose blocks are joined, so that A is sent once."""

    def forward(inputs, kernels):
        inputs, kernels = _sent_here(inputs, kernels)
        products = transport.ab(_tokens(inputs), jnp.concatenate(kernels, axis=1))
        return _split(products, kernels, inputs.shape[:-1])

    def backward(inputs, kernels, gradients):
        inputs, kernels, gradients = _sent_here(inputs, kernels, gradients)
        gradient = jnp.concatenate([_tokens(one) for one in gradients], axis=1)
        to_inputs = transport.abt(gradient, jnp.concatenate(kernels, axis=1))
        to_kernels = transport.atb(_tokens(inputs), gradient)
        return to_inputs.reshape(inputs.shape), _split(to_kernels, kernels, (inputs.shape[-1],))

    return differentiable(forward, backward, mesh, (HIDDEN, BLOCKS), HIDDEN)


def _logits(mesh, transport):
    """C = AB^T, of hidden states and a table."""

    def forward(hidden, table):
        hidden, table = _sent_here(hidden, table)
        return transport.abt(_tokens(hidden), table).reshape(*hidden.shape[:-1], -1)

    def backward(hidden, table, gradient):
        hidden, table, gradient = _sent_here(hidden, table, gradient)
        gradient = _tokens(gradient)
        to_hidden = transport.ab(gradient, table)
        return to_hidden.reshape(hidden.shape), transport.atb(gradient, _tokens(hidden))

    return differentiable(forward, backward, mesh, (HIDDEN, BLOCKS), HIDDEN)


def _look_up(mesh, transport):
    """C = AB where ids are the places of the ones in A."""

    def forward(table, ids):
        table, ids = _sent_here(table, ids)
        return transport.rows(table, ids.reshape(-1)).reshape(*ids.shape, -1)

    def backward(table, ids, gradient):
        return transport.rows_transposed(ids.reshape(-1), _tokens(gradient), len(table)), None

    return differentiable(forward, backward, mesh, (BLOCKS, IDS), HIDDEN)


def _sent_here(*blocks):
    """The same blocks behind a barrier of XLA."""
    # XLA may otherwise gather the weights of all layers before the first is computed, and keep for the
    # gradient what a device received in the forward pass: it would hold more than 1/p of the weights
    return jax.lax.optimization_barrier(blocks)


def _tokens(values):
    """`[..., X]` to `[T, X]`."""
    return values.reshape(-1, values.shape[-1])


def _split(joined, kernels, lengths):
    """List of the products with each kernel, `[*lengths, Y]`, of the joined product."""
    ends = list(itertools.accumulate(kernel.shape[1] for kernel in kernels))
    return [part.reshape(*lengths, -1) for part in jnp.split(joined, ends[:-1], axis=1)]


class Megatron1D(MeshLayout):
    """Megatron: of two consecutive matrices the first is split by columns, the second by rows."""

    name, pack_axes = "megatron1d", (AXIS,)
    splits = SPLITS
    vocabulary = BY_ROWS, BY_PARTS
    heads, ids = PartitionSpec(None, None, ALL, None), WHOLE

    def __init__(self, mesh):
        self.num_parts = mesh.shape[ROW] * mesh.shape[COLUMN]
        super().__init__(mesh, row_divisor=self.num_parts)
        self._first = _products_by_columns(mesh)
        self._second = _product_by_rows(mesh)
        self._logits = _logits_in_parts(mesh)
        self._look_up = _look_up_in_parts(mesh)

    def check(self, model_config, **packs):
        copies, parts = self.mesh.shape[AXIS], self.num_parts
        check_divides(copies, packs, f"the copies of the model, {copies}", "{value} packs")
        sizes = _sizes(model_config, "num_attention_heads", "intermediate_size")
        rule = "the devices of a copy for megatron1d"
        check_divides(parts, sizes, rule, f"{{name}}={{value}}, {parts} devices")

    def multiply(self, split, inputs_BQX, kernels):
        kernels = list(map(jnp.asarray, kernels))
        if split == COLUMNS:
            return self._first(inputs_BQX, kernels)
        if split == ROWS:
            (kernel,) = kernels
            return [self._second(inputs_BQX, kernel)]
        return [inputs_BQX @ kernel for kernel in kernels]

    def look_up(self, table, ids_BS):
        if self.spec(table) == WHOLE:
            return super().look_up(table, ids_BS)
        return self._look_up(jnp.asarray(table), ids_BS)


def _sizes(model_config, *names):
    return {name: getattr(model_config, name) for name in names}


def _products_by_columns(mesh):
    """Products with kernels split by columns: no exchange forward, one sum backward for all of them."""

    def forward(inputs, kernels):
        return [inputs @ kernel for kernel in kernels]

    def backward(inputs, kernels, gradients):
        terms = [gradient @ kernel.T for gradient, kernel in zip(gradients, kernels, strict=True)]
        return jax.lax.psum(sum(terms), ALL), [_to_kernel(inputs, gradient) for gradient in gradients]

    return differentiable(forward, backward, mesh, (WHOLE, BY_COLUMNS), LAST_SPLIT)


def _product_by_rows(mesh):
    """Product with a kernel split by rows: one sum forward, no exchange backward."""

    def forward(inputs, kernel):
        return jax.lax.psum(inputs @ kernel, ALL)

    def backward(inputs, kernel, gradient):
        return gradient @ kernel.T, _to_kernel(inputs, gradient)

    return differentiable(forward, backward, mesh, (LAST_SPLIT, BY_ROWS), WHOLE)


def _logits_in_parts(mesh):
    """Logits of each device's part of the vocabulary."""

    def forward(hidden, table):
        return hidden @ table.T

    def backward(hidden, table, gradient):
        return jax.lax.psum(gradient @ table, ALL), _to_kernel(gradient, hidden)

    return differentiable(forward, backward, mesh, (WHOLE, BY_ROWS), LAST_SPLIT)


def _look_up_in_parts(mesh):
    """Rows of a table split by rows, by a sum over devices."""

    def places(table, ids):
        """Rows of this device's part; the number of its rows for other ids."""
        places = ids - jax.lax.axis_index(ALL) * len(table)
        return jnp.where((places >= 0) & (places < len(table)), places, len(table))

    def forward(table, ids):
        return jax.lax.psum(jnp.take(table, places(table, ids), axis=0, mode="fill", fill_value=0), ALL)

    def backward(table, ids, gradient):
        return jnp.zeros_like(table).at[places(table, ids)].add(gradient, mode="drop"), None

    return differentiable(forward, backward, mesh, (BY_ROWS, WHOLE), WHOLE)


def _to_kernel(inputs, gradient):
    """The gradient of a kernel, `[X, Y]`, of `[B, Q, X]` inputs and `[B, Q, Y]`."""
    return jnp.tensordot(inputs, gradient, ((0, 1), (0, 1)))
