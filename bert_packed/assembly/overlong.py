"""What happens to sequences that are longer than a pack: an error, truncated, or dropped."""

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.records.sequences import range_indices, sum_ranges, take

OVERLONG_CHOICES = ("error", "truncate", "drop")


def fit_lengths(sequences, max_seq_length, overlong):
    """Make every sequence fit into a pack.

    Args:
        sequences: `Sequences` of `BERT_LAYOUT`.
        max_seq_length: S.
        overlong: One of `OVERLONG_CHOICES`.

    Returns:
        `Sequences`, and a dict with the numbers of sequences "truncated" and "dropped".

    Raises:
        InputError: with "error", naming file and record of the first that is too long.
    """
    is_overlong = sequences["lengths"] > max_seq_length
    num_overlong = int(is_overlong.sum())
    counts = {"truncated": 0, "dropped": 0}
    if num_overlong == 0:
        return sequences, counts
    if overlong == "drop":
        return take(sequences, ~is_overlong), {**counts, "dropped": num_overlong}
    if overlong == "truncate":
        return truncate(sequences, max_seq_length), {**counts, "truncated": num_overlong}
    first = int(np.argmax(is_overlong))
    raise InputError(
        f"{sequences.origin(first)}: a sequence must have at most max_seq_length={max_seq_length} tokens, "
        f"unless --overlong=truncate or drop. Received: {sequences['lengths'][first]} tokens."
    )


def drop_overlong(sequences, max_seq_length, overlong):
    """Drop `Sequences` of `CAUSAL_LAYOUT` that do not fit into a pack, as `fit_lengths` does for BERT's.

    Raises:
        InputError: with anything else, naming file and record of the first that is too long.
    """
    is_overlong = sequences["lengths"] > max_seq_length
    if is_overlong.any() and overlong != "drop":
        first = int(np.argmax(is_overlong))
        raise InputError(
            f"{sequences.origin(first)}: a sequence must have at most max_seq_length={max_seq_length} "
            "tokens, unless --overlong=drop or --split_sequences. "
            f"Received: {sequences['lengths'][first]} tokens."
        )
    counts = {"truncated": 0, "dropped": int(is_overlong.sum())}
    return (take(sequences, ~is_overlong) if is_overlong.any() else sequences), counts


def truncate(sequences, max_seq_length):
    """Shorten sequences over `max_seq_length`: keep the first tokens, and the last one as the closing [SEP].

        2 7 4 6 9 3  with 4   ->   2 7 4 3

    The predictions of dropped tokens are dropped. Where sentence A alone fills the length, nothing is left
    of sentence B but its [SEP].

    Returns:
        `Sequences`; those that fit are unchanged.
    """
    lengths = sequences["lengths"]
    token_position = range_indices(np.zeros(len(sequences), np.int64), lengths)
    from_end = np.repeat(lengths, lengths) - token_position
    keep_token = (token_position < max_seq_length - 1) | (from_end == 1)
    position = sequences["prediction_positions"]
    last = np.repeat(lengths, sequences["num_predictions"]) - 1
    keep_prediction = (position < max_seq_length - 1) | (position == last)
    return sequences.replace(
        lengths=np.minimum(lengths, max_seq_length),
        tokens=sequences["tokens"][keep_token],
        token_type_ids=sequences["token_type_ids"][keep_token],
        num_predictions=sum_ranges(keep_prediction, sequences["num_predictions"]),
        # the last token moves to the last place that is left
        prediction_positions=np.minimum(position, max_seq_length - 1)[keep_prediction],
        prediction_ids=sequences["prediction_ids"][keep_prediction],
    )
