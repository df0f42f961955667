"""What sorted batching (SORT) costs: sequences of like length share a batch, padded to its longest.

Not a packing: shapes change from batch to batch. The papers give it as the limit that packing must match
(Efficient Sequence Packing, Table 1 and Section C: 99.9 %, factor 2.0 on Wikipedia).
"""

import dataclasses

from data_gen.packing.histogram import check_arguments


@dataclasses.dataclass(frozen=True)
class SortedBatching:
    """Attributes:
    num_tokens: Tokens computed, padding included.
    efficiency: Share of them that is real, 0..1; 1 without sequences.
    packing_factor: Tokens of padding all to S, per token computed; 1 without sequences.
    num_shapes: Different batch lengths: compiled programs on hardware with static shapes.
    """

    num_tokens: int
    efficiency: float
    packing_factor: float
    num_shapes: int


def cost_of_sorted_batching(histogram, max_seq_length, batch_size):
    """Sort by length, cut into batches, pad each to its longest; the last batch may be smaller.

    Example, batch size 2: lengths 2 3 | 3 7 | 8  ->  6 + 14 + 8 tokens for 23.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        batch_size: Sequences per batch, from 1.

    Returns:
        A `SortedBatching`.

    Raises:
        ValueError: an argument breaks its rule.
    """
    histogram, _ = check_arguments(histogram, max_seq_length, "max")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1. Received: {batch_size!r}.")
    counts = histogram.tolist()
    num_sequences = sum(counts)
    num_tokens, real_tokens, seen, shapes = 0, 0, 0, set()
    for length, count in enumerate(counts, start=1):
        if not count:
            continue
        # Batches whose last, and so longest, sequence has this length.
        first, last = seen // batch_size, (seen + count) // batch_size
        if last > first:
            num_tokens += (last - first) * batch_size * length
            shapes.add(length)
        seen += count
        real_tokens += count * length
        if seen == num_sequences and seen % batch_size:
            num_tokens += seen % batch_size * length
            shapes.add(length)
    return SortedBatching(
        num_tokens,
        real_tokens / num_tokens if num_tokens else 1.0,
        num_sequences * max_seq_length / num_tokens if num_tokens else 1.0,
        len(shapes),
    )
