"""Sequence ids, positions and attention mask of a batch of packs.

Legend: B packs per batch, S pack length, N heads.
"""

from keras import ops

from bert_packed.assembly.block_attention_mask import attention_mask

MASKED_SCORE = -1e9  # exp(MASKED_SCORE - any score) is exactly 0 in float32 and bfloat16


class PackContext:
    """Sequence and position of each token of a batch of packs; one object for all blocks."""

    def __init__(self, sequence_ids_BS, position_ids_BS):
        self.sequence_ids_BS = sequence_ids_BS  # 1..K, 0 is padding; None where only positions are read
        # From 0 in every sequence; None where a Mamba is to treat each pack as one sequence
        self.position_ids_BS = position_ids_BS
        self._mask_B1SS = None

    @property
    def mask_B1SS(self):  # noqa: N802  named as a variable of its shape is
        """bool, True where both tokens are of one sequence."""
        if self._mask_B1SS is None:
            self._mask_B1SS = attention_mask(self.sequence_ids_BS)
        return self._mask_B1SS

    def hide(self, scores_BNSS):
        """Attention scores, so low between sequences that a softmax gives exactly 0 there."""
        # Not scores * mask: a score of 0 keeps a share of the softmax, and neighbours would leak in
        return ops.where(self.mask_B1SS, scores_BNSS, MASKED_SCORE)

    def apart(self):
        """The same context without its mask, for a program inside the program."""
        # A mask that is made inside, as in a block that is recomputed, must not be used outside
        return PackContext(self.sequence_ids_BS, self.position_ids_BS)
