"""All strategies that fill a pack exactly, listed or counted.

They are strategies of slots: a shorter sequence in a slot leaves implicit padding. For S = 8 and depth 3:
1 1 6, 1 2 5, 1 3 4, 1 7, 2 2 4, 2 3 3, 2 6, 3 5, 4 4, 8 (Efficient Sequence Packing, Section F.4.1 and
Table 4).
"""

import math

import numpy as np


def count_strategies(max_seq_length, depth, limit=math.inf):
    """The number of partitions of S into at most `depth` parts, exactly.

    S = 512: 257 at depth 2, 22,102 at depth 3, about 940 thousand at depth 4. Counting stops above `limit`,
    at some number above it: all partitions of 8192 take seconds, and their number has 94 digits.
    """
    # Partitions into at most d parts are partitions into parts of at most d.
    ways = [1] + [0] * max_seq_length
    for part in range(1, min(depth, max_seq_length) + 1):
        for total in range(part, max_seq_length + 1):
            ways[total] += ways[total - part]
        if ways[max_seq_length] > limit:
            break
    return ways[max_seq_length]


def list_strategies(max_seq_length, depth):
    """List all strategies in ascending order: int32 `[num_strategies, min(depth, S)]`, 0 to the right."""
    depth = min(depth, max_seq_length)
    finished = []
    parts = np.zeros((1, 0), np.int32)
    rest = np.array([max_seq_length], np.int32)
    for slot in range(depth):
        finished.append(np.column_stack([parts, rest, np.zeros((len(rest), depth - slot - 1), np.int32)]))
        # The next part is no shorter than the last and leaves at least as much for one more.
        lowest = parts[:, -1] if slot else np.ones(1, np.int32)
        choices = np.maximum(rest // 2 - lowest + 1, 0)
        origin = np.repeat(np.arange(len(rest)), choices)
        offset = np.arange(len(origin)) - np.repeat(np.cumsum(choices) - choices, choices)
        new = (lowest[origin] + offset).astype(np.int32)
        parts = np.column_stack([parts[origin], new])
        rest = rest[origin] - new
    strategies = np.concatenate(finished)
    return strategies[np.lexsort(strategies.T[::-1])]
