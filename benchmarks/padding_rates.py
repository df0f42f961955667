"""Share of padding by the way in which sequences of many lengths fill rows, as PackMamba prints it.

Sections 2 and 5 of "PackMamba: Efficient Processing of Variable-Length Sequences in Mamba Training".
"""

import numpy as np
from scipy import optimize
from scipy.stats import norm

from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import count_lengths

# Lengths of PackMamba's Section 4; nothing else is known of them
SHORTEST, LONGEST, MEAN = 57, 2048, 646
SPREAD = 2.0  # ours: of the logarithm of a document's length
NUM_EVEN = 4000  # quantiles of all documents, whose mean is solved for
WINDOW = 64  # sequences that wait while packs are filled in order
PADDED, HISTOGRAM_PACKED = "padded", f"histogram-packed ({DEFAULT_ALGORITHM})"
PRINTED = {PADDED: 66.3, "in order of arrival": 19.1, "sorted in a window": 0.41}  # percent


def draw_lengths(num_sequences, seed, shortest=SHORTEST, longest=LONGEST, mean=MEAN):
    """Random lengths between two, of a given mean: int64 `[num_sequences]`.

    Documents are log-normal; those shorter than `shortest` are left out, longer ones are cut at `longest`.
    """
    even = (np.arange(NUM_EVEN) + 0.5) / NUM_EVEN

    def lengths(shares, middle):
        """Lengths below which a share of the documents is that are as long as `shortest`."""
        kept = norm.sf((np.log(shortest) - middle) / SPREAD)
        documents = np.exp(middle + SPREAD * norm.isf((1 - shares) * kept))
        return np.minimum(documents, longest).astype(np.int64)

    # The middle is solved for the mean. At the ends nearly all documents are left out, and nearly all are cut
    low, high = np.log(shortest) - 6 * SPREAD, np.log(longest) + 6 * SPREAD
    middle = optimize.brentq(lambda at: lengths(even, at).mean() - mean, low, high)
    return lengths(np.random.default_rng(seed).random(num_sequences), middle)


def padding_rows(lengths, row_length, pack_length, window=WINDOW, seed=0):
    """Share of padding in each way to fill rows: rows of a table.

        lengths 5 4 3 4 2 in this order, packs of 8
        in order of arrival    5 . . . | 4 3 . | 4 2 . .
        sorted in a window     5 3 | 4 4 | 2 . . . . . .

    In a window of sequences that wait, the longest that fits goes into the open pack. `seed` is of the order
    of arrival.
    """
    histogram = count_lengths(lengths, pack_length)
    ours = ALGORITHMS[DEFAULT_ALGORITHM](histogram, pack_length, "max")
    in_order = ALGORITHMS["greedy"](histogram, pack_length, "max", seed=seed)
    in_window = ALGORITHMS["local_greedy"](histogram, pack_length, "max", buffer_size=window, seed=seed)
    rows = [
        (PADDED, row_length, len(lengths), None),
        ("in order of arrival", pack_length, in_order.num_packs, None),
        ("sorted in a window", pack_length, in_window.num_packs, None),
        (
            HISTOGRAM_PACKED,
            pack_length,
            ours.num_packs,
            ours.certificate.lower_bound,
        ),
    ]
    return [
        {
            "way": way,
            "tokens": size,
            "rows": num_rows,
            "padding, %": 100 * (1 - int(np.sum(lengths)) / (num_rows * size)),
            "PackMamba, %": PRINTED.get(way),
            "at least": at_least,
        }
        for way, size, num_rows, at_least in rows
    ]
