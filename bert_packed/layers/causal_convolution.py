"""The convolution of a Mamba over packs, which restarts with every sequence, and SiLU after it.

Legend: B packs per batch, S pack length, E channels, W taps, X = W - 1 tokens before a pack.
"""

from keras import ops


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
            # Not times 0: a neighbour's value may be infinite
            before_BSE = ops.where((position_ids_BS >= back)[:, :, None], before_BSE, 0.0)
        out_BSE = out_BSE + before_BSE * kernel_WE[first]
    if bias_E is not None:
        out_BSE = out_BSE + bias_E
    return ops.silu(out_BSE), ops.stop_gradient(longer[:, length:])
