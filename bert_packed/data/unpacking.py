"""The sequences of a packed batch, each in a row of its own: what packing must be equal to.

Legend: B packs per batch, R sequences (rows), S pack length, P predictions per pack, K sequences per pack.
"""

import numpy as np


def unpack(batch, multiple=1):
    """Unpack a batch by a plain loop that trusts nothing that packing computes.

    Positions are counted anew and [CLS] is the first token, so wrong `position_ids` or `cls_positions` of the
    pack show as a difference.

        token_ids     [[a b c d e 0]]   ->   [[a b 0 0 0 0]   [[c d e 0 0 0]
        sequence_ids  [[1 1 2 2 2 0]]         [1 1 0 0 0 0]]   [1 1 1 0 0 0]]

    Args:
        batch: Dict of the model's arrays, `[B, S]`, `[B, P]` and `[B, K]`.
        multiple: Fill with empty rows (all zeros) until this divides R.

    Returns:
        Dict of the same arrays, `[R, S]`, `[R, P]` and `[R, K]` (slot 1 is used), in reading order of the
        sequences, and an int array `[R, 2]` of each sequence's row and slot (1..K) in the batch, empty rows
        left out.
    """
    batch = {name: np.asarray(values) for name, values in batch.items()}
    slots = [
        (row, int(slot))
        for row in range(len(batch["nsp_weights"]))
        for slot in np.flatnonzero(batch["nsp_weights"][row]) + 1
    ]
    num_rows = -(-len(slots) // multiple) * multiple
    result = {name: np.zeros((num_rows, values.shape[1]), values.dtype) for name, values in batch.items()}
    for new, (row, slot) in enumerate(slots):
        tokens = np.flatnonzero(batch["sequence_ids"][row] == slot)
        length = len(tokens)
        for name in ("token_ids", "token_type_ids"):
            result[name][new, :length] = batch[name][row, tokens]
        result["sequence_ids"][new, :length] = 1
        result["position_ids"][new, :length] = np.arange(length)
        mine = np.flatnonzero(batch["prediction_sequences"][row] == slot)
        positions = batch["prediction_positions"][row, mine] - (tokens[0] if length else 0)
        result["prediction_positions"][new, : len(mine)] = positions
        result["prediction_ids"][new, : len(mine)] = batch["prediction_ids"][row, mine]
        result["prediction_sequences"][new, : len(mine)] = 1
        result["nsp_labels"][new, 0] = batch["nsp_labels"][row, slot - 1]
        result["nsp_weights"][new, 0] = 1
    return result, np.array(slots)
