"""Megatron: of two consecutive matrices the first is split by columns over all devices, the second by rows.

Section 2.2 of "An Efficient 2D Method for Training Super-Large Deep Learning Models". On the p devices of a
mesh:

| array | shape | sharding |
|---|---|---|
| queries, keys, values, the first layer of the feed-forward network | `[X, Y]` | Y over devices |
| the layer after each of them | `[X, Y]` | X over devices |
| token embeddings | `[V, D]` | V over devices |
| heads of attention; logits | `[B, S, N, H]`; `[B, P, V]` | N; V over devices |
| all others | | replicated |

Two sums over all devices in the forward pass of a block, and two in the backward pass.

Legend: as in `optimus`.
"""

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from bert_packed.core.settings import InputError
from bert_packed.layers.layout import COLUMNS, ROWS
from bert_packed.parallel.mesh_layout import MeshLayout, differentiable
from bert_packed.parallel.replicas import AXIS
from bert_packed.parallel.summa import COLUMN, ROW

ALL = (ROW, COLUMN)  # as one axis
WHOLE = PartitionSpec()
BY_COLUMNS, BY_ROWS, VECTOR = PartitionSpec(None, ALL), PartitionSpec(ALL, None), PartitionSpec(ALL)
SPLITS = {COLUMNS: (BY_COLUMNS, VECTOR), ROWS: (BY_ROWS, WHOLE)}
LAST_SPLIT = PartitionSpec(None, None, ALL)
HEADS = PartitionSpec(None, None, ALL, None)


class Megatron1D(MeshLayout):
    """Layout of the module's table."""

    name, pack_axes = "megatron1d", (AXIS,)
    splits = SPLITS
    vocabulary = BY_ROWS, VECTOR
    heads, ids = HEADS, WHOLE

    def __init__(self, mesh):
        super().__init__(mesh)
        self.num_parts = mesh.shape[ROW] * mesh.shape[COLUMN]
        self._first = _products(mesh)
        self._second = _product_and_sum(mesh)
        self._logits = _logits(mesh)
        self._look_up = _look_up(mesh)

    def check(self, model_config, **packs):
        for name, value in packs.items():
            if value % self.mesh.shape[AXIS]:
                raise InputError(
                    f"`{name}` must be divisible by the copies of the model, {self.mesh.shape[AXIS]}. "
                    f"Received: {value} packs."
                )
        for name in ("num_attention_heads", "intermediate_size"):
            value = getattr(model_config, name)
            if value % self.num_parts:
                raise InputError(
                    f"`{name}` must be divisible by the devices of a copy for megatron1d. Received: "
                    f"{name}={value}, {self.num_parts} devices."
                )

    def padded_rows(self, num_rows):
        return -(-num_rows // self.num_parts) * self.num_parts

    def padded_width(self, width):
        return width

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


def _products(mesh):
    """Products with kernels split by columns: no exchange forward, one sum backward for all of them."""

    def forward(inputs, kernels):
        return [inputs @ kernel for kernel in kernels]

    def backward(inputs, kernels, gradients):
        terms = [gradient @ kernel.T for gradient, kernel in zip(gradients, kernels, strict=True)]
        return jax.lax.psum(sum(terms), ALL), [_to_kernel(inputs, gradient) for gradient in gradients]

    return differentiable(forward, backward, mesh, (WHOLE, BY_COLUMNS), LAST_SPLIT)


def _product_and_sum(mesh):
    """Product with a kernel split by rows: one sum forward, no exchange backward."""

    def forward(inputs, kernel):
        return jax.lax.psum(inputs @ kernel, ALL)

    def backward(inputs, kernel, gradient):
        return gradient @ kernel.T, _to_kernel(inputs, gradient)

    return differentiable(forward, backward, mesh, (LAST_SPLIT, BY_ROWS), WHOLE)


def _logits(mesh):
    """Logits of each device's part of the vocabulary."""

    def forward(hidden, table):
        return hidden @ table.T

    def backward(hidden, table, gradient):
        return jax.lax.psum(gradient @ table, ALL), _to_kernel(gradient, hidden)

    return differentiable(forward, backward, mesh, (WHOLE, BY_ROWS), LAST_SPLIT)


def _look_up(mesh):
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
