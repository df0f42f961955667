"""The chunks of `state_space_duality.py` for TPUs: two Pallas kernels with the states in the chip's memory.

A step of the grid has a chunk of a pack's tokens and a block of heads. Chunks follow in the order of time,
and the states wait on the chip. So nothing of the size of weights, `[T, T]` for each head, is ever in memory.
The forward pass also writes the states before each chunk. The backward pass takes the chunks from the last to
the first, and computes each again.

A vector of the chip has 128 lanes, a head of the published models 64 channels. So heads are computed in
groups that fill whole vectors, and a factor of one head is 0 in the lanes of the others:

    inputs of a group     [ x0 x0 x1 x1 ]                       two heads of two channels, four lanes
    outputs               weights of head 0 * [ x0 x0 0  0  ]
                        + weights of head 1 * [ 0  0  x1 x1 ]

Legend: B packs and groups per batch, S pack length, E inner width, Z states of a channel, T tokens of a
chunk, C chunks, N heads, H head width, A channels of a block, M blocks, L lanes of a group of heads, I lanes
of a vector; K columns with a token in each row, J rows with a token in each lane.
"""

import dataclasses
import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from bert_packed.architectures.mamba2 import state_space_duality
from bert_packed.kernels.tpu import calls

LANES = 128  # I
CHUNK_LENGTH = 128  # T, whatever a config says: weights of 128 tokens are whole vectors
BLOCK = 768  # A at most, unless a group has more
# Columns hold these of all heads, and the number of the sequence; rows hold sums, multiples and that number
DELTA, SUMS, ENTERING, LEAVING, MULTIPLES = range(5)


def ssd_pack(*tensors, chunk_length=CHUNK_LENGTH):
    """As `state_space_duality.ssd_pack`; products add up in float32, and are not rounded after that."""
    return state_space_duality.ssd_pack(*tensors, chunk_length=chunk_length, over_chunks=over_chunks)


def over_chunks(state_BZE, skip_B1N, *inputs):
    """As `state_space_duality.chunk_by_chunk`."""
    sums_CBNT, entering_CBNT, leaving_CBNT, x_CBTE, delta_CBTN, b_CBTZ, c_CBTZ = inputs[:7]
    multiples_CBNT, numbers_CBT = inputs[7:]
    num_chunks, num_packs, chunk_length, width = x_CBTE.shape
    num_heads, num_states = skip_B1N.shape[2], b_CBTZ.shape[3]
    head_width = width // num_heads
    # Zeros fill each head up to a part of a vector or to whole vectors, and the heads up to whole blocks
    if head_width <= LANES:
        wide = next(part for part in range(head_width, LANES + 1) if LANES % part == 0)
    else:
        wide = -(-head_width // LANES) * LANES
    group = max(1, LANES // wide)
    num_blocks, groups = calls.block_sizes(-(-num_heads // group), max(1, BLOCK // (group * wide)))
    missing = num_blocks * groups * group - num_heads
    of_batch, of_heads = (num_packs, num_blocks, num_chunks, chunk_length), (groups, group, wide)
    sizes = _Sizes(*of_batch, num_states, *of_heads, x_CBTE.dtype)

    def of_channels(values):
        """`[any, any, E]`, filled up."""
        values = values.reshape(*values.shape[:2], num_heads, head_width)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, missing), (0, wide - head_width)))
        return values.reshape(*values.shape[:2], -1)

    def without_filling(values):
        values = values.reshape(*values.shape[:2], -1, wide)[:, :, :num_heads, :head_width]
        return values.reshape(*values.shape[:2], width)

    def of_tokens(values_CBTY):
        values_BCTY = values_CBTY.swapaxes(0, 1)
        return values_BCTY.reshape(num_packs, num_chunks * chunk_length, -1)

    def of_blocks(values_CBNT):
        values_CBNT = jnp.pad(values_CBNT, ((0, 0), (0, 0), (0, missing), (0, 0)))
        return values_CBNT.reshape(num_chunks, num_packs, sizes.num_blocks, -1, chunk_length)

    numbers_CBM1T = jnp.repeat(numbers_CBT[:, :, None, None], sizes.num_blocks, axis=2)
    columns = [delta_CBTN.swapaxes(2, 3), sums_CBNT, entering_CBNT, leaving_CBNT, multiples_CBNT]
    columns_CBMKT = jnp.concatenate([*map(of_blocks, columns), numbers_CBM1T], axis=3)
    rows_CBMJT = jnp.concatenate([*map(of_blocks, (sums_CBNT, multiples_CBNT)), numbers_CBM1T], axis=3)
    y_BSE, state_BZE = _scan(
        of_channels(of_tokens(x_CBTE)),
        of_tokens(b_CBTZ),
        of_tokens(c_CBTZ),
        of_channels(jnp.repeat(skip_B1N, head_width, axis=2)),
        columns_CBMKT.transpose(1, 2, 0, 4, 3),
        rows_CBMJT.transpose(1, 2, 0, 3, 4),
        of_channels(state_BZE),
        sizes,
    )
    y_BCTE = without_filling(y_BSE).reshape(num_packs, num_chunks, chunk_length, width)
    return y_BCTE.swapaxes(0, 1), without_filling(state_BZE)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    num_packs: int  # B
    num_blocks: int  # M
    num_chunks: int  # C
    chunk_length: int  # T
    num_states: int  # Z
    groups: int  # of a block
    group: int  # heads of a group
    head_width: int  # H, filled up
    dtype: jnp.dtype  # of the factors of products

    @property
    def lanes(self):
        return self.group * self.head_width  # L

    @property
    def heads(self):
        return self.groups * self.group  # of a block

    @property
    def width(self):
        return self.heads * self.head_width  # A


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _scan(x_BSE, b_BSZ, c_BSZ, skip_B1E, columns_BMCTK, rows_BMCJT, state_BZE, sizes):
    return _forward(x_BSE, b_BSZ, c_BSZ, skip_B1E, columns_BMCTK, rows_BMCJT, state_BZE, sizes)[0]


def _forward(x_BSE, b_BSZ, c_BSZ, skip_B1E, columns_BMCTK, rows_BMCJT, state_BZE, sizes):
    inputs = x_BSE, b_BSZ, c_BSZ, skip_B1E, columns_BMCTK, rows_BMCJT
    blocks = _Blocks(sizes, lambda chunk: chunk)
    before_BCZE = jax.ShapeDtypeStruct((sizes.num_packs, sizes.num_chunks, *state_BZE.shape[1:]), jnp.float32)
    y_BSE, after_BZE, before_BCZE = _call(
        _forward_kernel,
        "duality",
        sizes,
        inputs=[*blocks.inputs(*inputs), (state_BZE, blocks.states)],
        outputs=[
            (jax.ShapeDtypeStruct(x_BSE.shape, jnp.float32), blocks.channels),
            (state_BZE, blocks.states),
            (before_BCZE, blocks.borders),
        ],
        scratch=[],
        products=(1, 2, 1),
    )
    return (y_BSE, after_BZE), (inputs, before_BCZE)


def _backward(sizes, kept, gradients):
    inputs, before_BCZE = kept
    x_BSE, b_BSZ, _, skip_B1E, columns_BMCTK, rows_BMCJT = inputs
    dy_BSE, dafter_BZE = gradients  # the states at the end are data of the next pack
    blocks = _Blocks(sizes, lambda chunk: sizes.num_chunks - 1 - chunk)
    of_blocks = jax.ShapeDtypeStruct((sizes.num_blocks, *b_BSZ.shape), jnp.float32)
    dx_BSE, db_MBSZ, dc_MBSZ, dskip_B1E, dcolumns_BMCTK, drows_BMCJT = _call(
        _backward_kernel,
        "duality_backward",
        sizes,
        inputs=[*blocks.inputs(*inputs), (before_BCZE, blocks.borders), (dy_BSE, blocks.channels)],
        outputs=[
            (x_BSE, blocks.channels),
            (of_blocks, blocks.sums),
            (of_blocks, blocks.sums),
            (skip_B1E, blocks.skips),
            (columns_BMCTK, blocks.columns(columns_BMCTK)),
            (rows_BMCJT, blocks.rows(rows_BMCJT)),
        ],
        scratch=[(sizes.num_states, sizes.width)],
        products=(3, 5, 2),
    )
    db_BSZ, dc_BSZ = (of_MBSZ.sum(axis=0).astype(b_BSZ.dtype) for of_MBSZ in (db_MBSZ, dc_MBSZ))
    return dx_BSE, db_BSZ, dc_BSZ, dskip_B1E, dcolumns_BMCTK, drows_BMCJT, jnp.zeros_like(dafter_BZE)


_scan.defvjp(_forward, _backward)


def _forward_kernel(
    x_TA, b_TZ, c_TZ, skip_1A, columns_TK, rows_JT, state_ZA, y_TA, after_ZA, before_ZA, sizes
):
    @pl.when(pl.program_id(2) == 0)
    def _():
        after_ZA[...] = state_ZA[...]

    before_ZA[...] = after_ZA[...]
    chunk = _Chunk(sizes, b_TZ, c_TZ, columns_TK, rows_JT)
    for group in range(sizes.groups):
        lanes = _lanes(sizes, group)
        x_TL = x_TA[:, lanes].astype("float32")
        inputs_TL = x_TL * chunk.wide(DELTA, group)
        y_TL = chunk.product("tz,zl", c_TZ[...], after_ZA[:, lanes]) * chunk.wide(ENTERING, group)
        y_TL += x_TL * skip_1A[:, lanes]
        for head in chunk.heads(group):
            weights_TT, _ = chunk.weights(head)
            y_TL += chunk.product("ts,sl", weights_TT, chunk.own(head, inputs_TL))
        y_TA[:, lanes] = y_TL
        leaving_TL = inputs_TL * chunk.wide(LEAVING, group)
        after_ZA[:, lanes] = after_ZA[:, lanes] * chunk.kept(group) + chunk.product(
            "tz,tl", b_TZ[...], leaving_TL
        )


def _backward_kernel(*refs, sizes):
    # Inputs, outputs, and arrays that stay on the chip
    x_TA, b_TZ, c_TZ, skip_1A, columns_TK, rows_JT, before_ZA, dy_TA = refs[:8]
    dx_TA, db_TZ, dc_TZ, dskip_1A, dcolumns_TK, drows_JT = refs[8:14]
    (later_ZA,) = refs[14:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        dskip_1A[...] = jnp.zeros_like(dskip_1A)
        later_ZA[...] = jnp.zeros_like(later_ZA)  # the gradient of the states after the chunk

    chunk = _Chunk(sizes, b_TZ, c_TZ, columns_TK, rows_JT)
    dcolumns_TK[...] = jnp.zeros_like(dcolumns_TK)
    drows_JT[...] = jnp.zeros_like(drows_JT)
    db_TZ[...] = jnp.zeros_like(db_TZ)
    dc_TZ[...] = jnp.zeros_like(dc_TZ)
    dproducts_TT = jnp.zeros((sizes.chunk_length,) * 2, jnp.float32)  # of C and B
    for group in range(sizes.groups):
        lanes = _lanes(sizes, group)
        x_TL, dy_TL = x_TA[:, lanes].astype("float32"), dy_TA[:, lanes]
        before_ZL, later_ZL = before_ZA[:, lanes], later_ZA[:, lanes]
        delta_TL, entering_TL, leaving_TL = (chunk.wide(which, group) for which in (DELTA, ENTERING, LEAVING))
        inputs_TL = x_TL * delta_TL
        dbefore_TL = dy_TL * entering_TL
        dleaving_TL = chunk.product("tz,zl", b_TZ[...], later_ZL)
        dinputs_TL = dleaving_TL * leaving_TL
        for head in chunk.heads(group):
            weights_TT, decays_TT = chunk.weights(head)
            dy_own_TL = chunk.own(head, dy_TL)
            dweights_TT = chunk.product("tl,sl", dy_own_TL, inputs_TL)
            dinputs_TL += chunk.product("ts,tl", weights_TT, dy_own_TL)
            dproducts_TT += dweights_TT * decays_TT
            dexponents_TT = dweights_TT * weights_TT
            chunk.put_column(dcolumns_TK, SUMS, head, dexponents_TT)
            drows_JT[head : head + 1] = -dexponents_TT.sum(axis=0, keepdims=True)
        entered_TL = chunk.product("tz,zl", c_TZ[...], before_ZL)
        # The decay of the last token is that of the states, too
        of_states_1L = (later_ZL * before_ZL).sum(axis=0, keepdims=True)
        is_last_T1 = lax.broadcasted_iota("int32", (sizes.chunk_length, 1), 0) == sizes.chunk_length - 1
        dentering_TL = dy_TL * entered_TL + jnp.where(is_last_T1, of_states_1L, 0.0)
        for head in chunk.heads(group):
            chunk.put_column(dcolumns_TK, DELTA, head, chunk.own(head, dinputs_TL * x_TL))
            chunk.put_column(dcolumns_TK, ENTERING, head, chunk.own(head, dentering_TL))
            chunk.put_column(dcolumns_TK, LEAVING, head, chunk.own(head, dleaving_TL * inputs_TL))
        dx_TA[:, lanes] = (dinputs_TL * delta_TL + dy_TL * skip_1A[:, lanes]).astype(dx_TA.dtype)
        dskip_1A[:, lanes] += (dy_TL * x_TL).sum(axis=0, keepdims=True)
        db_TZ[...] += chunk.product("tl,zl", inputs_TL * leaving_TL, later_ZL)
        dc_TZ[...] += chunk.product("tl,zl", dbefore_TL, before_ZL)
        later_ZA[:, lanes] = later_ZL * chunk.kept(group) + chunk.product("tz,tl", c_TZ[...], dbefore_TL)
    db_TZ[...] += chunk.product("ts,tz", dproducts_TT, c_TZ[...])
    dc_TZ[...] += chunk.product("ts,sz", dproducts_TT, b_TZ[...])


class _Chunk:
    """Computations of a chunk that both kernels share."""

    def __init__(self, sizes, b_TZ, c_TZ, columns_TK, rows_JT):
        self.sizes, self.columns_TK, self.rows_JT = sizes, columns_TK, rows_JT
        length = sizes.chunk_length
        self.products_TT = self.product("tz,sz", c_TZ[...], b_TZ[...])  # once for all heads
        is_past_TT = lax.broadcasted_iota("int32", (length, length), 0) >= lax.broadcasted_iota(
            "int32", (length, length), 1
        )
        numbers_T1, numbers_1T = columns_TK[:, -1:], rows_JT[-1:]
        self.is_own_TT = jnp.logical_and(numbers_T1 == numbers_1T, is_past_TT)
        self.head_of_lane_1L = lax.broadcasted_iota("int32", (1, sizes.lanes), 1) // sizes.head_width

    def product(self, axes, one, other):
        """A product of matrices in the dtype of x, summed in float32."""
        left, right = axes.split(",")
        (shared,) = set(left) & set(right)
        return lax.dot_general(
            one.astype(self.sizes.dtype),
            other.astype(self.sizes.dtype),
            (((left.index(shared),), (right.index(shared),)), ((), ())),
            # The chip's products of float32 are otherwise those of bfloat16
            precision=lax.Precision.HIGHEST if self.sizes.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    def heads(self, group):
        return range(group * self.sizes.group, (group + 1) * self.sizes.group)

    def own(self, head, values_TL):
        """Values, 0 in the lanes of the other heads."""
        if self.sizes.group == 1:
            return values_TL
        return jnp.where(self.head_of_lane_1L == head % self.sizes.group, values_TL, 0.0)

    def _column(self, which, head):
        place = which * self.sizes.heads + head
        return self.columns_TK[:, place : place + 1]

    def put_column(self, columns_TK, which, head, values):
        """Put the sums of rows into a column."""
        place = which * self.sizes.heads + head
        lanes_TK = lax.broadcasted_iota("int32", columns_TK.shape, 1)
        columns_TK[...] = jnp.where(lanes_TK == place, values.sum(axis=1, keepdims=True), columns_TK[...])

    def wide(self, which, group):
        """A number of each token and head, for the head's channels: `[T, L]`."""
        first, *others = self.heads(group)
        values_TL = jnp.broadcast_to(self._column(which, first), (self.sizes.chunk_length, self.sizes.lanes))
        for number, head in enumerate(others, 1):
            values_TL = jnp.where(self.head_of_lane_1L == number, self._column(which, head), values_TL)
        return values_TL

    def kept(self, group):
        """Share of the states before the chunk that is left after it: `[1, L]`."""
        return self.wide(ENTERING, group)[-1:]

    def weights(self, head):
        """Weights of a head, and the decays in them."""
        row, length = self.rows_JT, self.sizes.heads
        sums_TT = self._column(SUMS, head) - row[head : head + 1]
        multiples_TT = self._column(MULTIPLES, head) - row[length + head : length + head + 1]
        decays_TT = jnp.exp(jnp.where(self.is_own_TT, multiples_TT + sums_TT, float("-inf")))
        return self.products_TT * decays_TT, decays_TT


def _lanes(sizes, group):
    return slice(group * sizes.lanes, (group + 1) * sizes.lanes)


class _Blocks:
    """Blocks of arrays for a step: of a pack, some heads and, by `order` of its number, a chunk."""

    def __init__(self, sizes, order):
        length, states, width = sizes.chunk_length, sizes.num_states, sizes.width
        self.channels = pl.BlockSpec((None, length, width), lambda b, m, c: (b, order(c), m))
        self.tokens = pl.BlockSpec((None, length, states), lambda b, m, c: (b, order(c), 0))
        self.sums = pl.BlockSpec((None, None, length, states), lambda b, m, c: (m, b, order(c), 0))
        self.skips = pl.BlockSpec((None, 1, width), lambda b, m, c: (b, 0, m))
        self.states = pl.BlockSpec((None, states, width), lambda b, m, c: (b, 0, m))
        self.borders = pl.BlockSpec((None, None, states, width), lambda b, m, c: (b, order(c), 0, m))
        self._order = order

    def columns(self, columns_BMCTK):
        return pl.BlockSpec(
            (None, None, None, *columns_BMCTK.shape[3:]), lambda b, m, c: (b, m, self._order(c), 0, 0)
        )

    rows = columns

    def inputs(self, x_BSE, b_BSZ, c_BSZ, skip_B1E, columns_BMCTK, rows_BMCJT):
        """Inputs of both kernels: pairs of an array and its block."""
        return [
            (x_BSE, self.channels),
            (b_BSZ, self.tokens),
            (c_BSZ, self.tokens),
            (skip_B1E, self.skips),
            (columns_BMCTK, self.columns(columns_BMCTK)),
            (rows_BMCJT, self.rows(rows_BMCJT)),
        ]


def _call(kernel, name, sizes, inputs, outputs, scratch, products):
    """Run a kernel; a step has `products` of [T, T, Z] operations, of [T, Z, A] and, by head, [T, T, L]."""
    grid = sizes.num_packs, sizes.num_blocks, sizes.num_chunks
    length, states = sizes.chunk_length, sizes.num_states
    of_products = length * states, states * sizes.width, length * sizes.lanes * sizes.heads
    flops = sum(2 * length * count * size for count, size in zip(products, of_products, strict=True))
    return calls.call(
        functools.partial(kernel, sizes=sizes),
        name,
        grid,
        inputs,
        outputs,
        scratch,
        math.prod(grid) * flops,
        math.prod(grid) * length * length * sizes.heads,
    )
