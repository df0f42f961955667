"""What makes two sequences the same: a digest of all that packing must conserve of each."""

import hashlib

import numpy as np

from bert_packed.records.sequences import range_indices, to_offsets

DIGEST_BYTES = 16  # chance of one collision among 10^9 sequences: 10^-21


def digest_bert(sequences):
    """Digests of `Sequences`: tokens, sentence A/B, mask positions and labels, next-sentence label.

    Returns:
        uint64 `[n, 2]`.
    """
    lengths, num_predictions = sequences.lengths, sequences.num_predictions
    return digest_rows(
        (sequences.next_sentence_labels,),
        (
            (sequences.tokens, lengths),
            (sequences.token_type_ids, lengths),
            (sequences.prediction_positions, num_predictions),
            (sequences.prediction_ids, num_predictions),
        ),
    )


def digest_causal(sequences):
    """Digests of `CausalSequences`: tokens, labels, where there is one, and bytes of text.

    Returns:
        uint64 `[n, 2]`.
    """
    lengths = sequences.lengths
    return digest_rows(
        (sequences.num_bytes % 2**31, sequences.num_bytes // 2**31),
        ((sequences.tokens, lengths), (sequences.labels, lengths), (sequences.label_mask, lengths)),
    )


def digest_rows(numbers, columns):
    """A digest of what each of n rows holds.

    Args:
        numbers: Int arrays `[n]`, one number a row.
        columns: Pairs of int arrays: values, and `[n]` how many of them each row has.

    Returns:
        uint64 `[n, 2]`.
    """
    # sizes in front make the rest unambiguous: sizes, numbers, values of the first column, of the second, ...
    heads = (*(sizes for _, sizes in columns), *numbers)
    offsets = to_offsets(len(heads) + sum(sizes for _, sizes in columns))
    rows = np.empty(offsets[-1], "<i4")
    place = offsets[:-1]
    for values in heads:
        rows[place] = values
        place = place + 1
    for values, sizes in columns:
        rows[range_indices(place, sizes)] = values
        place = place + sizes
    content = rows.tobytes()
    digests, start = [], 0
    for end in (4 * offsets[1:]).tolist():
        digests.append(hashlib.blake2b(content[start:end], digest_size=DIGEST_BYTES).digest())
        start = end
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
