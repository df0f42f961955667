"""Unpacked form of a packed batch, a sequence a row: the reference that packing must equal.

Legend: B packs per batch, R sequences (rows), S pack length, P predictions per pack, K sequences per pack.
"""

import numpy as np

from bert_packed.objectives.features import OWNERS, RECORDED


def unpack(batch, multiple=1, features=RECORDED):
    """Unpack a batch by a plain loop.

    Positions are counted again and [CLS] is the first token, so wrong `position_ids` or `cls_positions` of
    the pack show as a difference.

        token_ids     [[a b c d e 0]]   ->   [[a b 0 0 0 0]   [[c d e 0 0 0]
        sequence_ids  [[1 1 2 2 2 0]]         [1 1 0 0 0 0]]   [1 1 1 0 0 0]]

    Args:
        batch: Dict of the model's arrays, `[B, S]`, `[B, P]` and `[B, K]`.
        multiple: Fill with empty rows (all zeros) until this divides R.
        features: `Feature`s that the batch holds, `sequence_ids` and `slot_weights` among them.

    Returns:
        Dict of the same arrays, `[R, S]`, `[R, P]` and `[R, K]` (slot 1 is used), and an int array of each
        sequence's row and slot (1..K) in the batch, without the empty rows.
    """
    batch = {feature.name: np.asarray(batch[feature.name]) for feature in features}
    slots = [
        (row, int(slot))
        for row in range(len(batch["slot_weights"]))
        for slot in np.flatnonzero(batch["slot_weights"][row]) + 1
    ]
    owners = {kind: batch[name] for kind, name in OWNERS.items() if name in batch}
    num_rows = -(-len(slots) // multiple) * multiple
    result = {name: np.zeros((num_rows, values.shape[1]), values.dtype) for name, values in batch.items()}
    for new, (row, slot) in enumerate(slots):
        mine = {kind: np.flatnonzero(owner[row] == slot) for kind, owner in owners.items()}
        mine["K"] = np.array([slot - 1])
        first = mine["S"][0] if len(mine["S"]) else 0
        for feature in features:
            values = batch[feature.name][row, mine[feature.length]]
            if feature.is_slot:
                values = values > 0
            result[feature.name][new, : len(values)] = values - first if feature.is_position else values
        result["position_ids"][new, : len(mine["S"])] = np.arange(len(mine["S"]))
        if "cls_positions" in batch:
            result["cls_positions"][new] = 0
    return result, np.array(slots)
