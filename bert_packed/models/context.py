"""What an encoder block may know of its packs besides the hidden states, and who sees whom by it.

Legend: B packs per batch, S pack length, N heads.
"""

from keras import ops

MASKED_SCORE = -1e9  # exp(MASKED_SCORE - anything a score can be) is exactly 0 in float32 and bfloat16


class PackContext:
    """Which sequence each token of a batch of packs is of, and where in it; one object for all blocks.

    A block takes what it needs: dense attention the mask, a fused kernel the ids, a recurrence the positions,
    which tell where to start anew. Made inside the program, for one call of the encoder.

    Attributes:
        sequence_ids_BS: int32 `[B, S]`, 1..K, 0 is padding.
        position_ids_BS: int32 `[B, S]`, restarts at 0 in every sequence; None where a Mamba is to go on
            through packs as if each were one sequence.
    """

    def __init__(self, sequence_ids_BS, position_ids_BS):
        self.sequence_ids_BS = sequence_ids_BS
        self.position_ids_BS = position_ids_BS
        self._mask_B1SS = None

    @property
    def mask_B1SS(self):  # noqa: N802  named as a variable of its shape is
        """bool `[B, 1, S, S]`, True where both tokens are of one sequence; made when first asked for."""
        if self._mask_B1SS is None:
            self._mask_B1SS = same_sequence(self.sequence_ids_BS)
        return self._mask_B1SS

    def hide(self, scores_BNSS):
        """Attention scores `[B, N, S, S]`, so low between sequences that a softmax gives exactly 0 there."""
        # Not scores * mask: a score of 0 keeps a share of the softmax, and neighbours would leak in
        return ops.where(self.mask_B1SS, scores_BNSS, MASKED_SCORE)

    def apart(self):
        """The same context without what was made from it.

        For a program inside the program, such as a block that is computed again for its gradient: what is
        made in there must not be used outside.
        """
        return PackContext(self.sequence_ids_BS, self.position_ids_BS)


def same_sequence(sequence_ids_BS):
    """Which token may attend to which: block-diagonal, by equality.

    Section 3.2.2 and Figure 2 of "Efficient Sequence Packing without Cross-contamination".

        sequence_ids   [1 1 2 0]   ->   [1 1 0 0]
                                        [1 1 0 0]
                                        [0 0 1 0]
                                        [0 0 0 1]

    Padding (0) equals padding, so that no row is empty: a softmax over nothing would be NaN.

    Args:
        sequence_ids_BS: int32 `[B, S]`, 1..K, 0 is padding.

    Returns:
        bool `[B, 1, S, S]`, True where both tokens are of one sequence.
    """
    return ops.equal(sequence_ids_BS[:, None, :, None], sequence_ids_BS[:, None, None, :])
