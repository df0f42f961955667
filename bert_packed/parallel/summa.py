"""SUMMA: products of matrices in blocks on a square mesh of devices. Section 2.4 of "An Efficient 2D Method
for Training Super-Large Deep Learning Models".

Device (i, j) of a mesh of q x q holds the block (i, j) of every matrix. Three products are each other's
gradients:

    C = AB      dA = dC B^T     dB = A^T dC        equation 1
    C = A^T B   dA = B dC^T     dB = A dC          equation 2
    C = AB^T    dA = dC B       dB = dC^T A        equation 3

In C = AB with q = 2, device (0, 1) needs its row of A and its column of B:

    A  a00 a01     B  b00 b01     C  .  a00 b01 + a01 b11
       a10 a11        b10 b11        .  .

There are three transports of blocks. `Gather` takes one collective for each matrix and then holds a whole
row or column of blocks. `Ring` passes the same bytes from neighbour to neighbour and never holds a row of
the wide matrix: for logits over a vocabulary. `Tree` sends each block along a tree, as the paper counts.

All of this runs inside `jax.shard_map`, on the blocks of one device.

Legend: T tokens of a device; X, Y widths of a device's blocks; V rows of a device's block of a table.
"""

import jax
from jax import numpy as jnp

ROW, COLUMN = "row", "col"  # axes of the mesh; devices of one row differ in their place along COLUMN


class Gather:
    """One all-gather or reduce-scatter for each matrix."""

    name = "gather"

    def ab(self, a_TX, b_XY):
        """C = AB, Algorithm 1: float `[T, Y]`, this device's block."""
        row = jax.lax.all_gather(a_TX, COLUMN, axis=1, tiled=True)
        return row @ jax.lax.all_gather(b_XY, ROW, axis=0, tiled=True)

    def abt(self, a_TX, b_YX):
        """C = AB^T, Algorithm 2: float `[T, Y]`, this device's block."""
        column = jax.lax.all_gather(b_YX, ROW, axis=0, tiled=True)
        return jax.lax.psum_scatter(a_TX @ column.T, COLUMN, scatter_dimension=1, tiled=True)

    def atb(self, a_TX, b_TY):
        """C = A^T B, Algorithm 3: float `[X, Y]`, this device's block."""
        row = jax.lax.all_gather(a_TX, COLUMN, axis=1, tiled=True)
        return jax.lax.psum_scatter(row.T @ b_TY, ROW, scatter_dimension=0, tiled=True)

    def rows(self, table_VX, ids_T):
        """AB where row t of A is 1 at place `ids_T[t]`, 0 elsewhere: float `[T, X]`."""
        return jnp.take(jax.lax.all_gather(table_VX, ROW, axis=0, tiled=True), ids_T, axis=0)

    def rows_transposed(self, ids_T, gradient_TX, num_rows):
        """A^T B for the A of `rows`: float `[num_rows, X]`, the block of the table's gradient."""
        sums = jnp.zeros((num_rows * size(ROW), gradient_TX.shape[1]), gradient_TX.dtype)
        sums = sums.at[ids_T].add(gradient_TX)
        return jax.lax.psum_scatter(sums, ROW, scatter_dimension=0, tiled=True)


class Ring(Gather):
    """As `Gather`, but blocks of A or C go round a row of devices, so that each holds one at a time."""

    name = "ring"

    def ab(self, a_TX, b_XY):
        column = jax.lax.all_gather(b_XY, ROW)
        return sum(block @ column[place] for place, block in _going_round(a_TX, COLUMN))

    def abt(self, a_TX, b_YX):
        column = jax.lax.all_gather(b_YX, ROW)
        number, place = size(COLUMN), jax.lax.axis_index(COLUMN)
        total = None
        for step in range(number):
            # The term of the device that the sum reaches with the last step
            term = a_TX @ column[(place + number - 1 - step) % number].T
            total = term if total is None else term + _shifted(total, COLUMN, 1)
        return total

    def atb(self, a_TX, b_TY):
        column = jnp.zeros((size(COLUMN), a_TX.shape[1], b_TY.shape[1]), b_TY.dtype)
        for place, block in _going_round(a_TX, COLUMN):
            column = column.at[place].set(block.T @ b_TY)
        return jax.lax.psum_scatter(column, ROW, scatter_dimension=0)


class Tree:
    """Broadcasts and reductions along binomial trees: ceil(log2(q)) sends of a block, equation 4."""

    name = "tree"

    def ab(self, a_TX, b_XY):
        return sum(broadcast(a_TX, COLUMN, root) @ broadcast(b_XY, ROW, root) for root in range(size(COLUMN)))

    def abt(self, a_TX, b_YX):
        return _reduced_in_turn(lambda root: a_TX @ broadcast(b_YX, ROW, root).T, COLUMN)

    def atb(self, a_TX, b_TY):
        return _reduced_in_turn(lambda root: broadcast(a_TX, COLUMN, root).T @ b_TY, ROW)

    def rows(self, table_VX, ids_T):
        total = 0
        for root in range(size(ROW)):
            block = broadcast(table_VX, ROW, root)
            places = ids_T - root * len(block)
            is_here = (places >= 0) & (places < len(block))
            total += jnp.where(is_here[:, None], jnp.take(block, places, axis=0, mode="clip"), 0)
        return total

    def rows_transposed(self, ids_T, gradient_TX, num_rows):
        def block(root):
            places = ids_T - root * num_rows
            # Places past the end are dropped; negative ones would count from the end
            places = jnp.where(places < 0, num_rows, places)
            sums = jnp.zeros((num_rows, gradient_TX.shape[1]), gradient_TX.dtype)
            return sums.at[places].add(gradient_TX, mode="drop")

        return _reduced_in_turn(block, ROW)


TRANSPORTS = {transport.name: transport for transport in (Gather(), Ring(), Tree())}


def size(axis):
    return jax.lax.axis_size(axis)


def broadcast(block, axis, root):
    """The block of device `root`, on all devices along an axis.

    root 0 of 4    round 1: 0 > 1    round 2: 0 > 2, 1 > 3
    """
    distance = (jax.lax.axis_index(axis) - root) % size(axis)
    for reach in _reaches(axis):
        received = jax.lax.ppermute(block, axis, _sends(axis, root, reach))
        block = jnp.where(distance >= reach, received, block)  # devices farther away receive it later
    return block


def reduce(term, axis, root):
    """The sum of all terms along an axis, on device `root`; the others are left with partial sums.

    root 0 of 4    round 1: 2 > 0, 3 > 1    round 2: 1 > 0
    """
    for reach in reversed(_reaches(axis)):
        back = [(receiver, sender) for sender, receiver in _sends(axis, root, reach)]
        # A device to which none sends receives zeros
        term = term + jax.lax.ppermute(term, axis, back)
    return term


def _reaches(axis):
    """1, 2, 4, ...: distances of the rounds of a tree."""
    return [2**round_ for round_ in range((size(axis) - 1).bit_length())]


def _sends(axis, root, reach):
    """(sender, receiver) of a round: each device that was reached sends to one more."""
    number = size(axis)
    return [
        ((root + sender) % number, (root + sender + reach) % number)
        for sender in range(min(reach, number - reach))
    ]


def _reduced_in_turn(make, axis):
    """The sum of `make(l)` of all devices along an axis, on device l."""
    place, total = jax.lax.axis_index(axis), None
    for root in range(size(axis)):
        found = reduce(make(root), axis, root)
        total = found if total is None else jnp.where(place == root, found, total)
    return total


def _going_round(block, axis):
    """Pairs of place and block of all devices along an axis, one at a time."""
    number, place = size(axis), jax.lax.axis_index(axis)
    for step in range(number):
        yield (place + step) % number, block
        if step + 1 < number:
            block = _shifted(block, axis, -1)


def _shifted(block, axis, by):
    number = size(axis)
    return jax.lax.ppermute(block, axis, [(place, (place + by) % number) for place in range(number)])
