"""Dynamic masking (RoBERTa): new predictions each time that a pack is read.

Legend: B packs per batch, S pack length, P predictions per pack.
"""

from collections.abc import Iterator

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.records.shuffle import hash_numbers

ORDER, FATE, RANDOM = 1, 2, 3  # what is drawn


class DynamicMasking:
    """New predictions for packs, as many in each sequence as the record has; with whole words perhaps fewer.

    They depend on seed, epoch, pack number and position only, not on the process. With 2 = [CLS], 3 = [SEP],
    4 = [MASK], 0 = padding:

        token_ids             [ 2  7  4  3  2  9  4  3  0]   ->   [ 2  4  8  3  2  4  6  3  0]
        sequence_ids          [ 1  1  1  1  2  2  2  2  0]        the same
        prediction_positions  [ 2  6  0]                          [ 1  5  0]
        prediction_ids        [ 8  6  0]                          [ 7  9  0]
        prediction_sequences  [ 1. 2. 0.]                         the same

    `vocabulary`, of `vocabularies.load_maskable`, must be that of the records; `rules` are `MaskingRules`.
    """

    def __init__(self, vocabulary, rules, seed):
        self._vocabulary, self._rules, self._seed = vocabulary, rules, seed

    @property
    def vocab_size(self):
        """Number of tokens, any of which may occur in a batch."""
        return len(self._vocabulary)

    def redraw(self, batch, epochs, packs):
        """The batch with new predictions; arrays that change are copies.

        `epochs`, int `[B]`, count how often each of `packs` was read before. Raises `InputError` for a token
        that is not in the vocabulary.
        """
        token_ids, sequence_ids = batch["token_ids"].copy(), batch["sequence_ids"]
        owners = batch["prediction_sequences"].astype(np.int64)
        rows, places = np.nonzero(owners)
        token_ids[rows, batch["prediction_positions"][rows, places]] = batch["prediction_ids"][rows, places]
        if token_ids.max(initial=0) >= len(self._vocabulary):
            raise InputError(
                f"`vocab_file` must be the one of the records. Received: one of {len(self._vocabulary)} "
                f"tokens, for a token {token_ids.max()}."
            )
        key = (self._seed, np.asarray(epochs), np.asarray(packs))
        rows, columns = self._choose(token_ids, sequence_ids, owners, key)
        # Each pack's predictions follow one another
        places = np.arange(len(rows)) - np.searchsorted(rows, rows)
        labels = token_ids[rows, columns]
        token_ids[rows, columns] = self._hide(labels, [part[..., rows] for part in key[1:]], columns)
        drawn = {}
        for name, values in (
            ("prediction_positions", columns),
            ("prediction_ids", labels),
            ("prediction_sequences", sequence_ids[rows, columns]),
        ):
            drawn[name] = np.zeros_like(batch[name])
            drawn[name][rows, places] = values
        return {**batch, **drawn, "token_ids": token_ids}

    def _choose(self, token_ids, sequence_ids, owners, key):
        """Rows and columns of the predictions, int64 `[p]` each, in reading order."""
        special = [self._vocabulary.cls_id, self._vocabulary.sep_id]
        rows, columns = np.nonzero((sequence_ids > 0) & ~np.isin(token_ids, special))
        # Sequences of the batch are numbered in reading order
        num_slots = max(sequence_ids.max(initial=0), owners.max(initial=0)) + 1
        sequences = rows * num_slots + sequence_ids[rows, columns]
        counted = np.arange(len(owners))[:, None] * num_slots + owners
        wanted = np.bincount(counted[owners > 0], minlength=len(owners) * num_slots)
        begins = np.ones(len(rows), bool)  # of units that are chosen as a whole
        if self._rules.do_whole_word_mask:
            is_next = (np.diff(sequences, prepend=-1) == 0) & (np.diff(columns, prepend=-1) == 1)
            begins = ~(is_next & self._vocabulary.is_continuation[token_ids[rows, columns]])
        firsts = np.flatnonzero(begins)
        sizes = np.diff(firsts, append=len(rows))
        seed, *of_packs = key
        order = hash_numbers(seed, *(part[rows[firsts]] for part in of_packs), columns[firsts], ORDER)
        kept = _keep(sequences[firsts], sizes, order, wanted)
        taken = np.repeat(kept, sizes) > np.arange(len(rows)) - np.repeat(firsts, sizes)
        return rows[taken], columns[taken]

    def _hide(self, labels, of_packs, columns):
        """[MASK], a random token or the token itself in place of `labels` `[p]`."""
        fate = hash_numbers(self._seed, *of_packs, columns, FATE) / 2.0**64
        ordinary = self._vocabulary.ordinary_ids
        random_ids = ordinary[hash_numbers(self._seed, *of_packs, columns, RANDOM) % np.uint64(len(ordinary))]
        unmasked = np.where(fate < self._rules.kept_from, labels, random_ids)
        return np.where(fate < self._rules.mask_replace_prob, self._vocabulary.mask_id, unmasked)


def _keep(sequences, sizes, order, wanted):
    """Number of predicted tokens of each word, `[w]`; `wanted` is by sequence.

        sequences [1 1 1 2 2], sizes [2 1 1 4 3], order [5 9 2 8 4], wanted [0 2 2]   ->   [0 1 1 0 2]

    Whole words are taken by `order`; a word that exceeds the rest is passed over. If no word of a sequence
    fits, the beginning of its shortest is taken.
    """
    by_order = np.lexsort((order, sequences))
    starts = np.flatnonzero(np.diff(sequences, prepend=-1))
    sorted_sizes, kept = sizes[by_order], np.zeros(len(sizes), np.int64)
    # Words up to the first one that does not fit are chosen at once, by arrays
    before = np.cumsum(sorted_sizes) - sorted_sizes
    before -= np.repeat(before[starts], np.diff(starts, append=len(sizes)))
    fits = before + sorted_sizes <= wanted[sequences]
    kept[by_order[fits]] = sorted_sizes[fits]
    ends = np.append(starts[1:], len(sizes))
    left = wanted[sequences[starts]] - np.add.reduceat(sorted_sizes * fits, starts)
    for group in np.flatnonzero(left).tolist():
        room, first = int(left[group]), starts[group] + int(fits[starts[group] : ends[group]].sum())
        for place in range(first, ends[group]):
            if sorted_sizes[place] <= room:
                kept[by_order[place]] = sorted_sizes[place]
                room -= sorted_sizes[place]
                if not room:
                    break
        else:
            own = slice(starts[group], ends[group])
            if not kept[own].any():
                kept[own.start + np.argmin(sizes[own])] = min(sizes[own].min(), room)
    return kept


class MaskedBatches(Iterator):
    """`CheckedBatches` with `DynamicMasking` by epoch; the other arguments are those of `train_batches`."""

    def __init__(self, batches, masking, index, shard, batch_size, first_step):
        self._batches, self._masking, self._index, self._shard = batches, masking, index, shard
        self._batch_size, self._step = batch_size, first_step

    def __next__(self):
        batch = next(self._batches)
        places = self._shard.places(self._step, self._batch_size)
        self._step += 1
        return self._masking.redraw(batch, places // self._index.num_packs, self._batches.packs(self._index))

    @property
    def sources(self):
        return self._batches.sources
