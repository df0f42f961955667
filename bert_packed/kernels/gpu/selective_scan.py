"""The scan of `mamba/operators.py` for GPUs: Pallas kernels that take a chunk of tokens in one launch.

A program of a kernel has a few channels of a pack. It goes through the chunk's tokens with the states in
registers, and loads the numbers of one token while it computes the one before. As on CPUs, only the states
before each chunk are kept between the passes. In the backward pass one kernel computes a chunk's states again
and writes them to memory, and the next one reads them, last token first.

Legend: B packs per batch, S pack length, E inner width, Z states of a channel, T tokens of a chunk, C chunks,
A channels of a program, M = E / A.
"""

from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

CHUNK_LENGTH = 128  # T: the backward pass keeps the states of one chunk in memory
WIDTH = 32  # A: a thread has all states of a channel, and sums over them by itself


def ssm_pack(
    u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ, position_ids_BS, state_BZE=None, chunk_length=CHUNK_LENGTH
):
    """As `operators.ssm_pack`."""
    num_packs, length, width = u_BSE.shape
    num_states = a_ZE.shape[0]
    # Triton's tiles have powers of 2. A state of numbers 0 in B and C adds nothing
    more_states, more_channels = pl.next_power_of_2(num_states) - num_states, -width % WIDTH
    filled = -length % chunk_length

    def pad(values, *missing):
        return jnp.pad(values, ((0, 0),) * (values.ndim - len(missing)) + tuple((0, by) for by in missing))

    def to_chunks(values):
        values = values.reshape(num_packs, -1, chunk_length, *values.shape[2:])
        return values.swapaxes(0, 1)

    if state_BZE is None:
        state_BZE = jnp.zeros((num_packs, num_states, width))
    positions = ()
    if position_ids_BS is not None:
        positions = (to_chunks(jnp.pad(position_ids_BS, ((0, 0), (0, filled)), constant_values=1)),)
    # A step of size 0 leaves the states as they are
    inputs = _Inputs(
        to_chunks(pad(u_BSE, filled, more_channels)),
        to_chunks(pad(delta_BSE.astype("float32"), filled, more_channels)),
        to_chunks(pad(b_BSZ.astype("float32"), filled, more_states)),
        to_chunks(pad(c_BSZ.astype("float32"), filled, more_states)),
        positions,
    )
    a_ZE = pad(a_ZE.astype("float32"), more_states, more_channels)
    # The states before are data: no gradient goes back to the packs that left them
    state_BZE = lax.stop_gradient(pad(state_BZE.astype("float32"), more_states, more_channels))
    y_CBTE, state_BZE = _scan(a_ZE, state_BZE, inputs)
    y_BSE = y_CBTE.swapaxes(0, 1).reshape(num_packs, length + filled, -1)
    return y_BSE[:, :length, :width], lax.stop_gradient(state_BZE[:, :num_states, :width])


class _Inputs(NamedTuple):
    """Arrays `[C, B, T, ...]`, a chunk of them, what a program has of that, or numbers of one token."""

    u: object
    delta: object
    b: object
    c: object
    positions: tuple  # or nothing
    dy: object = None  # as `kept`, for the backward pass: the latter is what is left of the states before
    kept: object = None


@jax.custom_vjp
def _scan(a_ZE, state_BZE, inputs):
    return _forward(a_ZE, state_BZE, inputs)[0]


def _forward(a_ZE, state_BZE, inputs):
    def chunk(state_BZE, inputs):
        y_BTE, after_BZE = _call(_forward_kernel, a_ZE, (state_BZE,), inputs, [inputs.delta, state_BZE])
        return after_BZE, (y_BTE, state_BZE)

    after_BZE, (y_CBTE, before_CBZE) = lax.scan(chunk, state_BZE, inputs)
    return (y_CBTE, after_BZE), (a_ZE, before_CBZE, inputs)


def _backward(kept, gradients):
    a_ZE, before_CBZE, inputs = kept
    dy_CBTE, _ = gradients  # the states at the end are data of the next pack

    def chunk_back(carry, slices):
        before_BZE, dy_BTE, inputs = slices
        num_packs, num_tokens, width = dy_BTE.shape
        kept_BTZE = jax.ShapeDtypeStruct((num_packs, num_tokens, *a_ZE.shape), jnp.float32)
        (kept_BTZE,) = _call(_states_kernel, a_ZE, (before_BZE,), inputs, [kept_BTZE])
        sums_MBTZ = jax.ShapeDtypeStruct((width // WIDTH, *inputs.b.shape), jnp.float32)
        *inputs, _, _ = inputs
        inputs = _Inputs(*inputs, dy_BTE, kept_BTZE)
        outputs = [*carry, inputs.u, inputs.delta]
        *carry, du_BTE, ddelta_BTE, db_MBTZ, dc_MBTZ = _call(
            _backward_kernel, a_ZE, carry, inputs, outputs, [sums_MBTZ] * 2
        )
        return tuple(carry), (du_BTE, ddelta_BTE, db_MBTZ.sum(axis=0), dc_MBTZ.sum(axis=0))

    nothing_BZE = jnp.zeros_like(before_CBZE[0])
    (_, da_BZE), found = lax.scan(
        chunk_back, (nothing_BZE, nothing_BZE), (before_CBZE, dy_CBTE, inputs), reverse=True
    )
    no_gradients = (None,) * len(inputs.positions)
    return da_BZE.sum(axis=0), nothing_BZE, _Inputs(*found, no_gradients)


_scan.defvjp(_forward, _backward)


def _forward_kernel(a_ZA, states, inputs, y_TA, after_ZA):
    a_ZA = a_ZA[...]

    def token(place, carry, mine):
        _, state_ZA = _advance(a_ZA, *carry, mine)
        y_TA[place] = (state_ZA * mine.c[:, None]).sum(axis=0)
        return (state_ZA,)

    (after_ZA[...],) = _loop(token, states, inputs)


def _states_kernel(a_ZA, states, inputs, kept_TZA):
    a_ZA = a_ZA[...]

    def token(place, carry, mine):
        kept_TZA[place], state_ZA = _advance(a_ZA, *carry, mine)
        return (state_ZA,)

    _loop(token, states, inputs)


def _advance(a_ZA, state_ZA, mine):
    """The states before a token as far as they are left, and the states after it."""
    kept_ZA = _cut(state_ZA, mine) * jnp.exp(mine.delta * a_ZA)
    return kept_ZA, kept_ZA + (mine.delta * mine.u) * mine.b[:, None]


def _backward_kernel(a_ZA, carry, inputs, after_later_ZA, after_da_ZA, du_TA, ddelta_TA, db_TZ, dc_TZ):
    a_ZA = a_ZA[...]

    def token(place, carry, mine):
        later_ZA, da_ZA = carry  # the first is the gradient of states that comes from later tokens
        x_A = mine.delta * mine.u
        gradient_ZA = later_ZA + mine.dy * mine.c[:, None]
        exponent_ZA = gradient_ZA * mine.kept  # gradient of delta * A; 0 at starts
        dx_A = (gradient_ZA * mine.b[:, None]).sum(axis=0)
        du_TA[place] = (dx_A * mine.delta).astype(du_TA.dtype)
        ddelta_TA[place] = dx_A * mine.u + (exponent_ZA * a_ZA).sum(axis=0)
        db_TZ[place] = (gradient_ZA * x_A).sum(axis=1)
        dc_TZ[place] = ((mine.kept + x_A * mine.b[:, None]) * mine.dy).sum(axis=1)
        # Nothing after a start depends on the token before it
        later_ZA = _cut(gradient_ZA * jnp.exp(mine.delta * a_ZA), mine)
        return later_ZA, da_ZA + exponent_ZA * mine.delta

    after_later_ZA[...], after_da_ZA[...] = _loop(token, carry, inputs, reverse=True)


def _cut(values_ZA, mine):
    """Values, 0 where a sequence starts."""
    # A product with 0 would not do: a neighbour's state may be infinite
    return jnp.where(mine.positions[0] > 0, values_ZA, 0.0) if mine.positions else values_ZA


def _loop(token, carry, inputs, reverse=False):
    """Run `token(place, carry, its numbers)` for each token of a chunk."""
    last = inputs.u.shape[0] - 1

    def place_of(step):
        return last - step if reverse else step

    def load(step):
        # Positions only matter in whether they are 0
        return jax.tree.map(lambda of_tokens: of_tokens[place_of(step)].astype("float32"), inputs)

    def step(number, state):
        carry, mine = state
        # Loads are a step ahead: nothing else hides the time that memory takes
        following = load(jnp.minimum(number + 1, last))
        return token(place_of(number), carry, mine), following

    carry = tuple(values[...] for values in carry)
    return lax.fori_loop(0, last + 1, step, (carry, load(0)))[0]


def _call(kernel, a_ZE, carry, inputs, outputs, sums=()):
    """Run a kernel for each block of channels and each pack; each has its own part of `sums`."""
    num_states, width = a_ZE.shape
    arrays = a_ZE, tuple(carry), inputs
    in_specs = (
        pl.BlockSpec((num_states, WIDTH), lambda m, b: (0, m)),
        tuple(map(_of_channels, carry)),
        _Inputs(
            *map(_of_channels, (inputs.u, inputs.delta)),
            *map(_of_pack, (inputs.b, inputs.c)),
            tuple(map(_of_pack, inputs.positions)),
            *(jax.tree.map(_of_channels, of) for of in (inputs.dy, inputs.kept)),
        ),
    )
    return pl.pallas_call(
        kernel,
        grid=(width // WIDTH, len(inputs.b)),
        in_specs=in_specs,
        out_specs=[*map(_of_channels, outputs), *map(_of_program, sums)],
        out_shape=[jax.ShapeDtypeStruct(of.shape, of.dtype) for of in (*outputs, *sums)],
        metadata={"flops": "0"},  # readers of the program take these for matrix products
        # The numbers of one token do not fill more warps, and loads are a step ahead already
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
    )(*arrays)


def _of_channels(of):
    """The channels of a program, of an array `[B, ..., E]`."""
    return pl.BlockSpec((None, *of.shape[1:-1], WIDTH), lambda m, b: (b, *(0,) * (of.ndim - 2), m))


def _of_pack(of):
    """The pack of a program, of an array `[B, ...]`."""
    return pl.BlockSpec((None, *of.shape[1:]), lambda m, b: (b, *(0,) * (of.ndim - 1)))


def _of_program(of):
    """The part of an array `[M, B, T, Z]` that is a program's alone."""
    return pl.BlockSpec((None, None, *of.shape[2:]), lambda m, b: (m, b, 0, 0))
