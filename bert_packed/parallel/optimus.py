"""Optimus: weights and activations in blocks on a square mesh of devices, multiplied by SUMMA.

Section 3.2 of "An Efficient 2D Method for Training Super-Large Deep Learning Models". On a mesh of q x q:

| array | shape | sharding |
|---|---|---|
| kernels, tables of embeddings | `[X, Y]` | X over rows, Y over columns: 1/p on a device |
| biases, scales and shifts of norms | `[Y]` | Y over columns, the same in every row |
| hidden states, logits | `[B, S, D]`, `[B, P, V]` | B over rows, D or V over columns |
| heads of attention | `[B, S, N, H]` | B over rows, N over columns |
| ids, positions, labels | `[B, ...]` | B over rows |

The paper keeps biases in the first row alone and broadcasts them; here each row has them, and their gradient
is added up over the rows. All but products with weights is left to XLA's partitioner.

Legend: B packs, S pack length, D model width, N heads, H head width, V vocabulary, P predictions per pack,
Q = S, P or K tokens of each pack, T tokens of a device, X, Y widths.
"""

import itertools

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from bert_packed.core.settings import InputError
from bert_packed.parallel.mesh_layout import MeshLayout, differentiable
from bert_packed.parallel.replicas import AXIS
from bert_packed.parallel.summa import COLUMN, ROW, TRANSPORTS

BLOCKS, VECTOR = PartitionSpec(ROW, COLUMN), PartitionSpec(COLUMN)
BY_AXES = {1: VECTOR, 2: BLOCKS}
HIDDEN, HEADS, IDS = (
    PartitionSpec(ROW, None, COLUMN),
    PartitionSpec(ROW, None, COLUMN, None),
    PartitionSpec(ROW),
)


class Optimus2D(MeshLayout):
    """Layout of the module's table; `transport` is one of `summa.TRANSPORTS`.

    Raises:
        InputError: the mesh is not square.
    """

    name, pack_axes = "optimus2d", (AXIS, ROW)
    by_axes = BY_AXES
    heads, ids = HEADS, IDS

    def __init__(self, mesh, transport="gather"):
        super().__init__(mesh)
        self.side = mesh.shape[ROW]
        if mesh.shape[COLUMN] != self.side:
            raise InputError(
                "`mesh` must have as many rows as columns for optimus2d. Received: "
                f"{mesh.shape[ROW]} rows, {mesh.shape[COLUMN]} columns."
            )
        chosen = TRANSPORTS[transport]
        self._multiply = _products(mesh, chosen)
        # Never gathered: a row of logits is the largest array of a step
        self._logits = _logits(mesh, TRANSPORTS["ring"] if transport == "gather" else chosen)
        self._look_up = _look_up(mesh, chosen)

    def check(self, model_config, **packs):
        for name, value in packs.items():
            number = self.mesh.shape[AXIS] * self.side
            if value % number:
                raise InputError(
                    f"`{name}` must be divisible by the copies of the model times the rows of the mesh, "
                    f"{self.mesh.shape[AXIS]} x {self.side}. Received: {value} packs."
                )
        for name in ("hidden_size", "num_attention_heads", "intermediate_size"):
            value = getattr(model_config, name)
            if value % self.side:
                raise InputError(
                    f"`{name}` must be divisible by the side of the mesh for optimus2d. Received: "
                    f"{name}={value}, a side of {self.side}."
                )

    def padded_rows(self, num_rows):
        return -(-num_rows // self.side) * self.side

    def padded_width(self, width):
        return -(-width // self.side) * self.side

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
    # Without it XLA may gather the weights of all layers before the first is computed, and keeps for the
    # gradient what a device received in the forward pass: then a device holds more than 1/p of the weights
    return jax.lax.optimization_barrier(blocks)


def _tokens(values):
    """`[..., X]` to `[T, X]`."""
    return values.reshape(-1, values.shape[-1])


def _split(joined, kernels, lengths):
    """List of the products with each kernel, `[*lengths, Y]`, of the joined product."""
    ends = list(itertools.accumulate(kernel.shape[1] for kernel in kernels))
    return [part.reshape(*lengths, -1) for part in jnp.split(joined, ends[:-1], axis=1)]
