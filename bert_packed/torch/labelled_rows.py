"""Labels of sequences and tokens, and packs as padded rows that say where each token is in its pack.

Legend: n sequences, L the longest, B packs, S pack length, K sequences per pack, C labels of a sequence.
"""

import numpy as np

from bert_packed.assembly.given_columns import MADE, POSITION_IDS, SEQUENCE_IDS, SEQUENCE_INDEX, refuse
from bert_packed.packing.arguments import WHOLE, as_array, shown

LABELS, LABEL = "labels", "label"
KINDS = ("sequence", "token")
IGNORED = -100  # a label that neither torch nor transformers counts


def find_labels(columns, kind, pack_length=None):
    """The labels of sequences, taken out of the columns; None where there are none, or each token has one.

    `pack_length` is S where the rows are packs.
    """
    if LABEL in columns:  # which the collators of transformers rename, too
        columns[LABELS] = columns.pop(LABEL)
    if LABELS not in columns or kind == "sequence":
        return columns.pop(LABELS, None)
    what = "row" if pack_length else "sequence"
    for number, value in enumerate(columns[LABELS]):
        rule = "be whole numbers, one for each token"
        as_array(value, f"{what} {number}: {LABELS}", rule, WHOLE, (pack_length,))
    return None


def sequence_labels(labels, sequence_ids=None):
    """Labels in the order of the sequences: int64 `[n]`, float32 `[n]` or `[n, C]`.

    They are given as n numbers or lists of C; for packs, which have `sequence_ids` `[B, S]`, as B lists.
    """
    if sequence_ids is not None:
        rows, labels = labels, []
        for number, (row, num_own) in enumerate(zip(rows, sequence_ids.max(axis=1), strict=True)):
            if np.ndim(row) < 1 or len(row) < num_own:
                rule = f"have a label for each of its {num_own} sequences"
                refuse(f"row {number}: {LABELS}", rule, shown(row))
            labels.extend(row[:num_own])  # further ones are of unused slots
    arrays = []
    for number, value in enumerate(labels):
        name, rule = f"sequence {number}: {LABELS}", "be a number, or a list of one for each label"
        array = as_array(value, name, rule, kinds="biuf")
        if array.ndim > 1 or not array.size:
            refuse(name, rule, shown(value))
        first = (arrays or [array])[0]
        if array.shape != first.shape:
            form = f"a list of {len(first)}" if first.ndim else "a number"
            refuse(name, f"be {form}, as in sequence 0", shown(value))
        if not (np.isfinite(array) & (array != IGNORED)).all():
            refuse(name, f"be finite, and not {IGNORED}, which Trainer does not count", shown(value))
        arrays.append(array)
    found = np.stack(arrays)
    return found.astype(np.float32 if found.ndim > 1 or found.dtype.kind == "f" else np.int64)


def rows_of_packs(packs, padding):
    """The sequences of packs as padded rows, in the order of `sequence_index`, or else of the packs.

        input_ids       [[8 9 5 6 7 0]]    ->   input_ids  [[5 6 7]   attention_mask  [[1 1 1]
        sequence_ids    [[1 1 2 2 2 0]]                     [8 9 0]]                   [1 1 0]]
        sequence_index  [[1 0]]                 pack_index [[3 4 0 1 2]]

    Columns of packs are `[B, S]` or `[B, K]`; `padding` has what some columns hold in padding;
    others hold 0.
    """
    ids_BS, positions_BS = packs[SEQUENCE_IDS], packs[POSITION_IDS]
    rows_BK = packs.get(SEQUENCE_INDEX)
    if rows_BK is None:
        is_used_BK = np.arange(ids_BS.max()) < ids_BS.max(axis=1, keepdims=True)
        rows_BK = np.where(is_used_BK, is_used_BK.cumsum().reshape(is_used_BK.shape) - 1, -1)
    num_rows, length = rows_BK.max() + 1, positions_BS.max() + 1
    is_token_BS, is_used_BK = ids_BS > 0, rows_BK >= 0
    starts_BS = np.take_along_axis(rows_BK, np.maximum(ids_BS - 1, 0), axis=1) * length
    index_BS = np.where(is_token_BS, starts_BS + positions_BS, -1)
    batch = {}
    for name, values in {**packs, "attention_mask": np.ones_like(ids_BS)}.items():
        if name in MADE:
            continue
        dtype = np.int64 if values.dtype.kind in "biu" else values.dtype
        if values.shape[:2] == ids_BS.shape:
            batch[name] = np.full((num_rows, length), padding.get(name, 0), dtype)
            batch[name].reshape(-1)[index_BS[is_token_BS]] = values[is_token_BS]
        else:
            batch[name] = np.zeros(num_rows, dtype)
            batch[name][rows_BK[is_used_BK]] = values[:, : rows_BK.shape[1]][is_used_BK]
    return batch | {"pack_index": index_BS[:, : int(is_token_BS.sum(axis=1).max())]}
