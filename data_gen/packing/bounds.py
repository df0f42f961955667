"""How few packs any plan can have: lower bounds in exact whole numbers."""

from data_gen.packing.plan import check_arguments


def lower_bound(histogram, max_seq_length, max_sequences_per_pack):
    """The best of the bounds that cost nothing: tokens / S and sequences / depth, rounded up.

    Args:
        histogram: int64 `[S]`, entry i counts the sequences of length i + 1.
        max_seq_length: S.
        max_sequences_per_pack: Depth, a whole number from 1, or "max".

    Returns:
        A whole number that no plan is below; 0 for an empty histogram.

    Raises:
        ValueError: an argument breaks its rule.
    """
    histogram, depth = check_arguments(histogram, max_seq_length, max_sequences_per_pack)
    counts = histogram.tolist()  # Python's whole numbers: the sum of tokens may exceed 64 bits
    num_tokens = sum(length * count for length, count in enumerate(counts, start=1))
    return max(-(-num_tokens // max_seq_length), -(-sum(counts) // depth))
