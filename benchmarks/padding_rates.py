"""How much of a batch is padding, by the way in which sequences of many lengths come into it.

What PackMamba prints in Sections 2 and 5, beside the same ways on lengths like its own, and our packing.
"""

import numpy as np
from scipy import optimize
from scipy.stats import norm

from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import count_lengths

# Of the sequences of PackMamba's Section 4; nothing else is known of them
SHORTEST, LONGEST, MEAN = 57, 2048, 646
SPREAD = 2.0  # ours: of the logarithm of a document's length
MOST_EVEN = 4000  # quantiles that stand for all documents
# Percent
PRINTED = {"padded": 66.3, "in order of arrival": 19.1, "sorted in a window": 0.41}


def draw_lengths(num_sequences, seed, shortest=SHORTEST, longest=LONGEST, mean=MEAN):
    """Random lengths between two, of a given mean.

    Documents are log-normal, with a spread of `SPREAD` in the logarithm; those shorter than `shortest` are
    left out, longer ones are cut at `longest`. The one number left is solved for the mean.

    Args:
        num_sequences: n.
        seed: Whole number.
        shortest, longest, mean: Tokens.

    Returns:
        int64 `[n]`.
    """
    even = (np.arange(MOST_EVEN) + 0.5) / MOST_EVEN

    def excess(middle):
        return _lengths(even, middle, shortest, longest).mean() - mean

    # Nearly all documents are left out, and nearly all are cut
    low, high = np.log(shortest) - 6 * SPREAD, np.log(longest) + 6 * SPREAD
    middle = optimize.brentq(excess, low, high)
    return _lengths(np.random.default_rng(seed).random(num_sequences), middle, shortest, longest)


def _lengths(shares, middle, shortest, longest):
    """The lengths below which a share of the documents is, that are as long as `shortest`: int64 `[n]`."""
    kept = norm.sf((np.log(shortest) - middle) / SPREAD)
    documents = np.exp(middle + SPREAD * norm.isf((1 - shares) * kept))
    return np.minimum(documents, longest).astype(np.int64)


def padding_rates(lengths, row_length, pack_length, window, seed=0):
    """Share of padding in each way.

        lengths 5 4 3 4 2 in this order, packs of 8
        in order of arrival    5 . . . | 4 3 . | 4 2 . .
        sorted in a window     5 3 | 4 4 | 2 . . . . . .

    Args:
        lengths: Int `[n]`.
        row_length: Tokens of a row that holds one sequence.
        pack_length: S, tokens of a pack.
        window: Sequences that wait at a time, of which the longest that fits goes into the open pack.
        seed: Of the order of arrival.

    Returns:
        List of dicts for a table: `way`, `tokens` of a row or pack, `rows`, `padding, %`, `PackMamba, %`
        (None where it prints nothing) and, for our packing, the fewest rows proven possible, `at least`.
    """
    histogram = count_lengths(lengths, pack_length)

    def pack(algorithm, **options):
        return ALGORITHMS[algorithm](histogram, pack_length, "max", **options)

    ours, sorted_in_window = pack(DEFAULT_ALGORITHM), pack("local_greedy", buffer_size=window, seed=seed)
    rows = {
        "padded": (row_length, len(lengths)),
        "in order of arrival": (pack_length, pack("greedy", seed=seed).num_packs),
        "sorted in a window": (pack_length, sorted_in_window.num_packs),
        f"histogram-packed ({DEFAULT_ALGORITHM})": (
            pack_length,
            ours.num_packs,
            ours.certificate.lower_bound,
        ),
    }
    return [
        {
            "way": way,
            "tokens": size,
            "rows": num_rows,
            "padding, %": 100 * (1 - int(np.sum(lengths)) / (num_rows * size)),
            "PackMamba, %": PRINTED.get(way),
            "at least": bound[0] if bound else None,
        }
        for way, (size, num_rows, *bound) in rows.items()
    ]
