"""Other ways to compute the scan of packs, each to be timed against the one that was chosen.

All give what `models.selective_scan.ssm_pack` gives, and its gradient; tests compare them.

Legend: B packs per batch, S pack length, E inner width, Z states of a channel, T tokens of a chunk, C chunks.
"""

import dataclasses
import functools

from keras import ops

from bert_packed.models.loops import scan, with_gradient
from bert_packed.models.selective_scan import CHUNK_LENGTH, ssm_pack, to_chunks


def scan_variants():
    """Dict from what is different to a function called as `ssm_pack` is, for its first output; ours first."""
    return {
        f"chosen: token by token, chunks of {CHUNK_LENGTH}": ssm_pack,
        "chunks of 8": functools.partial(ssm_pack, chunk_length=8),
        "chunks of 128": functools.partial(ssm_pack, chunk_length=128),
        "decays computed again": _scan_by_token(TokenLoop(keeps_decays=False)),
        "sums over states left to the library": _scan_by_token(TokenLoop(writes_sums=False)),
        "states innermost, [B, E, Z]": _scan_by_token(TokenLoop(channels_last=False)),
        "two tokens a turn of the loop": _scan_by_token(TokenLoop(tokens_a_turn=2)),
        "in bulk, the recurrence token by token": functools.partial(_scan_in_bulk, _by_token),
        "in bulk, the recurrence associative": functools.partial(_scan_in_bulk, _by_doubling),
    }


@dataclasses.dataclass(frozen=True)
class TokenLoop:
    """How a scan goes from token to token; the defaults are what was chosen.

    Attributes:
        keeps_decays: Whether the backward pass has the decays of a chunk from its forward one.
        writes_sums: Whether a sum over states is written out state by state.
        channels_last: Whether states lie `[B, Z, E]`, else `[B, E, Z]`.
        tokens_a_turn: Tokens of one turn of the loop.
    """

    keeps_decays: bool = True
    writes_sums: bool = True
    channels_last: bool = True
    tokens_a_turn: int = 1

    def of_channels(self, x_BE):
        """To be multiplied with states."""
        return ops.expand_dims(x_BE, -2 if self.channels_last else -1)

    def of_states(self, x_BZ):
        """To be multiplied with states."""
        return ops.expand_dims(x_BZ, -1 if self.channels_last else -2)

    def over_states(self, states, weights):
        """Sum of products over states: `[B, E]`."""
        axis = 1 if self.channels_last else 2
        if not self.writes_sums:
            return ops.sum(states * weights, axis=axis)
        return sum(
            ops.take(states, state, axis=axis) * ops.take(weights, state, axis=axis)
            for state in range(states.shape[axis])
        )

    def over_channels(self, states, x_BE):
        """Sum of products over channels: `[B, Z]`."""
        return ops.einsum("bze,be->bz" if self.channels_last else "bez,be->bz", states, x_BE)

    def scan(self, step, carry, inputs, reverse=False):
        """`loops.scan`, some slices a turn."""
        count = self.tokens_a_turn
        if count == 1:
            return scan(step, carry, inputs, reverse)

        def turn(carry, slices):
            found = [None] * count
            for place in range(count)[:: -1 if reverse else 1]:
                carry, found[place] = step(carry, tuple(values[place] for values in slices))
            return carry, tuple(map(ops.stack, zip(*found, strict=True)))

        grouped = tuple(ops.reshape(x, (x.shape[0] // count, count, *ops.shape(x)[1:])) for x in inputs)
        carry, outputs = scan(turn, carry, grouped, reverse)
        return carry, tuple(ops.reshape(x, (inputs[0].shape[0], *ops.shape(x)[2:])) for x in outputs)


def _scan_by_token(loop):
    """A scan as of `ssm_pack`, of whole chunks, in the way of a `TokenLoop`."""

    def advance(states, u_BE, delta_BE, b_BZ, goes_on_B, a):
        decay = ops.exp(loop.of_channels(delta_BE) * a)
        kept = ops.where(goes_on_B[:, None, None] > 0, states, 0.0) * decay
        return kept, loop.of_channels(delta_BE * u_BE) * loop.of_states(b_BZ), decay

    def forward(a, states, *inputs):
        def token(carry, slices):
            u_BE, delta_BE, b_BZ, c_BZ, goes_on_B = slices
            kept, added, _ = advance(carry[0], u_BE, delta_BE, b_BZ, goes_on_B, a)
            states = kept + added
            return (states,), (loop.over_states(states, loop.of_states(c_BZ)),)

        def chunk(carry, slices):
            after, (y_TBE,) = loop.scan(token, carry, slices)
            return after, (y_TBE, carry[0])

        _, (y_CTBE, before) = scan(chunk, (states,), inputs)
        return (y_CTBE,), (inputs, a, before)

    def backward(known, gradients):
        inputs, a, before = known

        def token_again(carry, slices):
            kept, added, decay = advance(carry[0], *slices, a)
            return (kept + added,), (kept, decay) if loop.keeps_decays else (carry[0],)

        def token_back(carry, slices):
            later, da = carry
            u_BE, delta_BE, b_BZ, c_BZ, goes_on_B, dy_BE, *known = slices
            if not loop.keeps_decays:
                known = advance(known[0], u_BE, delta_BE, b_BZ, goes_on_B, a)[::2]
            kept, decay = known
            x_BE = delta_BE * u_BE
            gradient = later + loop.of_channels(dy_BE) * loop.of_states(c_BZ)
            exponent = gradient * kept
            dx_BE = loop.over_states(gradient, loop.of_states(b_BZ))
            ddelta_BE = dx_BE * u_BE + loop.over_states(exponent, a[None])
            db_BZ = loop.over_channels(gradient, x_BE)
            dc_BZ = loop.over_channels(kept + loop.of_channels(x_BE) * loop.of_states(b_BZ), dy_BE)
            later = ops.where(goes_on_B[:, None, None] > 0, gradient * decay, 0.0)
            da = da + exponent * loop.of_channels(delta_BE)
            return (later, da), (dx_BE * delta_BE, ddelta_BE, db_BZ, dc_BZ)

        def chunk_back(carry, slices):
            dy_TBE, before, u_TBE, delta_TBE, b_TBZ, c_TBZ, goes_on_TB = slices
            _, again = loop.scan(token_again, (before,), (u_TBE, delta_TBE, b_TBZ, goes_on_TB))
            given = (u_TBE, delta_TBE, b_TBZ, c_TBZ, goes_on_TB, dy_TBE, *again)
            return loop.scan(token_back, carry, given, reverse=True)

        nothing = ops.zeros_like(before[0])
        (_, da), found = scan(chunk_back, (nothing, nothing), (gradients[0], before, *inputs), reverse=True)
        return ops.sum(da, axis=0), nothing, *found, ops.zeros_like(inputs[-1])

    def run(u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ, position_ids_BS):
        a = a_ZE if loop.channels_last else ops.transpose(a_ZE)
        inputs = _chunks(u_BSE, delta_BSE, b_BSZ, c_BSZ, position_ids_BS)
        states = ops.zeros((ops.shape(u_BSE)[0], *a.shape))
        return (_packs(with_gradient(forward, backward)(a, states, *inputs)[0]),)

    return run


def _scan_in_bulk(recurrence, u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ, position_ids_BS):
    """A scan as of `ssm_pack`, of whole chunks: all of a chunk at once, but the recurrence.

    A start is a decay of 0, a product: a neighbour's infinity would come through.

    Args:
        recurrence: Function (decays and what is added `[T, B, Z, E]`, states before `[B, Z, E]`) to the
            states `[T, B, Z, E]`.
        u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ, position_ids_BS: As of `ssm_pack`.
    """

    def states_of(before_BZE, u_TBE, delta_TBE, b_TBZ, goes_on_TB, a_ZE):
        decay_TBZE = ops.exp(delta_TBE[:, :, None] * a_ZE) * goes_on_TB[:, :, None, None]
        added_TBZE = (delta_TBE * u_TBE)[:, :, None] * b_TBZ[..., None]
        return recurrence(decay_TBZE, added_TBZE, before_BZE), decay_TBZE

    def forward(a_ZE, state_BZE, *inputs):
        def chunk(carry, slices):
            u_TBE, delta_TBE, b_TBZ, c_TBZ, goes_on_TB = slices
            states_TBZE, _ = states_of(carry[0], u_TBE, delta_TBE, b_TBZ, goes_on_TB, a_ZE)
            return (states_TBZE[-1],), (ops.sum(states_TBZE * c_TBZ[..., None], axis=2), carry[0])

        _, (y_CTBE, before_CBZE) = scan(chunk, (state_BZE,), inputs)
        return (y_CTBE,), (inputs, a_ZE, before_CBZE)

    def backward(kept, gradients):
        inputs, a_ZE, before_CBZE = kept

        def chunk(carry, slices):
            later_BZE, da_BZE = carry
            dy_TBE, before_BZE, u_TBE, delta_TBE, b_TBZ, c_TBZ, goes_on_TB = slices
            states_TBZE, decay_TBZE = states_of(before_BZE, u_TBE, delta_TBE, b_TBZ, goes_on_TB, a_ZE)
            earlier_TBZE = ops.concatenate([before_BZE[None], states_TBZE[:-1]])
            # The same recurrence from the last token to the first; what comes from later has decayed already
            decays_TBZE = ops.concatenate([decay_TBZE[1:], ops.ones_like(decay_TBZE[:1])])
            wanted_TBZE = dy_TBE[:, :, None] * c_TBZ[..., None]
            back = recurrence(ops.flip(decays_TBZE, 0), ops.flip(wanted_TBZE, 0), later_BZE)
            gradient_TBZE = ops.flip(back, 0)
            exponent_TBZE = gradient_TBZE * earlier_TBZE * decay_TBZE
            dx_TBE = ops.sum(gradient_TBZE * b_TBZ[..., None], axis=2)
            ddelta_TBE = dx_TBE * u_TBE + ops.sum(exponent_TBZE * a_ZE, axis=2)
            db_TBZ = ops.einsum("tbze,tbe->tbz", gradient_TBZE, delta_TBE * u_TBE)
            dc_TBZ = ops.einsum("tbze,tbe->tbz", states_TBZE, dy_TBE)
            da_BZE = da_BZE + ops.einsum("tbze,tbe->bze", exponent_TBZE, delta_TBE)
            after = gradient_TBZE[0] * decay_TBZE[0], da_BZE
            return after, (dx_TBE * delta_TBE, ddelta_TBE, db_TBZ, dc_TBZ)

        nothing_BZE = ops.zeros_like(before_CBZE[0])
        (_, da_BZE), found = scan(
            chunk, (nothing_BZE, nothing_BZE), (gradients[0], before_CBZE, *inputs), reverse=True
        )
        return ops.sum(da_BZE, axis=0), nothing_BZE, *found, ops.zeros_like(inputs[-1])

    inputs = _chunks(u_BSE, delta_BSE, b_BSZ, c_BSZ, position_ids_BS)
    state_BZE = ops.zeros((ops.shape(u_BSE)[0], *a_ZE.shape))
    return (_packs(with_gradient(forward, backward)(a_ZE, state_BZE, *inputs)[0]),)


def _by_token(decay_TBZE, added_TBZE, before_BZE):
    """A recurrence for `_scan_in_bulk`: a loop of which nothing but the recurrence is left."""

    def token(carry, slices):
        state_BZE = carry[0] * slices[0] + slices[1]
        return (state_BZE,), (state_BZE,)

    return scan(token, (before_BZE,), (decay_TBZE, added_TBZE))[1][0]


def _by_doubling(decay_TBZE, added_TBZE, before_BZE):
    """A recurrence for `_scan_in_bulk`: runs of 1, 2, 4, ... tokens, so that a chunk takes log2(T) rounds.

    `keras.ops.associative_scan` does not compile under TensorFlow at even lengths.
    """
    added_TBZE = ops.concatenate([added_TBZE[:1] + decay_TBZE[:1] * before_BZE, added_TBZE[1:]])
    length, reach = decay_TBZE.shape[0], 1
    while reach < length:
        joined_TBZE = added_TBZE[reach:] + decay_TBZE[reach:] * added_TBZE[:-reach]
        added_TBZE = ops.concatenate([added_TBZE[:reach], joined_TBZE])
        decay_TBZE = ops.concatenate([decay_TBZE[:reach], decay_TBZE[reach:] * decay_TBZE[:-reach]])
        reach *= 2
    return added_TBZE


def _chunks(*inputs):
    """What goes through the loop: `[B, S, ...]` to `[C, T, B, ...]`; of positions, the last, what goes on."""
    goes_on_BS = ops.cast(inputs[-1] > 0, "float32")
    return [to_chunks(values, CHUNK_LENGTH) for values in (*inputs[:-1], goes_on_BS)]


def _packs(y_CTBE):
    """`[C, T, B, E]` to `[B, S, E]`."""
    width = y_CTBE.shape[-1]
    length = y_CTBE.shape[0] * y_CTBE.shape[1]
    return ops.transpose(ops.reshape(y_CTBE, (length, -1, width)), (1, 0, 2))
