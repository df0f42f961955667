"""The state-space model of Mamba-2 on packs: its chunks are attention, and restart with every sequence.

    h[t] = a[t] * h[t-1] + B[t] * delta[t] * x[t]      a[t] = exp(delta[t] * A), 0 at the start of a sequence
    y[t] = C[t] * h[t] + D * x[t]

A is one number for a head, so a chunk of T tokens is a product of matrices (Section 6 of "Transformers are
SSMs"): `weights * (delta * x) + D * x` with

    weights[t, s] = C[t] B[s] * exp(l[s+1] + ... + l[t])     l = delta * A, the logarithms of the decays

A pack adds a mask. For a chunk of 5 tokens, in which the sequence from before has 2 and the next begins:

    position_ids   [ 7      8      0      1      2     ]
    weights of 7   [ 1      .      .      .      .     ]     d: decays; where a dot stands, exactly 0
               8   [ d      1      .      .      .     ]
               0   [ .      .      1      .      .     ]
               1   [ .      .      d      1      .     ]
               2   [ .      .      d d    d      1     ]
    entering       [ d      d d    .      .      .     ]     of the state before the chunk, in each token
    leaving        [ .      .      d d    d      1     ]     of each token, in the state after the chunk
    kept           0                                         of the state before, in the state after

Groups of heads are independent of each other, as packs are, and are computed as such.

Here are the chunks for CPUs, GPUs and TensorFlow. `kernels/tpu/duality.py` has kernels for JAX on TPUs.

Legend: B packs per batch, G groups of heads; below `ssd_pack` B is their product. S pack length, T tokens of
a chunk, C chunks, N heads, H head width, E = N * H, Z states of a channel.
"""

import math

from keras import ops

from bert_packed.layers.loops import pull_back, scan, with_gradient

LEAST_LOG = -104.0  # its `exp` is 0 in float32


def ssd_pack(
    x_BSE,
    delta_BSN,
    a_N,
    b_BSGZ,
    c_BSGZ,
    skip_N,
    position_ids_BS,
    state_BZE=None,
    chunk_length=256,
    over_chunks=None,
):
    """The recurrence over packs, cut wherever a position is 0.

    Products are computed in the dtype of `x_BSE`, and each chunk's rounded to it; all else is float32. A
    neighbour's tokens count 0 times. So they change nothing unless they are infinite or NaN: 0 times infinity
    is NaN in their chunk and in all that follow.

    Args:
        x_BSE: float, the inputs, head by head.
        delta_BSN: float, at least 0, the size of each step.
        a_N: float, below 0, the decay of each head.
        b_BSGZ, c_BSGZ: float, from inputs to states and from states to outputs, for N / G heads each.
        skip_N: float, D, what each head adds of its inputs to its outputs.
        position_ids_BS: int32, 0 for padding too; None where each pack is one sequence.
        state_BZE: float32, the states before packs whose first position is not 0; None for zeros.
        chunk_length: T; it need not divide S.
        over_chunks: Function that computes what `chunk_by_chunk` does; None for that.

    Returns:
        float32 `[B, S, E]`, and the states after the last token, float32 `[B, Z, E]`, without a gradient.
    """
    num_packs, (length, num_groups, num_states) = ops.shape(x_BSE)[0], b_BSGZ.shape[1:]
    chunk_length = min(chunk_length, length)
    filled = -length % chunk_length
    if state_BZE is None:
        state_BZE = ops.zeros((num_packs, num_states, x_BSE.shape[-1]))
    if position_ids_BS is None:
        position_ids_BS = ops.ones((num_packs, length), "int32")

    def groups(values):
        """`[B, S, G * any]` to `[B * G, S, any]`."""
        values = ops.reshape(values, (num_packs, values.shape[1], num_groups, -1))
        return ops.reshape(ops.swapaxes(values, 1, 2), (num_packs * num_groups, values.shape[1], -1))

    def packs(values):
        """The reverse of `groups`."""
        values = ops.reshape(values, (num_packs, num_groups, *values.shape[1:]))
        return ops.reshape(ops.swapaxes(values, 1, 2), (num_packs, values.shape[2], -1))

    def chunks(values, value=0.0):
        """`[B, S, ...]` to `[C, B, T, ...]`, filled up at the end."""
        rest = values.shape[2:]
        values = ops.pad(values, [[0, 0], [0, filled], *([0, 0] for _ in rest)], constant_values=value)
        values = ops.reshape(values, (-1, (length + filled) // chunk_length, chunk_length, *rest))
        return ops.swapaxes(values, 0, 1)

    delta_BSN = ops.cast(delta_BSN, "float32")  # a step of size 0 leaves the states as they are
    # A larger step forgets no more, and multiples of bounded logarithms add up exactly
    logs_BSN = ops.maximum(delta_BSN * ops.cast(a_N, "float32"), LEAST_LOG)
    logs_CBNT = ops.swapaxes(chunks(groups(logs_BSN)), 2, 3)
    starts_CBT = ops.cast(chunks(ops.repeat(position_ids_BS, num_groups, axis=0), 1) == 0, "int32")
    numbers_CBT = ops.cumsum(starts_CBT, axis=-1)
    # Arrays of the size of steps are computed for all chunks at once, larger ones chunk by chunk
    multiples_CBNT, *decays_CBNT = restarting_decays(logs_CBNT, numbers_CBT)
    inputs = (*decays_CBNT, *(chunks(groups(each)) for each in (x_BSE, delta_BSN, b_BSGZ, c_BSGZ)))
    # The states before are data: no gradient goes back to the packs that left them
    state_BZE = groups(ops.cast(ops.stop_gradient(state_BZE), "float32"))
    skip_B1N = groups(ops.broadcast_to(ops.cast(skip_N, "float32"), (num_packs, 1, a_N.shape[0])))
    y_CBTE, state_BZE = (over_chunks or chunk_by_chunk)(
        state_BZE, skip_B1N, *inputs, multiples_CBNT, ops.cast(numbers_CBT, "float32")
    )
    y_BSE = ops.reshape(ops.swapaxes(y_CBTE, 0, 1), (-1, length + filled, y_CBTE.shape[-1]))
    return packs(y_BSE[:, :length]), packs(ops.stop_gradient(state_BZE))


def chunk_by_chunk(state_BZE, skip_B1N, *inputs):
    """Outputs of chunks, float32 `[C, B, T, E]`, and the states after the last, float32 `[B, Z, E]`.

    `inputs` are the arguments of `_chunk` from the sums on, `[C, B, ...]` each, then multiples and numbers of
    sequences, which have no gradient. All are float32 but x, b and c.
    """
    return with_gradient(_forward, _backward)(state_BZE, skip_B1N, *inputs)


def restarting_decays(logs_CBNT, numbers_CBT):
    """Sums of log-decays, and decays of what enters and what leaves a chunk.

    A long sum has few digits left for the difference of two tokens that are near each other. So a log-decay
    is two parts: the nearest multiple of a power of 2, whose sums over a chunk are exact, and the rest, whose
    sums are small.

    `numbers_CBT` counts the sequences that begin in a chunk, int32.

    Returns:
        `multiples` since the start of the chunk and `sums` of the rest since the start of the sequence, and
        `entering` and `leaving` as the module's example has them: float32 `[C, B, N, T]` each. `multiples`
        has no gradient.
    """
    unit = 2.0 ** (math.ceil(math.log2(-LEAST_LOG * logs_CBNT.shape[-1])) - 24)  # float32 has 24 bits
    multiples_CBNT = ops.stop_gradient(ops.round(logs_CBNT / unit) * unit)
    sums_CBNT, multiples_CBNT = logs_CBNT - multiples_CBNT, ops.cumsum(multiples_CBNT, axis=-1)
    # The remainders do not add up over the whole chunk: such a sum is rounded with what neighbours add to it
    numbers_CB1T, reach = numbers_CBT[:, :, None], 1
    while reach < logs_CBNT.shape[-1]:  # runs of 1, 2, 4, ... tokens
        shifted = [[0, 0], [0, 0], [0, 0], [reach, 0]]
        before_CBNT = ops.pad(sums_CBNT[..., :-reach], shifted)
        is_same_CB1T = ops.pad(numbers_CB1T[..., :-reach], shifted, constant_values=-1) == numbers_CB1T
        sums_CBNT = sums_CBNT + ops.where(is_same_CB1T, before_CBNT, 0.0)
        reach *= 2
    entering_CBNT = ops.where(numbers_CB1T == 0, ops.exp(multiples_CBNT + sums_CBNT), 0.0)
    is_last_CB1T = numbers_CB1T == numbers_CB1T[..., -1:]
    # `where` comes before `exp`: after it, the gradient of a value that is not selected may be 0 * infinity
    rest_CBNT = multiples_CBNT[..., -1:] - multiples_CBNT + (sums_CBNT[..., -1:] - sums_CBNT)
    leaving_CBNT = ops.exp(ops.where(is_last_CB1T, rest_CBNT, float("-inf")))
    return multiples_CBNT, sums_CBNT, entering_CBNT, leaving_CBNT


def _chunk(numbers_BT, multiples_BNT, state_BZE, skip_B1N, *inputs):
    """The states after a chunk, and its outputs, float32 `[B, T, E]`."""
    sums_BNT, entering_BNT, leaving_BNT, x_BTE, delta_BTN, b_BTZ, c_BTZ = inputs
    length, width = x_BTE.shape[1:]
    num_heads = delta_BTN.shape[-1]

    def product(axes, *factors):
        return ops.cast(ops.einsum(axes, *(ops.cast(each, x_BTE.dtype) for each in factors)), "float32")

    def wide(values_BTN):
        return ops.repeat(values_BTN, width // num_heads, axis=-1)

    is_own_BTT = own_past(numbers_BT)

    def differences(values_BNT):
        return values_BNT[..., :, None] - values_BNT[..., None, :]

    exponents_BNTT = differences(multiples_BNT) + differences(sums_BNT)
    decays_BNTT = ops.exp(ops.where(is_own_BTT[:, None], exponents_BNTT, float("-inf")))
    # One product serves all heads; decays go to weights and inputs, which have heads
    weights_BNTT = product("btz,bsz->bts", c_BTZ, b_BTZ)[:, None] * decays_BNTT
    x32_BTE = ops.cast(x_BTE, "float32")
    inputs_BTE = x32_BTE * wide(delta_BTN)
    inputs_BTNH = ops.reshape(inputs_BTE, (-1, length, num_heads, width // num_heads))
    y_BTNH = product("bnts,bsnh->btnh", weights_BNTT, inputs_BTNH)
    before_BTE = product("btz,bze->bte", c_BTZ, state_BZE) * wide(ops.swapaxes(entering_BNT, 1, 2))
    leaving_BTE = inputs_BTE * wide(ops.swapaxes(leaving_BNT, 1, 2))
    kept_BZE = state_BZE * wide(entering_BNT[:, None, :, -1])
    after_BZE = kept_BZE + product("bsz,bse->bze", b_BTZ, leaving_BTE)
    return after_BZE, ops.reshape(y_BTNH, (-1, length, width)) + before_BTE + x32_BTE * wide(skip_B1N)


def own_past(numbers_BT):
    """True where a token is of the same sequence as another and not after it: bool `[B, T, T]`."""
    length = numbers_BT.shape[1]
    is_past_TT = ops.arange(length)[:, None] >= ops.arange(length)
    return ops.logical_and(numbers_BT[:, :, None] == numbers_BT[:, None, :], is_past_TT)


def _forward(state_BZE, skip_B1N, *inputs):
    def step(carry, slices):
        *given, multiples_BNT, numbers_BT = slices
        after_BZE, y_BTE = _chunk(numbers_BT, multiples_BNT, carry[0], skip_B1N, *given)
        return (after_BZE,), (y_BTE, carry[0])

    (after_BZE,), (y_CBTE, before_CBZE) = scan(step, (state_BZE,), inputs)
    return (y_CBTE, after_BZE), (inputs, skip_B1N, before_CBZE)


def _backward(kept, gradients):
    inputs, skip_B1N, before_CBZE = kept
    dy_CBTE, _ = gradients  # the states at the end are data of the next pack

    def step(carry, slices):
        before_BZE, dy_BTE, *given, multiples_BNT, numbers_BT = slices
        found = pull_back(
            lambda *values: _chunk(numbers_BT, multiples_BNT, *values),
            (before_BZE, skip_B1N, *given),
            (carry[0], dy_BTE),
        )
        return (found[0],), tuple(found[1:])

    nothing_BZE = ops.zeros_like(before_CBZE[0])
    _, (skips_CB1N, *found) = scan(step, (nothing_BZE,), (before_CBZE, dy_CBTE, *inputs), reverse=True)
    # Multiples and numbers are data
    return nothing_BZE, ops.sum(skips_CB1N, axis=0), *found, *map(ops.zeros_like, inputs[-2:])
