"""Predictions are chosen and hidden by BERT's rule, and every label restores its token."""

import numpy as np
import pytest
from drawn_instances import NUM_SPECIAL_TOKENS, make, make_corpus, random_documents, rows

from bert_packed.text import masking
from bert_packed.text.masking import MaskingRules
from bert_packed.text.tokenization import SPECIAL_TOKENS, Vocabulary
from data_gen.text.create_config import CreateConfig
from data_gen.text.instances import InstanceRules


@pytest.mark.parametrize("whole_words", [False, True])
def test_labels_restore_the_sequence(whole_words):
    corpus, vocabulary = make_corpus(random_documents(1))
    rules = InstanceRules(64, 7, masking=MaskingRules(whole_words))
    sequences = make(corpus, vocabulary, rules, num_duplicates=3)
    assert len(sequences) > 100
    assert (sequences["num_predictions"] >= 1).all()
    limits = np.minimum(7, np.maximum(1, np.round(sequences["lengths"] * 0.15)))
    assert (sequences["num_predictions"] <= limits).all()
    if not whole_words:
        assert (sequences["num_predictions"] == limits).all()
    num_long_words = 0
    for tokens, types, positions, labels in rows(sequences):
        restored = tokens.copy()
        restored[positions] = labels
        assert (np.diff(positions) > 0).all()
        assert (labels >= NUM_SPECIAL_TOKENS).all()
        opens = ~vocabulary.is_continuation[restored]
        opens |= np.isin(np.arange(len(tokens)) - 1, np.flatnonzero(restored < NUM_SPECIAL_TOKENS))
        words = np.cumsum(opens | (restored < NUM_SPECIAL_TOKENS))
        predicted = np.isin(np.arange(len(tokens)), positions)
        for word in np.unique(words[positions]) if whole_words else ():
            assert predicted[words == word].all()
            num_long_words += (words == word).sum() > 1
        # every token occurs once in the corpus and follows its predecessor: spans are A and B
        seps = np.flatnonzero(restored == vocabulary.sep_id)
        assert restored[0] == vocabulary.cls_id and seps[-1] == len(tokens) - 1 and len(seps) == 2
        assert (np.diff(restored[1 : seps[0]]) == 1).all()
        assert (np.diff(restored[seps[0] + 1 : -1]) == 1).all()
        assert types.tolist() == [0] * (seps[0] + 1) + [1] * (len(tokens) - seps[0] - 1)
    assert num_long_words > 20 or not whole_words


@pytest.mark.parametrize(
    ("whole_words", "positions", "written"),
    [
        (False, [4, 14, 32, 33, 38, 45, 49, 50, 55], [8, 4, 36, 4, 4, 4, 4, 4, 4]),
        (True, [10, 11, 12, 25, 26, 27, 38, 39, 40], [4, 4, 31, 4, 4, 35, 4, 4, 4]),
    ],
)
def test_equal_seeds_mask_as_in_version_0_1(whole_words, positions, written):
    """Records that were made then are made again byte for byte."""
    vocabulary = Vocabulary((*SPECIAL_TOKENS, *(f"{'##' if i % 3 else ''}w{i}" for i in range(60))))
    token_ids = np.array([2, *range(5, 40), 3, *range(40, 64), 3], np.int32)
    num = masking.count_predictions(len(token_ids), 0.15, 20)
    masked, found, _ = masking.mask_tokens(
        token_ids, vocabulary, num, 20, MaskingRules(whole_words), np.random.default_rng(7)
    )
    assert (found.tolist(), masked[found].tolist()) == (positions, written)


def test_whole_words_that_are_long_or_cut():
    vocabulary = Vocabulary((*SPECIAL_TOKENS, "a", "##b", "##c"))

    def mask(token_ids, limit, seed=0):
        rules, rng = MaskingRules(True), np.random.default_rng(seed)
        found = masking.mask_tokens(np.array(token_ids, np.int32), vocabulary, 1, limit, rules, rng)
        return [values.tolist() for values in found[1:]]

    long_words = [2, 5, 6, 7, 3, 5, 6, 3]
    # A word longer than the share is still predicted, the shortest, and never over the limit
    assert mask(long_words, 20) == [[5, 6], [5, 6]] and mask(long_words, 1)[0] == [5]
    # Cut within a word, B opens with a continuation: no word crosses the border
    assert all(len(mask([2, 5, 3, 6, 3], 20, seed)[0]) == 1 for seed in range(9))


@pytest.mark.parametrize("prob", [0.15, 0.3, 0.07])
@pytest.mark.parametrize("max_seq_length", [64, 128, 384, 512])
def test_the_share_of_predictions_is_the_one_asked_for(max_seq_length, prob):
    config = CreateConfig(output_dir="x", max_seq_length=max_seq_length, masked_lm_prob=prob)
    rules = InstanceRules(max_seq_length, config.num_prediction_slots, prob, short_seq_prob=0.0)
    corpus, vocabulary = make_corpus([[7] * 200 for _ in range(30)])
    sequences = make(corpus, vocabulary, rules)
    assert sequences["lengths"].max() == max_seq_length
    # each number is rounded to the nearest, and never cut
    assert np.abs(sequences["num_predictions"] - sequences["lengths"] * prob).max() <= 0.5
    rate = sequences["num_predictions"].sum() / sequences["lengths"].sum()
    assert rate == pytest.approx(prob, abs=0.5 / sequences["lengths"].mean())
    # there is no more room than that takes
    assert sequences["num_predictions"].max() >= config.num_prediction_slots - 1


def test_80_10_10():
    corpus, vocabulary = make_corpus([[20] * 20 for _ in range(40)])
    sequences = make(corpus, vocabulary, InstanceRules(128, 20), num_duplicates=3)
    places = np.repeat(sequences.offsets("tokens")[:-1], sequences["num_predictions"])
    places += sequences["prediction_positions"]
    written = sequences["tokens"][places]
    num = len(written)
    assert num > 5000
    assert abs(np.mean(written == vocabulary.mask_id) - 0.8) < 0.02
    assert abs(np.mean(written == sequences["prediction_ids"]) - 0.1) < 0.02
    random_ids = written[(written != vocabulary.mask_id) & (written != sequences["prediction_ids"])]
    assert abs(len(random_ids) / num - 0.1) < 0.02
    assert random_ids.min() >= NUM_SPECIAL_TOKENS
    assert random_ids.max() > len(vocabulary) * 0.95  # the whole vocabulary
    # positions are uniform over the sequence
    share = sequences["prediction_positions"] / np.repeat(sequences["lengths"], sequences["num_predictions"])
    assert abs(share.mean() - 0.5) < 0.02
