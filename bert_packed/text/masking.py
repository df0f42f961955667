"""Which tokens of a sequence are to be predicted, and what stands in their place: BERT's masked LM."""

import dataclasses

import numpy as np

from bert_packed.core.settings import InputError

# Of the predicted tokens; the rest stay as they are. Names and values are those of Hugging Face's collator
MASK_REPLACE_PROB = 0.8
RANDOM_REPLACE_PROB = 0.1


@dataclasses.dataclass(frozen=True)
class MaskingRules:
    """How predictions are chosen and hidden.

    Attributes:
        do_whole_word_mask: Whether the pieces of a word are predicted all or none.
        mask_replace_prob: Share of the predicted tokens that become [MASK].
        random_replace_prob: Share that becomes a random WordPiece.

    Raises:
        InputError: the two shares are more than all.
    """

    do_whole_word_mask: bool = False
    mask_replace_prob: float = MASK_REPLACE_PROB
    random_replace_prob: float = RANDOM_REPLACE_PROB

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
    """The rules that a config's settings of the same names tell: `MaskingRules`; raises `InputError`."""
    return MaskingRules(config.do_whole_word_mask, config.mask_replace_prob, config.random_replace_prob)


def count_predictions(length, masked_lm_prob, max_predictions_per_seq):
    """How many tokens of a sequence are to be predicted: the share of all its tokens, at least one."""
    return min(max(1, round(length * masked_lm_prob)), max_predictions_per_seq)


def mask_tokens(token_ids, vocabulary, num_predictions, limit, rules, rng):
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
        num_predictions: Wanted; fewer where the sequence has not as many, or no whole word fits the rest.
        limit: Most predictions, where not even one whole word fits `num_predictions`.
        rules: `MaskingRules`.
        rng: `numpy.random.Generator`.

    Returns:
        masked_ids: int32 `[L]`.
        positions: int64 `[p]`, ascending, never of [CLS] or [SEP].
        labels: int32 `[p]`, the tokens that stood there.
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
