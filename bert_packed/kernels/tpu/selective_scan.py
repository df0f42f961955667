"""The scan of `mamba/operators.py` for TPUs: two Pallas kernels that keep the states in the chip's memory.

A step of the grid has a chunk of a pack's tokens and a block of its channels. Chunks follow in the order of
time, and the states wait on the chip. The forward pass also writes the states before each chunk to memory.
The backward pass takes the chunks from the last to the first. It computes a chunk's states again, keeps them
on the chip, and goes back through the tokens.

In memory a vector of the chip, 8 rows of 128 lanes, has 8 tokens of 128 channels. Tokens are rewritten, so
that a vector has 1,024 channels of one token. Then a number of B or C is one scalar, and a sum over states is
a sum of vectors:

    in memory                             rewritten, 8 rows for each token
    token 0   x0 .. x127   x128 .. x255   row 0   x0   .. x127    of token 0
    token 1   z0 .. z127   z128 .. z255   row 1   x128 .. x255
                                          row 8   z0   .. z127    of token 1

Legend: B packs per batch, S pack length, E inner width, Z states of a channel, T tokens of a chunk, C chunks,
I lanes, Q rows of a block of channels, A = Q * I, M = E / A blocks, R rewritten rows, t = T * Z.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_packed.kernels.tpu import calls

LANES = 128  # I of the chip's vectors
ROWS = 8  # of a vector, and at most in a block: with 16, states would not fit the registers
CHUNK_LENGTH = 128  # T: the gradients of B and C have a token in each lane
UNROLL = 4  # tokens in a loop's step: while the states of one are added, the next one's decays are computed


def ssm_pack(
    u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ, position_ids_BS, state_BZE=None, chunk_length=CHUNK_LENGTH
):
    """As `operators.ssm_pack`; for a TPU, 128 divides `chunk_length`."""
    num_packs, length, width = u_BSE.shape
    num_states = a_ZE.shape[0]
    filled, missing = -length % chunk_length, -width % LANES
    num_chunks, num_rows = (length + filled) // chunk_length, (width + missing) // LANES
    rows = max(rows for rows in range(1, ROWS + 1) if num_rows % rows == 0)
    sizes = _Sizes(num_packs, num_chunks, chunk_length, num_rows // rows, rows, num_states)

    def of_tokens(values_BSE):
        # A step of size 0 leaves the states as they are
        return jnp.pad(values_BSE, ((0, 0), (0, filled), (0, missing)))

    def of_blocks(values_BZE):
        values_BZE = jnp.pad(values_BZE.astype("float32"), ((0, 0), (0, 0), (0, missing)))
        return values_BZE.reshape(-1, num_states, sizes.num_blocks, rows, LANES).swapaxes(1, 2)

    def of_chunks(values, value=0):
        filler = ((0, 0), (0, filled)) + ((0, 0),) * (values.ndim - 2)
        return jnp.pad(values, filler, constant_values=value).reshape(num_packs, num_chunks, 1, -1)

    if state_BZE is None:
        state_BZE = jnp.zeros((num_packs, num_states, width))
    positions = () if position_ids_BS is None else (of_chunks(position_ids_BS.astype("int32"), 1),)
    (a_MZQI,) = of_blocks(a_ZE[None])
    y_BSE, state_BMZQI = _scan(
        of_tokens(u_BSE),
        of_tokens(delta_BSE.astype("float32")),
        a_MZQI,
        of_chunks(b_BSZ.astype("float32")),
        of_chunks(c_BSZ.astype("float32")),
        positions,
        # The states before are data: no gradient goes back to the packs that left them
        lax.stop_gradient(of_blocks(state_BZE)),
        sizes,
    )
    state_BZE = state_BMZQI.swapaxes(1, 2).reshape(num_packs, num_states, -1)
    return y_BSE[:, :length, :width], lax.stop_gradient(state_BZE[..., :width])


@dataclasses.dataclass(frozen=True)
class _Sizes:
    num_packs: int  # B
    num_chunks: int  # C
    chunk_length: int  # T
    num_blocks: int  # M
    rows: int  # Q
    num_states: int  # Z

    @property
    def grid(self):
        return self.num_packs, self.num_blocks, self.num_chunks

    @property
    def stride(self):
        """Rewritten rows from a token to the next: whole vectors."""
        return -(-self.rows // ROWS) * ROWS

    @property
    def block(self):
        return self.num_states, self.rows, LANES

    @property
    def rewritten(self):
        return self.chunk_length * self.stride, LANES


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _scan(u_BSE, delta_BSE, a_MZQI, b_BC1t, c_BC1t, positions, state_BMZQI, sizes):
    return _forward(u_BSE, delta_BSE, a_MZQI, b_BC1t, c_BC1t, positions, state_BMZQI, sizes)[0]


def _forward(u_BSE, delta_BSE, a_MZQI, b_BC1t, c_BC1t, positions, state_BMZQI, sizes):
    blocks = _Blocks(sizes, lambda chunk: chunk)
    before_BCMZQI = jax.ShapeDtypeStruct((sizes.num_packs, sizes.num_chunks, *a_MZQI.shape), jnp.float32)
    y_BSE, after_BMZQI, before_BCMZQI = calls.call(
        functools.partial(_forward_kernel, sizes=sizes),
        "selective_scan",
        sizes.grid,
        inputs=[
            *blocks.inputs(u_BSE, delta_BSE, a_MZQI, b_BC1t, c_BC1t, positions),
            (state_BMZQI, blocks.states),
        ],
        outputs=[(delta_BSE, blocks.tokens), (state_BMZQI, blocks.states), (before_BCMZQI, blocks.borders)],
        scratch=[sizes.rewritten] * 3,
        transcendentals=u_BSE.size * sizes.num_states,
    )
    return (y_BSE, after_BMZQI), (u_BSE, delta_BSE, a_MZQI, b_BC1t, c_BC1t, positions, before_BCMZQI)


def _backward(sizes, kept, gradients):
    *inputs, before_BCMZQI = kept
    u_BSE, delta_BSE, a_MZQI, b_BC1t, _, positions = inputs
    dy_BSE, _ = gradients  # the states at the end are data of the next pack
    blocks = _Blocks(sizes, lambda chunk: sizes.num_chunks - 1 - chunk)
    states_BMZQI = jax.ShapeDtypeStruct((sizes.num_packs, *a_MZQI.shape), jnp.float32)
    sums_BMZS = jax.ShapeDtypeStruct((*states_BMZQI.shape[:3], u_BSE.shape[1]), jnp.float32)
    du_BSE, ddelta_BSE, da_BMZQI, db_BMZS, dc_BMZS = calls.call(
        functools.partial(_backward_kernel, sizes=sizes),
        "selective_scan_backward",
        sizes.grid,
        inputs=[*blocks.inputs(*inputs), (before_BCMZQI, blocks.borders), (dy_BSE, blocks.tokens)],
        outputs=[
            (u_BSE, blocks.tokens),
            (delta_BSE, blocks.tokens),
            (states_BMZQI, blocks.states),
            (sums_BMZS, blocks.sums),
            (sums_BMZS, blocks.sums),
        ],
        scratch=[
            *[sizes.rewritten] * 5,
            (sizes.num_states * sizes.stride, LANES),
            (sizes.chunk_length, *sizes.block),
            sizes.block,
        ],
        transcendentals=u_BSE.size * sizes.num_states,
    )
    db_BC1t, dc_BC1t = (
        of_BMZS.sum(axis=1).swapaxes(1, 2).reshape(b_BC1t.shape) for of_BMZS in (db_BMZS, dc_BMZS)
    )
    no_gradients = (None,) * len(positions), jnp.zeros_like(da_BMZQI)
    return du_BSE, ddelta_BSE, da_BMZQI.sum(axis=0), db_BC1t, dc_BC1t, *no_gradients


_scan.defvjp(_forward, _backward)


def _forward_kernel(*refs, sizes):
    # Inputs, outputs, and arrays that stay on the chip
    u_TA, delta_TA, a_ZQI, b_1t, c_1t, positions, state_ZQI = refs[:7]
    y_TA, after_ZQI, before_ZQI = refs[7:10]
    u_RI, delta_RI, y_RI = refs[10:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        after_ZQI[...] = state_ZQI[...]

    before_ZQI[...] = after_ZQI[...]
    _rewrite(sizes, (u_TA, u_RI), (delta_TA, delta_RI))

    def token(place, state_ZQI):
        mine = _rows_of(sizes, place)
        u_QI, delta_QI = u_RI[mine], delta_RI[mine]
        kept_ZQI = _cut(state_ZQI, positions, place) * jnp.exp(delta_QI * a_ZQI[...])
        state_ZQI = kept_ZQI + (delta_QI * u_QI) * _spread(sizes, b_1t, place)
        y_RI[mine] = (state_ZQI * _spread(sizes, c_1t, place)).sum(axis=0)
        return state_ZQI

    after_ZQI[...] = _loop(sizes, token, after_ZQI[...])
    _rewrite_back(sizes, (y_RI, y_TA))


def _backward_kernel(*refs, sizes):
    # Inputs, outputs, and arrays that stay on the chip
    u_TA, delta_TA, a_ZQI, b_1t, c_1t, positions, before_ZQI, dy_TA = refs[:8]
    du_TA, ddelta_TA, da_ZQI, db_ZT, dc_ZT = refs[8:13]
    u_RI, delta_RI, dy_RI, du_RI, ddelta_RI, products_RI, kept_TZQI, later_ZQI = refs[13:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        da_ZQI[...] = jnp.zeros_like(da_ZQI)
        later_ZQI[...] = jnp.zeros_like(later_ZQI)

    _rewrite(sizes, (u_TA, u_RI), (delta_TA, delta_RI), (dy_TA, dy_RI))

    def token_again(place, carry):
        state_ZQI, dc_ZT = carry
        mine = _rows_of(sizes, place)
        u_QI, delta_QI = u_RI[mine], delta_RI[mine]
        kept_ZQI = _cut(state_ZQI, positions, place) * jnp.exp(delta_QI * a_ZQI[...])
        kept_TZQI[place] = kept_ZQI
        state_ZQI = kept_ZQI + (delta_QI * u_QI) * _spread(sizes, b_1t, place)
        return state_ZQI, _with_sums(sizes, dc_ZT, state_ZQI * dy_RI[mine], place, products_RI)

    def token_back(step, carry):
        later_ZQI, da_ZQI, db_ZT = carry  # the first is the gradient of states that comes from later tokens
        place = sizes.chunk_length - 1 - step
        mine = _rows_of(sizes, place)
        u_QI, delta_QI = u_RI[mine], delta_RI[mine]
        gradient_ZQI = later_ZQI + dy_RI[mine] * _spread(sizes, c_1t, place)
        exponent_ZQI = gradient_ZQI * kept_TZQI[place]  # gradient of delta * A; 0 at starts
        dx_QI = (gradient_ZQI * _spread(sizes, b_1t, place)).sum(axis=0)
        du_RI[mine] = dx_QI * delta_QI
        ddelta_RI[mine] = dx_QI * u_QI + (exponent_ZQI * a_ZQI[...]).sum(axis=0)
        db_ZT = _with_sums(sizes, db_ZT, gradient_ZQI * (delta_QI * u_QI), place, products_RI)
        # Decays are computed again: kept, they would double what the chip writes
        decay_ZQI = jnp.exp(delta_QI * a_ZQI[...])
        # Nothing after a start depends on the token before it
        later_ZQI = _cut(gradient_ZQI * decay_ZQI, positions, place)
        return later_ZQI, da_ZQI + exponent_ZQI * delta_QI, db_ZT

    nothing_ZT = jnp.zeros(db_ZT.shape, jnp.float32)
    _, dc_ZT[...] = _loop(sizes, token_again, (before_ZQI[...], nothing_ZT))
    later_ZQI[...], da_ZQI[...], db_ZT[...] = _loop(
        sizes, token_back, (later_ZQI[...], da_ZQI[...], nothing_ZT)
    )
    _rewrite_back(sizes, (du_RI, du_TA), (ddelta_RI, ddelta_TA))


def _loop(sizes, token, carry):
    return lax.fori_loop(0, sizes.chunk_length, token, carry, unroll=min(UNROLL, sizes.chunk_length))


def _cut(values_ZQI, positions, place):
    """Values, 0 where a sequence starts."""
    if not positions:
        return values_ZQI
    # A product with 0 would not do: a neighbour's state may be infinite
    position_ZQI = jnp.full(values_ZQI.shape, positions[0][0, place])
    return jnp.where(position_ZQI > 0, values_ZQI, 0.0)


def _spread(sizes, scalars_1t, place):
    """A token's numbers of B or C, each for all channels."""
    first = place * sizes.num_states
    places = range(sizes.num_states)
    return jnp.stack([jnp.full(sizes.block[1:], scalars_1t[0, first + state]) for state in places])


def _with_sums(sizes, sums_ZT, products_ZQI, place, products_RI):
    """The sums of a token, with its sums over channels in its lane."""
    for state in range(sizes.num_states):
        products_RI[pl.ds(state * sizes.stride, sizes.rows)] = products_ZQI[state]
    # Rows are read one by one from memory: a sum inside vectors would take seven times as many operations
    sums_ZI = sum(products_RI[pl.ds(row, sizes.num_states, stride=sizes.stride)] for row in range(sizes.rows))
    lanes_ZT = lax.broadcasted_iota("int32", sums_ZT.shape, 1)
    return jnp.where(lanes_ZT == place, sums_ZI.sum(axis=1, keepdims=True), sums_ZT)


def _rows_of(sizes, place):
    """A token's rewritten rows."""
    return pl.ds(pl.multiple_of(place * sizes.stride, sizes.stride), sizes.rows)


def _rewrite(sizes, *pairs):
    for values_TA, values_RI in pairs:
        for rows, lanes in _rows_and_lanes(sizes):
            values_RI[rows] = values_TA[:, lanes].astype("float32")


def _rewrite_back(sizes, *pairs):
    for values_RI, values_TA in pairs:
        for rows, lanes in _rows_and_lanes(sizes):
            values_TA[:, lanes] = values_RI[rows].astype(values_TA.dtype)


def _rows_and_lanes(sizes):
    """Places of each row of the tokens, rewritten and in memory."""
    for row in range(sizes.rows):
        tokens = pl.ds(row, sizes.chunk_length, stride=sizes.stride)
        yield tokens, slice(row * LANES, (row + 1) * LANES)


class _Blocks:
    """Blocks of arrays for a step: of a pack, some channels and, by `order` of its number, a chunk."""

    def __init__(self, sizes, order):
        width = sizes.rows * LANES
        self.tokens = pl.BlockSpec((None, sizes.chunk_length, width), lambda b, m, c: (b, order(c), m))
        self.decays = pl.BlockSpec((None, *sizes.block), lambda b, m, c: (m, 0, 0, 0))
        self.states = pl.BlockSpec((None, None, *sizes.block), lambda b, m, c: (b, m, 0, 0, 0))
        self.borders = pl.BlockSpec(
            (None, None, None, *sizes.block), lambda b, m, c: (b, order(c), m, 0, 0, 0)
        )
        self.sums = pl.BlockSpec(
            (None, None, sizes.num_states, sizes.chunk_length), lambda b, m, c: (b, m, 0, order(c))
        )
        self._order = order

    def inputs(self, u_BSE, delta_BSE, a_MZQI, b_BC1t, c_BC1t, positions):
        """Inputs of both kernels: pairs of an array and its block."""
        return [
            (u_BSE, self.tokens),
            (delta_BSE, self.tokens),
            (a_MZQI, self.decays),
            (b_BC1t, self._scalars(b_BC1t)),
            (c_BC1t, self._scalars(c_BC1t)),
            (positions, tuple(map(self._scalars, positions))),
        ]

    def _scalars(self, of_chunks):
        shape = (None, None, *of_chunks.shape[2:])
        return pl.BlockSpec(shape, lambda b, m, c: (b, self._order(c), 0, 0), memory_space=pltpu.SMEM)
