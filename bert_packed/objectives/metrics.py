"""From sums to means: counts of the data, totals over steps, and the one division that ends an interval.

Legend: B packs per batch, S pack length, K sequences per pack.
"""

import math

from keras import ops

LARGEST_EXPONENT = 709  # of a float
COUNT_NAMES = ("num_sequences", "num_tokens", "num_pairs")


def count_sequences(batch):
    """What every objective counts: dict of float32 scalars, `COUNT_NAMES`; padding is no token.

    `num_pairs` is what attention has to do: ordered pairs of tokens of one sequence, each token with itself
    too. The pack `1 1 1 2 2 .` has 9 + 4.

    Args:
        batch: Dict with `sequence_ids` int32 `[B, S]`, 0 is padding, and `slot_weights` `[B, K]`.
    """
    sequence_ids_BS1 = batch["sequence_ids"][:, :, None]
    slots_K = ops.arange(1, batch["slot_weights"].shape[1] + 1, dtype="int32")
    lengths_BK = ops.sum(ops.cast(ops.equal(ops.cast(sequence_ids_BS1, "int32"), slots_K), "float32"), axis=1)
    return {
        "num_sequences": ops.sum(batch["slot_weights"]),
        "num_tokens": ops.sum(ops.cast(batch["sequence_ids"] > 0, "float32")),
        "num_pairs": ops.sum(ops.square(lengths_BK)),
    }


def add_sums(total, sums):
    """Add one step's sums to a running total (both dicts of floats; an empty total is zero)."""
    return {name: total.get(name, 0.0) + float(value) for name, value in sums.items()}


def perplexity(nll):
    """e to the power of a mean negative log-likelihood: as unsure as among so many alike; or infinity."""
    return math.exp(nll) if nll < LARGEST_EXPONENT else math.inf


def ratio(total, count):
    """`total / count`, and 0 for a mean over nothing."""
    return total / count if count else 0.0
