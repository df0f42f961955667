"""Which tokens of a sequence are to be predicted, and what stands in their place: BERT's masked LM."""

import numpy as np

MASK_RATE = 0.8  # of the predicted tokens become [MASK]
KEEP_RATE = 0.1  # stay as they are; the rest become a random WordPiece


def mask_tokens(token_ids, vocabulary, masked_lm_prob, max_predictions_per_seq, whole_words, rng):
    """Choose predictions in one sequence and replace their tokens.

    With one prediction, of the token 8 at position 2:

        token_ids   [2 7 8 3 9 3]      2 = [CLS], 3 = [SEP]
        masked_ids  [2 7 4 3 9 3]      4 = [MASK]
        positions   [2]
        labels      [8]

    As google-research/bert does, except that the random replacement is never a special token: an id 0
    within a sequence would read as padding.

    Args:
        token_ids: int32 `[L]` with [CLS] and [SEP].
        vocabulary: `tokenization.Vocabulary`.
        masked_lm_prob: Share of all L tokens to predict, rounded; at least one is.
        max_predictions_per_seq: Limit of the number of predictions.
        whole_words: Whether the pieces of a word are predicted all or none.
        rng: `numpy.random.Generator`.

    Returns:
        masked_ids: int32 `[L]`.
        positions: int64 `[p]`, ascending, never of [CLS] or [SEP].
        labels: int32 `[p]`, the tokens that stood there.
    """
    candidates = np.flatnonzero((token_ids != vocabulary.cls_id) & (token_ids != vocabulary.sep_id))
    wanted = max(1, round(len(token_ids) * masked_lm_prob))
    num_predictions = min(wanted, max_predictions_per_seq, len(candidates))
    if whole_words:
        starts = ~vocabulary.is_continuation[token_ids[candidates]]
        positions = _choose_words(candidates, starts, num_predictions, max_predictions_per_seq, rng)
    else:
        positions = rng.choice(candidates, num_predictions, replace=False, shuffle=False)
        positions.sort()
    labels = token_ids[positions]
    fate = rng.random(len(positions))
    random_ids = vocabulary.ordinary_ids[rng.integers(len(vocabulary.ordinary_ids), size=len(positions))]
    unmasked = np.where(fate < MASK_RATE + KEEP_RATE, labels, random_ids)
    masked_ids = token_ids.copy()
    masked_ids[positions] = np.where(fate < MASK_RATE, vocabulary.mask_id, unmasked)
    return masked_ids, positions, labels


def _choose_words(candidates, starts, num_predictions, limit, rng):
    """Choose whole words at random until `num_predictions` pieces are full; what does not fit is passed over.

    Args:
        candidates: Positions `[c]`, ascending.
        starts: bool `[c]`: the piece opens a word. A piece after [CLS] or [SEP] opens one in any case.
        num_predictions: Pieces wanted; fewer are chosen where no word fits what is left.
        limit: Most pieces allowed where not even one word fits `num_predictions`.
        rng: Generator.

    Returns:
        Positions, ascending, at least one.
    """
    opens = starts | (np.diff(candidates, prepend=-1) > 1)
    bounds = np.append(np.flatnonzero(opens), len(candidates))
    sizes = np.diff(bounds).tolist()
    chosen, left = [], num_predictions
    for word in rng.permutation(len(sizes)).tolist():
        if sizes[word] <= left:
            chosen.append(word)
            left -= sizes[word]
            if not left:
                break
    if not chosen:
        # Every word is longer than the share: without this the sequence would teach nothing.
        word = sizes.index(min(sizes))
        return candidates[bounds[word] : bounds[word + 1]][:limit]
    return np.concatenate([candidates[bounds[word] : bounds[word + 1]] for word in sorted(chosen)])
