"""Products of blocks on a mesh are those of whole matrices, by every transport; so are their gradients."""

import numpy as np
import pytest
from layouts import make_devices, needs_jax

from bert_packed.layers.layout import COLUMNS
from bert_packed.training.program_text import find_collectives, read_module

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
PartitionSpec = jax.sharding.PartitionSpec
pytestmark = needs_jax
BLOCKS = PartitionSpec("row", "col")
NAMES = ["gather", "ring", "tree"]


@pytest.fixture(scope="module", autouse=True)
def devices():
    make_devices()


def square(side):
    from bert_packed.parallel.mesh_layout import make_mesh

    return make_mesh((1, side, side), jax.devices())


def numbers(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def on_mesh(function, side, in_specs, out_specs):
    from bert_packed.parallel.mesh_layout import on_blocks

    return jax.jit(on_blocks(function, square(side), in_specs, out_specs))


# A tree of 3 has no whole last round
each_transport = pytest.mark.parametrize(
    ("name", "side"), [("gather", 2), ("ring", 4), ("tree", 2), ("tree", 3), ("tree", 4)]
)


@each_transport
def test_products(name, side):
    from bert_packed.parallel.summa import TRANSPORTS

    transport, rng = TRANSPORTS[name], np.random.default_rng(side)
    rows, inner, columns = 2 * side, 3 * side, 5 * side  # no two alike
    a, b = numbers(rng, rows, inner), numbers(rng, inner, columns)
    for product, one, other, want in (
        (transport.ab, a, b, a @ b),
        (transport.abt, a, b.T.copy(), a @ b),
        (transport.atb, a.T.copy(), b, a @ b),
    ):
        found = on_mesh(product, side, (BLOCKS, BLOCKS), BLOCKS)(one, other)
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@each_transport
def test_rows_of_a_table_and_their_gradient(name, side):
    from bert_packed.parallel.summa import TRANSPORTS

    transport, rng = TRANSPORTS[name], np.random.default_rng(side)
    table, ids = numbers(rng, 4 * side, 2 * side), rng.integers(0, 4 * side, 6 * side).astype(np.int32)
    ids[:3] = [0, 4 * side - 1, 4 * side - 1]  # first and last row, and one twice
    by_row = PartitionSpec("row")
    found = on_mesh(transport.rows, side, (BLOCKS, by_row), BLOCKS)(table, ids)
    np.testing.assert_array_equal(found, table[ids])
    gradient = numbers(rng, 6 * side, 2 * side)
    want = np.zeros_like(table)
    np.add.at(want, ids, gradient)
    found = on_mesh(lambda ids, one: transport.rows_transposed(ids, one, 4), side, (by_row, BLOCKS), BLOCKS)
    np.testing.assert_allclose(found(ids, gradient), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gather", {"all-gather": 2}),
        ("ring", {"all-gather": 1, "collective-permute": 3}),
        ("tree", {"collective-permute": 2 * 4 * 2}),  # A and B, four roots, two rounds each
    ],
)
def test_collectives_of_a_product(name, kinds):
    from bert_packed.parallel.summa import TRANSPORTS

    a, b = np.zeros((8, 12), np.float32), np.zeros((12, 20), np.float32)
    product = on_mesh(TRANSPORTS[name].ab, 4, (BLOCKS, BLOCKS), BLOCKS)
    found = find_collectives(read_module(product.lower(a, b).compile().as_text()))
    counts = {kind: sum(one.times for one in found if one.kind == kind) for kind in {f.kind for f in found}}
    assert counts == kinds
    for one in found:
        assert one.operand_bytes in (2 * 3 * 4, 3 * 5 * 4)  # a block of A, or of B


def layouts_of(side):
    from bert_packed.parallel.layouts import Megatron1D, Optimus2D

    mesh = square(side)
    return {**{name: Optimus2D(mesh, name) for name in NAMES}, "megatron": Megatron1D(mesh)}


@pytest.mark.parametrize("name", [*NAMES, "megatron"])
def test_gradients_of_layers(name):
    """Sums of whole arrays are the reference: several kernels at once, logits, and rows of a table."""
    layout, rng = layouts_of(2)[name], np.random.default_rng(0)
    hidden, ids = numbers(rng, 4, 3, 8), rng.integers(0, 12, (4, 3)).astype(np.int32)
    kernels, table = [numbers(rng, 8, width) for width in (4, 12, 8)], numbers(rng, 12, 8)

    class Table:
        """A table as a layer holds it."""

        trainable = True

        def __init__(self, values):
            self.values, self.shape = values, values.shape
            layout.note(self, self.shape, layout.vocabulary[0])

        def __jax_array__(self):
            return self.values

    def scored(products, logits, rows):
        return sum(
            (array * (np.arange(array.size) % 7).reshape(array.shape)).sum()
            for array in (*products, logits, rows)
        )

    def spread(hidden, kernels, table):
        products = layout.multiply(COLUMNS, hidden, kernels)
        return scored(products, layout.vocabulary_logits(hidden, table), layout.look_up(Table(table), ids))

    def whole(hidden, kernels, table):
        return scored([hidden @ kernel for kernel in kernels], hidden @ table.T, table[ids])

    found, want = (
        jax.jit(jax.grad(function, argnums=(0, 1, 2)))(hidden, kernels, table) for function in (spread, whole)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.abs(one - other).max() <= 1e-6 * np.abs(other).max()
