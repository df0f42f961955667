"""The convolution of `mamba/operators.py` for TPUs: two Pallas kernels that read each number once.

XLA makes an array of each tap, which it shifts against the tokens. Here a chunk of tokens is copied on the
chip, behind the last tokens before it, and a tap is read from there:

    place on the chip    0     1     2     3     4     5          an edge of 2 tokens, a chunk of 4
    token               -2    -1     0     1     2     3
    tap 1 back                       ^----------------^           places 1 to 4

The backward pass computes the forward one again, and takes the chunks from the last to the first: an input
has its gradient from the tokens after it, and those of the next chunk are still on the chip.

Legend: B packs per batch, S pack length, E channels, W taps, X = W - 1 tokens before a pack, T tokens of a
chunk, C chunks, H tokens of an edge, F = H + T, I lanes of a vector, A = L * I channels of a block, P tokens
of a piece, V = W + 1 weights of a channel.
"""

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from bert_packed.kernels.tpu import calls

LANES, ROWS = 128, 8  # of the chip's vectors
PIECE = 32  # P: tokens that are computed at once, in registers
CHUNK_LENGTH = 256  # T at most
BLOCK = 1024  # A at most


def conv1d_pack(x_BSE, kernel_WE, bias_E, position_ids_BS, tail_BXE=None, chunk_length=CHUNK_LENGTH):
    """As `operators.conv1d_pack`, but sums are float32, and rounded once to the dtype of `x_BSE`.

    `PIECE` divides `chunk_length`, the most tokens of a chunk.
    """
    num_packs, length, width = x_BSE.shape
    num_taps = kernel_WE.shape[0]
    edge = _whole(num_taps - 1, ROWS)
    num_chunks = -(-length // chunk_length)
    chunk_length = max(_whole(-(-length // num_chunks), PIECE), _whole(edge, PIECE))
    num_blocks, rows = calls.block_sizes(-(-width // LANES), BLOCK // LANES)
    filled, missing = -length % chunk_length, num_blocks * rows * LANES - width
    if tail_BXE is None:
        tail_BXE = jnp.zeros((num_packs, num_taps - 1, width))
    tail_BXE = tail_BXE.astype(x_BSE.dtype)
    if bias_E is None:
        bias_E = jnp.zeros(width)
    if position_ids_BS is None:  # no token is near a start
        position_ids_BS = jnp.full((num_packs, length), num_taps)
    positions_BCT = jnp.pad(position_ids_BS.astype("int32"), ((0, 0), (0, filled)))
    positions_BCT = positions_BCT.reshape(num_packs, -1, chunk_length)
    after_BCH = jnp.pad(positions_BCT[:, 1:, :edge], ((0, 0), (0, 1), (0, 0)))
    positions_BCF = jnp.concatenate([positions_BCT, after_BCH], axis=2)
    y_BSE = _convolve(
        jnp.pad(x_BSE, ((0, 0), (0, filled), (0, missing))),
        jnp.pad(tail_BXE, ((0, 0), (edge - num_taps + 1, 0), (0, missing))),
        # Positions are as wide as a vector, which one number would be in memory anyway
        jnp.broadcast_to(positions_BCF[..., None], (*positions_BCF.shape, LANES)),
        jnp.pad(jnp.concatenate([kernel_WE, bias_E[None]]).astype("float32"), ((0, 0), (0, missing))),
    )
    after_BXE = jnp.concatenate([tail_BXE, x_BSE], axis=1)[:, length:]
    return y_BSE[:, :length, :width], lax.stop_gradient(after_BXE)


@jax.custom_vjp
def _convolve(x_BSE, tail_BHE, positions_BCFI, weights_VE):
    return _forward(x_BSE, tail_BHE, positions_BCFI, weights_VE)[0]


def _forward(*inputs):
    x_BSE, _, positions_BCFI, _ = inputs
    blocks = _Blocks(x_BSE, positions_BCFI, lambda chunk: chunk)
    (y_BSE,) = blocks.call(
        _forward_kernel, "convolution", blocks.inputs(*inputs), [(x_BSE, blocks.tokens)], num_copies=1
    )
    return y_BSE, inputs


def _backward(inputs, dy_BSE):
    x_BSE, tail_BHE, positions_BCFI, weights_VE = inputs
    num_chunks = positions_BCFI.shape[1]
    blocks = _Blocks(x_BSE, positions_BCFI, lambda chunk: num_chunks - 1 - chunk)
    dweights_BVE = jax.ShapeDtypeStruct((len(x_BSE), *weights_VE.shape), jnp.float32)
    dx_BSE, dweights_BVE = blocks.call(
        _backward_kernel,
        "convolution_backward",
        [*blocks.inputs(*inputs), (dy_BSE, blocks.tokens)],
        [(x_BSE, blocks.tokens), (dweights_BVE, blocks.sums(weights_VE))],
        num_copies=2,
    )
    # The tail is data, as the states before a pack are
    return dx_BSE, jnp.zeros_like(tail_BHE), None, dweights_BVE.sum(axis=0)


_convolve.defvjp(_forward, _backward)


def _forward_kernel(x_TA, edge_HA, positions_FI, weights_VA, y_TA, x_LFI):
    def block(number, carry):
        lanes = _copy(edge_HA, x_TA, x_LFI, number)
        for piece in _pieces(x_TA):
            _, sums_PI = _sums(len(edge_HA), x_LFI, positions_FI, weights_VA, number, lanes, piece)
            y_TA[piece, lanes] = (sums_PI * jax.nn.sigmoid(sums_PI)).astype(y_TA.dtype)
        return carry

    lax.fori_loop(0, len(x_LFI), block, None)


def _backward_kernel(x_TA, edge_HA, positions_FI, weights_VA, dy_TA, dx_TA, dweights_VA, x_LFI, dsums_LFI):
    length, edge, num_taps = len(x_TA), len(edge_HA), len(weights_VA) - 1

    @pl.when(pl.program_id(2) == 0)
    def _():
        dweights_VA[...] = jnp.zeros_like(dweights_VA)

    def block(number, carry):
        lanes = _copy(edge_HA, x_TA, x_LFI, number)
        dsums_LFI[number, length:] = dsums_LFI[number, :edge]  # of the chunk before, in this order
        totals = [jnp.zeros((ROWS, LANES), jnp.float32)] * (num_taps + 1)
        for piece in _pieces(x_TA):
            taps, sums_PI = _sums(edge, x_LFI, positions_FI, weights_VA, number, lanes, piece)
            sigmoid_PI = jax.nn.sigmoid(sums_PI)
            slope_PI = sigmoid_PI * (1.0 + sums_PI * (1.0 - sigmoid_PI))
            dsums_PI = dy_TA[piece, lanes].astype("float32") * slope_PI
            dsums_LFI[number, piece] = dsums_PI
            found = [*(tap_PI * dsums_PI for tap_PI in taps), dsums_PI]
            # Vectors are added to vectors, and summed inside once at the end, which takes fewer operations
            folded = [one.reshape(-1, ROWS, LANES).sum(axis=0) for one in found]
            totals = [total + one for total, one in zip(totals, folded, strict=True)]
        *of_taps, of_bias = totals
        for place, total in enumerate([*reversed(of_taps), of_bias]):
            dweights_VA[place, lanes] += total.sum(axis=0)
        for piece in _pieces(x_TA):
            dx_PI = dsums_LFI[number, piece] * weights_VA[num_taps - 1, lanes]
            for back in range(1, num_taps):
                later = slice(piece.start + back, piece.stop + back)
                # Only later tokens count that have this one `back` tokens before them in their own sequence
                dsums_PI = jnp.where(positions_FI[later] >= back, dsums_LFI[number, later], 0.0)
                dx_PI = dx_PI + dsums_PI * weights_VA[num_taps - 1 - back, lanes]
            dx_TA[piece, lanes] = dx_PI.astype(dx_TA.dtype)
        return carry

    lax.fori_loop(0, len(x_LFI), block, None)


def _copy(edge_HA, x_TA, x_LFI, number):
    """Copy a block of lanes of a chunk behind its edge; returns the lanes."""
    lanes = pl.ds(pl.multiple_of(number * LANES, LANES), LANES)
    x_LFI[number, : len(edge_HA)] = edge_HA[:, lanes].astype("float32")
    x_LFI[number, len(edge_HA) :] = x_TA[:, lanes].astype("float32")
    return lanes


def _sums(edge, x_LFI, positions_FI, weights_VA, number, lanes, piece):
    """The taps of a piece's tokens, float32 `[P, I]` from 0 back to X back, and their weighted sum."""
    num_taps = len(weights_VA) - 1
    taps, sums_PI = [], weights_VA[num_taps, lanes]
    for back in range(num_taps):
        tap_PI = x_LFI[number, piece.start + edge - back : piece.stop + edge - back]
        if back:
            # A product with 0 would not do: a neighbour's value may be infinite
            tap_PI = jnp.where(positions_FI[piece] >= back, tap_PI, 0.0)
        taps.append(tap_PI)
        sums_PI = sums_PI + tap_PI * weights_VA[num_taps - 1 - back, lanes]
    return taps, sums_PI


def _pieces(x_TA):
    return [slice(first, first + PIECE) for first in range(0, len(x_TA), PIECE)]


def _whole(number, unit):
    """The least multiple of a unit that is no less."""
    return -(-number // unit) * unit


class _Blocks:
    """Blocks of arrays for a step: of a pack, some channels and, by `order` of its number, a chunk."""

    def __init__(self, x_BSE, positions_BCFI, order):
        (num_packs, length, width), num_chunks = x_BSE.shape, positions_BCFI.shape[1]
        num_blocks, rows = calls.block_sizes(width // LANES, BLOCK // LANES)
        self.grid = num_packs, num_blocks, num_chunks
        self.width, self.chunk_length = rows * LANES, length // num_chunks
        self.edge = positions_BCFI.shape[2] - self.chunk_length
        self.tokens = pl.BlockSpec((None, self.chunk_length, self.width), lambda b, m, c: (b, order(c), m))
        self._order = order

    def sums(self, weights_VE):
        return pl.BlockSpec((None, len(weights_VE), self.width), lambda b, m, c: (b, 0, m))

    def inputs(self, x_BSE, tail_BHE, positions_BCFI, weights_VE):
        """Inputs of both kernels: pairs of an array and its block."""
        edge, order = self.edge, self._order
        x_BCTE = x_BSE.reshape(len(x_BSE), -1, self.chunk_length, x_BSE.shape[2])
        edges_BCHE = jnp.concatenate([tail_BHE[:, None], x_BCTE[:, :-1, -edge:]], axis=1)
        return [
            (x_BSE, self.tokens),
            (edges_BCHE, pl.BlockSpec((None, None, edge, self.width), lambda b, m, c: (b, order(c), 0, m))),
            (
                positions_BCFI,
                pl.BlockSpec((None, None, *positions_BCFI.shape[2:]), lambda b, m, c: (b, order(c), 0, 0)),
            ),
            (weights_VE, pl.BlockSpec((len(weights_VE), self.width), lambda b, m, c: (0, m))),
        ]

    def call(self, kernel, name, inputs, outputs, num_copies):
        """Run a kernel with copies of a chunk and its edge on the chip."""
        copy = self.width // LANES, self.edge + self.chunk_length, LANES
        (x_BSE, _), *_ = inputs
        return calls.call(
            kernel, name, self.grid, inputs, outputs, [copy] * num_copies, transcendentals=x_BSE.size
        )
