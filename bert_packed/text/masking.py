"""Masking of BERT's masked LM: choice of the predictions of a sequence, and their replacement."""

import dataclasses

import numpy as np

from bert_packed.core.settings import InputError

# Predicted tokens are replaced in these shares, the rest stay. Hugging Face's collator has the same names
MASK_REPLACE_PROB = 0.8
RANDOM_REPLACE_PROB = 0.1


@dataclasses.dataclass(frozen=True)
class MaskingRules:
    """Rules of masking; the two shares are at most 1 together."""

    do_whole_word_mask: bool = False  # predict all pieces of a word or none
    mask_replace_prob: float = MASK_REPLACE_PROB  # share of the predicted tokens that become [MASK]
    random_replace_prob: float = RANDOM_REPLACE_PROB  # share that becomes a random token

    def __post_init__(self):
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:  # 0.1 and 0.9 are 1 in decimals
            raise InputError(
                "`mask_replace_prob` and `random_replace_prob` must be at most 1 together. Received: "
                f"mask_replace_prob={self.mask_replace_prob}, "
                f"random_replace_prob={self.random_replace_prob}."
            )

    @property
    def kept_from(self):
        """Share of the predicted tokens that become [MASK] or stay as they are."""
        return 1 - self.random_replace_prob


def masking_rules(config):
    """`MaskingRules` of a config's settings of the same names; raises `InputError`."""
    return MaskingRules(config.do_whole_word_mask, config.mask_replace_prob, config.random_replace_prob)


def count_predictions(length, masked_lm_prob, max_predictions_per_seq):
    """Number of predictions of a sequence: a share of all its tokens, at least one."""
    return min(max(1, round(length * masked_lm_prob)), max_predictions_per_seq)


def mask_tokens(token_ids, vocabulary, num_predictions, limit, rules, rng):
    """Choose predictions in one sequence and replace their tokens.

    With one prediction, of the token 8 at position 2:

        token_ids   [2 7 8 3 9 3]      2 = [CLS], 3 = [SEP]
        masked_ids  [2 7 4 3 9 3]      4 = [MASK]
        positions   [2]
        labels      [8]

    As google-research/bert, except that the random replacement is never a special token: an id 0 within a
    sequence would be read as padding.

    Args:
        token_ids: int32 `[L]` with [CLS] and [SEP].
        num_predictions: Number wanted; fewer if the sequence is shorter, or no whole word fits the rest.
        limit: Most predictions where no whole word fits `num_predictions`: the shortest is cut there.

    Returns:
        masked_ids: int32 `[L]`.
        positions: int64 `[p]`, ascending, never of [CLS] or [SEP].
        labels: int32 `[p]`, the tokens at these positions.
    """
    candidates = np.flatnonzero((token_ids != vocabulary.cls_id) & (token_ids != vocabulary.sep_id))
    num_predictions = min(num_predictions, len(candidates))
    if rules.do_whole_word_mask:
        starts = ~vocabulary.is_continuation[token_ids[candidates]]
        positions = _choose_words(candidates, starts, num_predictions, limit, rng)
    else:
        positions = rng.choice(candidates, num_predictions, replace=False, shuffle=False)
        positions.sort()
    labels = token_ids[positions]
    fate = rng.random(len(positions))
    random_ids = vocabulary.ordinary_ids[rng.integers(len(vocabulary.ordinary_ids), size=len(positions))]
    unmasked = np.where(fate < rules.kept_from, labels, random_ids)
    masked_ids = token_ids.copy()
    masked_ids[positions] = np.where(fate < rules.mask_replace_prob, vocabulary.mask_id, unmasked)
    return masked_ids, positions, labels


def _choose_words(candidates, starts, num_predictions, limit, rng):
    """Ascending positions of random whole words; a word that does not fit the rest is passed over."""
    # A piece after [CLS] or [SEP] opens a word in any case
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
        # Every word is longer than the share: without this the sequence would have no prediction
        word = sizes.index(min(sizes))
        return candidates[bounds[word] : bounds[word + 1]][:limit]
    return np.concatenate([candidates[bounds[word] : bounds[word + 1]] for word in sorted(chosen)])
