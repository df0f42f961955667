"""From sums to means: counts of the data, totals over steps, and the one division that ends an interval."""

from keras import ops

COUNT_NAMES = ("num_sequences", "num_tokens")


def count_sequences(batch):
    """What every objective counts: dict of float32 scalars, `COUNT_NAMES`; padding is no token."""
    return {
        "num_sequences": ops.sum(batch["slot_weights"]),
        "num_tokens": ops.sum(ops.cast(batch["sequence_ids"] > 0, "float32")),
    }


def add_sums(total, sums):
    """Add one step's sums to a running total (both dicts of floats; an empty total is zero)."""
    return {name: total.get(name, 0.0) + float(value) for name, value in sums.items()}


def ratio(total, count):
    """`total / count`, and 0 for a mean over nothing."""
    return total / count if count else 0.0
