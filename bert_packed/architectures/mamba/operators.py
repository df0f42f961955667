"""Operators of a Mamba over packs, convolution and selective scan, which restart with every sequence.

    h[t] = a[t] * h[t-1] + delta[t] * u[t] * B[t]      a[t] = exp(delta[t] * A), 0 at the start of a sequence
    y[t] = sum over states of C[t] * h[t]

Equations 1 and 2 of "PackMamba" (Section 3.4): A-bar as printed, B-bar as the authors of Mamba compute it,
`delta * B`. Only states at the borders of chunks are kept; the others are recomputed for the gradient, which
is the same recurrence backwards:

    g[t] = dy[t] * C[t] + a[t+1] * g[t+1]              the gradient of h[t]; cut one step before a start

Here is the scan as a loop for CPUs and for TensorFlow. `kernels/` has those for JAX on GPUs and TPUs.

Legend: B packs per batch, S pack length, E channels or inner width, W taps, X = W - 1 tokens before a pack,
Z states of a channel, T tokens of a chunk, C chunks.
"""

from keras import ops

from bert_packed.architectures.mamba.config import MambaConfig
from bert_packed.layers.loops import scan, with_gradient

CHUNK_LENGTH = MambaConfig.chunk_size


def conv1d_pack(x_BSE, kernel_WE, bias_E, position_ids_BS, tail_BXE=None):
    """SiLU of a convolution of each channel over a token and the W - 1 before it in its own sequence.

    Section 3.3 and Algorithm 1 of "PackMamba". For a kernel of W = 3 taps, the last on the token itself:

        position_ids   [ 0     1           2                  0     1           ]
        before SiLU    [ k2 a  k1 a + k2 b k0 a + k1 b + k2 c k2 d  k1 d + k2 e ]

    Args:
        x_BSE, kernel_WE, bias_E: float; no bias is None.
        position_ids_BS: int32, restarts at 0 in every sequence, and 0 for padding; None where each pack is
            one sequence.
        tail_BXE: float, the inputs before a pack whose first position is not 0; None for zeros.

    Returns:
        float `[B, S, E]`, and the tail for the pack after this one, `[B, X, E]`. No gradient passes a tail.
    """
    num_taps, length = kernel_WE.shape[0], x_BSE.shape[1]
    if tail_BXE is None:
        tail_BXE = ops.zeros_like(x_BSE[:, :1]) * ops.zeros((1, num_taps - 1, 1), x_BSE.dtype)
    tail_BXE = ops.cast(ops.stop_gradient(tail_BXE), x_BSE.dtype)
    longer = ops.concatenate([tail_BXE, x_BSE], axis=1)  # [B, W - 1 + S, E]
    out_BSE = x_BSE * kernel_WE[-1]
    for back in range(1, num_taps):
        first = num_taps - 1 - back
        before_BSE = longer[:, first : first + length]
        if position_ids_BS is not None:
            # A product with 0 would not do: a neighbour's value may be infinite
            before_BSE = ops.where((position_ids_BS >= back)[:, :, None], before_BSE, 0.0)
        out_BSE = out_BSE + before_BSE * kernel_WE[first]
    if bias_E is not None:
        out_BSE = out_BSE + bias_E
    return ops.silu(out_BSE), ops.stop_gradient(longer[:, length:])


def ssm_pack(
    u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ, position_ids_BS, state_BZE=None, chunk_length=CHUNK_LENGTH
):
    """The recurrence over packs in float32, cut wherever a position is 0.

        position_ids   [ 0     1             0     1     2 ]
        state          [ x0    a1 x0 + x1    x2    ...     ]      nothing of x0 and x1 is in the rest

    Args:
        u_BSE: float, the inputs.
        delta_BSE: float, above 0, the size of each step.
        a_ZE: float, below 0, the decay of each state.
        b_BSZ, c_BSZ: float, from inputs to states and from states to outputs.
        position_ids_BS: int32, 0 for padding too; None where each pack is one sequence.
        state_BZE: float32, the states before packs whose first position is not 0; None for zeros.
        chunk_length: T; it need not divide S.

    Returns:
        float32 `[B, S, E]`, and the states after the last token, float32 `[B, Z, E]`, without a gradient.
    """
    length, width = u_BSE.shape[1:]
    # bfloat16 would not do: states add up over thousands of tokens
    u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ = (
        ops.cast(x, "float32") for x in (u_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ)
    )
    if state_BZE is None:
        state_BZE = ops.zeros((ops.shape(u_BSE)[0], a_ZE.shape[0], width))
    chunk_length = min(chunk_length, length)
    filled = -length % chunk_length
    # A step of size 0 leaves the states as they are
    chunked = [to_chunks(x, chunk_length, filled) for x in (u_BSE, delta_BSE, b_BSZ, c_BSZ)]
    if position_ids_BS is not None:
        goes_on_BS = ops.cast(position_ids_BS > 0, "float32")
        chunked.append(to_chunks(goes_on_BS, chunk_length, filled, value=1.0))
    # The states before are data: no gradient goes back to the packs that left them
    chunked_scan = with_gradient(_forward, _backward)
    y_CTBE, state_BZE = chunked_scan(a_ZE, ops.stop_gradient(state_BZE), *chunked)
    y_BSE = ops.transpose(ops.reshape(y_CTBE, (length + filled, -1, width)), (1, 0, 2))
    return y_BSE[:, :length], ops.stop_gradient(state_BZE)


def to_chunks(values, chunk_length, filled=0, value=0.0):
    """`[B, S, ...]` to `[C, T, B, ...]`, filled up at the end by `filled` tokens of a value."""
    if filled:
        values = ops.pad(
            values, [[0, 0], [0, filled]] + [[0, 0]] * (len(values.shape) - 2), constant_values=value
        )
    rest = tuple(range(2, len(values.shape)))
    values = ops.transpose(values, (1, 0, *rest))
    return ops.reshape(values, (values.shape[0] // chunk_length, chunk_length, *ops.shape(values)[1:]))


def _cut(values_BZE, goes_on):
    """Values, 0 in packs where a sequence starts; `goes_on` holds `[B]`, or nothing where none starts."""
    if not goes_on:
        return values_BZE
    # A product with 0 would not do: a neighbour's state may be infinite
    return ops.where(goes_on[0][:, None, None] > 0, values_BZE, 0.0)


def _advance(state_BZE, u_BE, delta_BE, b_BZ, goes_on, a_ZE):
    """Decayed states, the addition of a token, and the decay: float32 `[B, Z, E]` each."""
    decay_BZE = ops.exp(delta_BE[:, None, :] * a_ZE)
    kept_BZE = _cut(state_BZE, goes_on) * decay_BZE
    return kept_BZE, (delta_BE * u_BE)[:, None, :] * b_BZ[:, :, None], decay_BZE


def _over_states(values_BZE, weights):
    """Sum over states of values times weights `[B, Z, 1]` or `[1, Z, E]`: `[B, E]`."""
    # XLA's CPU compiler calls a library for a sum along an axis, which costs as much as ten tokens
    columns = zip(ops.unstack(values_BZE, axis=1), ops.unstack(weights, axis=1), strict=True)
    return sum(values * weight for values, weight in columns)


def _forward(a_ZE, state_BZE, *inputs):
    """Inputs, `[C, T, B, ...]` each: u, delta, b and c, and where sequences may start `goes_on`."""

    def token(carry, slices):
        u_BE, delta_BE, b_BZ, c_BZ, *goes_on = slices
        kept_BZE, added_BZE, _ = _advance(carry[0], u_BE, delta_BE, b_BZ, goes_on, a_ZE)
        state_BZE = kept_BZE + added_BZE
        return (state_BZE,), (_over_states(state_BZE, c_BZ[:, :, None]),)

    def chunk(carry, slices):
        after, (y_TBE,) = scan(token, carry, slices)
        return after, (y_TBE, carry[0])

    (state_BZE,), (y_CTBE, before_CBZE) = scan(chunk, (state_BZE,), inputs)
    return (y_CTBE, state_BZE), (inputs, a_ZE, before_CBZE)


def _backward(kept, gradients):
    inputs, a_ZE, before_CBZE = kept
    dy_CTBE, _ = gradients  # the states at the end are data of the next pack

    def token_again(carry, slices):
        u_BE, delta_BE, b_BZ, *goes_on = slices
        kept_BZE, added_BZE, decay_BZE = _advance(carry[0], u_BE, delta_BE, b_BZ, goes_on, a_ZE)
        return (kept_BZE + added_BZE,), (kept_BZE, decay_BZE)

    def token_back(carry, slices):
        later_BZE, da_BZE = carry  # the gradient of the states that comes from later tokens
        u_BE, delta_BE, b_BZ, c_BZ, dy_BE, kept_BZE, decay_BZE, *goes_on = slices
        x_BE = delta_BE * u_BE
        gradient_BZE = later_BZE + dy_BE[:, None, :] * c_BZ[:, :, None]
        exponent_BZE = gradient_BZE * kept_BZE  # gradient of delta * A; 0 at starts
        dx_BE = _over_states(gradient_BZE, b_BZ[:, :, None])
        ddelta_BE = dx_BE * u_BE + _over_states(exponent_BZE, a_ZE[None])
        db_BZ = ops.einsum("bze,be->bz", gradient_BZE, x_BE)
        dc_BZ = ops.einsum("bze,be->bz", kept_BZE + x_BE[:, None, :] * b_BZ[:, :, None], dy_BE)
        da_BZE = da_BZE + exponent_BZE * delta_BE[:, None, :]
        # Nothing after a start depends on the token before it
        later_BZE = _cut(gradient_BZE * decay_BZE, goes_on)
        return (later_BZE, da_BZE), (dx_BE * delta_BE, ddelta_BE, db_BZ, dc_BZ)

    def chunk_back(carry, slices):
        dy_TBE, before_BZE, u_TBE, delta_TBE, b_TBZ, c_TBZ, *goes_on = slices
        _, again = scan(token_again, (before_BZE,), (u_TBE, delta_TBE, b_TBZ, *goes_on))
        given = (u_TBE, delta_TBE, b_TBZ, c_TBZ, dy_TBE, *again, *goes_on)
        return scan(token_back, carry, given, reverse=True)

    nothing_BZE = ops.zeros_like(before_CBZE[0])
    (_, da_BZE), found = scan(
        chunk_back, (nothing_BZE, nothing_BZE), (dy_CTBE, before_CBZE, *inputs), reverse=True
    )
    # `goes_on` is data, as the states before the pack are
    no_gradient = [ops.zeros_like(goes_on_CTB) for goes_on_CTB in inputs[4:]]
    return (ops.sum(da_BZE, axis=0), nothing_BZE, *found, *no_gradient)
