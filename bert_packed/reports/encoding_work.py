"""How many operations each way to turn texts into vectors computes, padding and masked pairs among them."""

import numpy as np

from bert_packed.models.flops import bert_flops

FORWARD = 1 / 3  # of the operations of `bert_flops`, which are those of a forward and a backward pass


def forward_flops(config, shapes):
    """The operations of an encoder on batches: of every token, and every pair of a row, padding too.

    Args:
        config: `ModelConfig`.
        shapes: List of (rows, tokens a row), one a batch.
    """
    num_tokens = sum(rows * length for rows, length in shapes)
    num_pairs = sum(rows * length**2 for rows, length in shapes)
    return FORWARD * bert_flops(config, {"num_tokens": num_tokens, "num_pairs": num_pairs})


def full_batches(num_rows, batch_size, length):
    """Shapes of batches of one size, the last filled up.

    5 rows, 2 at once, of 512   ->   [(2, 512), (2, 512), (2, 512)]
    """
    return [(batch_size, length)] * -(-num_rows // batch_size)


def padded_batches(lengths, batch_size, length=None):
    """Shapes of batches whose last has the rows that are left.

    lengths [3 7 2], 2 at once   ->   [(2, 7), (1, 2)]

    Args:
        lengths: Tokens of each text, in the order in which they are computed.
        batch_size: Rows of a batch.
        length: Tokens of every row; None for those of each batch's longest text.
    """
    parts = [lengths[first : first + batch_size] for first in range(0, len(lengths), batch_size)]
    return [(len(part), int(np.max(part)) if length is None else length) for part in parts]
