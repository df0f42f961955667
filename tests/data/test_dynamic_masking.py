"""Fresh masks: other predictions of the same sequences, by google-research/bert's rule, for every reader."""

import collections
import itertools
from pathlib import Path

import numpy as np
import pytest
from packs import batch_of, random_sequence, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH

from bert_packed.core.settings import InputError
from bert_packed.data import dynamic_masking
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.dynamic_masking import DynamicMasking, MaskedBatches
from bert_packed.data.input_pipeline import train_batches
from bert_packed.data.read_order import WHOLE, ProcessShard, balance_steps, index_files
from bert_packed.schema import PackSpec
from bert_packed.text.masking import MaskingRules
from bert_packed.text.tokenization import SPECIAL_TOKENS, Vocabulary

VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *(f"{'##' if i % 3 else ''}w{i}" for i in range(26))))
CLS, SEP, MASK = 2, 3, 4
SPEC = PackSpec(MAX_SEQ_LENGTH, 4, 12)
NUM_PACKS = 15


def bert_packs(seed, num_packs=NUM_PACKS):
    """Packs of [CLS] A [SEP] B [SEP], whose predictions are masked."""
    rng = np.random.default_rng(seed)
    lengths = [(8, 7, 9), (12, 10), (23,), (6, 6, 6, 6)]
    packs = [
        [random_sequence(rng, length, length // 4 + 1) for length in lengths[number % len(lengths)]]
        for number in range(num_packs)
    ]
    for sequence in (sequence for pack in packs for sequence in pack):
        length = len(sequence.tokens)
        tokens = rng.integers(5, len(VOCABULARY), length)
        tokens[[0, length // 2, -1]] = CLS, SEP, SEP
        free = np.flatnonzero(tokens > SEP)
        positions = np.sort(rng.permutation(free)[: len(sequence.prediction_positions)])
        sequence.prediction_positions = positions.tolist()
        sequence.prediction_ids = tokens[positions].tolist()
        tokens[positions] = MASK
        sequence.tokens = tokens.tolist()
    return packs


def restored(batch):
    """The tokens before masking, by a plain loop, and the positions that are predicted of each sequence."""
    tokens, found = batch["token_ids"].copy(), collections.defaultdict(list)
    is_used = batch["prediction_sequences"] > 0
    assert (is_used[:, 1:] <= is_used[:, :-1]).all()  # none after an unused one
    for row in range(len(tokens)):
        for place, slot in enumerate(batch["prediction_sequences"][row].astype(int).tolist()):
            position = int(batch["prediction_positions"][row, place])
            if slot:
                assert batch["sequence_ids"][row, position] == slot
                tokens[row, position] = batch["prediction_ids"][row, place]
                found[row, slot].append(position)
            else:
                assert position == batch["prediction_ids"][row, place] == 0
    return tokens, found


@pytest.fixture(scope="module")
def batch():
    return batch_of(bert_packs(0), MAX_SEQ_LENGTH, 4, 12)


def written(drawn):
    """Tokens and labels at the predictions, and which of them are used."""
    tokens = np.take_along_axis(drawn["token_ids"], drawn["prediction_positions"], axis=1)
    return tokens, drawn["prediction_ids"], drawn["prediction_sequences"] > 0


def redraw(batch, epoch=0, seed=1, **rules):
    packs = np.arange(len(batch["token_ids"]))
    return DynamicMasking(VOCABULARY, MaskingRules(**rules), seed).redraw(batch, epoch + 0 * packs, packs)


def test_the_same_sequences_with_as_many_other_predictions(batch):
    before, places_before = restored(batch)
    given = {name: values.copy() for name, values in batch.items()}
    drawn = redraw(batch)
    after, places = restored(drawn)
    np.testing.assert_array_equal(after, before)
    for name, values in given.items():
        np.testing.assert_array_equal(batch[name], values, err_msg=f"{name} of the batch that was given")
        assert drawn[name].dtype == values.dtype and drawn[name].shape == values.shape
    assert max(slot for _, slot in places) > 2  # packs that hold several
    assert {key: len(found) for key, found in places.items()} == {
        key: len(found) for key, found in places_before.items()
    }
    assert sum(places[key] != places_before[key] for key in places) > len(places) / 2
    for (row, _), found in places.items():
        assert (np.diff(found) > 0).all()
        assert not np.isin(before[row, found], [CLS, SEP]).any()
    untouched = np.ones(before.shape, bool)
    for (row, _), found in places.items():
        untouched[row, found] = False
    np.testing.assert_array_equal(drawn["token_ids"][untouched], before[untouched])


def test_masks_follow_from_seed_epoch_and_pack(batch):
    first = redraw(batch)["token_ids"]
    np.testing.assert_array_equal(first, redraw(batch)["token_ids"])
    np.testing.assert_array_equal(first, redraw(redraw(batch, epoch=5))["token_ids"])  # not from older masks
    for other in (redraw(batch, epoch=1), redraw(batch, seed=2)):
        assert (first != other["token_ids"]).any(axis=1).mean() > 0.8
    # alone, a pack has the masks that it has among others
    one = {name: values[4:5] for name, values in batch.items()}
    masking = DynamicMasking(VOCABULARY, MaskingRules(), 1)
    np.testing.assert_array_equal(masking.redraw(one, np.array([0]), np.array([4]))["token_ids"][0], first[4])
    # two sequences of one pack and equal packs draw for themselves
    pack = bert_packs(2)[0][:1] * 3
    twice = redraw(batch_of([pack, pack], MAX_SEQ_LENGTH * 3, 4, 24))
    sequences = {
        tuple(row[ids == slot].tolist())
        for row, ids in zip(twice["token_ids"], twice["sequence_ids"], strict=True)
        for slot in (1, 2, 3)
    }
    assert len(sequences) > 3


def test_predictions_are_drawn_by_the_rule_of_bert():
    """Each token that is not special alike; of the drawn, 80 % [MASK], 10 % as they were, 10 % any other."""
    sequence = bert_packs(3)[0][0]
    sequence.tokens = [CLS, 7, 7, 7, SEP, 7, 7, SEP]
    sequence.token_types, sequence.prediction_positions, sequence.prediction_ids = [0] * 8, [1, 5], [7, 7]
    one = batch_of([[sequence]], 8, 1, 2)
    num = 4000
    masking = DynamicMasking(VOCABULARY, MaskingRules(), 1)
    many = {name: np.repeat(values, num, axis=0) for name, values in one.items()}
    drawn = masking.redraw(many, np.arange(num) // 10, np.arange(num) % 10)
    counts = np.bincount(drawn["prediction_positions"].reshape(-1), minlength=8)
    assert counts[[0, 4, 7]].sum() == 0
    np.testing.assert_allclose(counts[[1, 2, 3, 5, 6]] / num, 2 / 5, atol=0.03)
    tokens = written(drawn)[0]
    others = tokens[(tokens != MASK) & (tokens != 7)]
    np.testing.assert_allclose((tokens == MASK).mean(), 0.8, atol=0.02)
    np.testing.assert_allclose((tokens == 7).mean(), 0.1 + 0.1 / 26, atol=0.02)
    assert set(others.tolist()) == set(range(5, len(VOCABULARY))) - {7}


def test_rates_are_those_asked_for(batch):
    tokens, _, is_used = written(redraw(batch, mask_replace_prob=1.0, random_replace_prob=0.0))
    assert (tokens[is_used] == MASK).all()
    tokens, labels, _ = written(redraw(batch, mask_replace_prob=0.0, random_replace_prob=0.0))
    np.testing.assert_array_equal(tokens[is_used], labels[is_used])
    tokens, labels, _ = written(redraw(batch, mask_replace_prob=0.0, random_replace_prob=1.0))
    assert (tokens != labels)[is_used].mean() > 0.8 and tokens[is_used].min() > MASK
    # each pack draws for itself: its five or more are seldom twice the same
    shares = [len(set(row[used])) / used.sum() for row, used in zip(tokens, is_used, strict=True)]
    assert np.mean(shares) > 0.7
    assert MaskingRules(mask_replace_prob=0.1, random_replace_prob=0.9).kept_from == pytest.approx(0.1)
    with pytest.raises(InputError, match=r"at most 1 together. Received: mask_replace_prob=0.8, random_r"):
        MaskingRules(random_replace_prob=0.3)


def test_whole_words(batch):
    before, places_before = restored(batch)
    after, places = restored(redraw(batch, do_whole_word_mask=True))
    np.testing.assert_array_equal(after, before)
    is_longer = 0
    for key, found in places.items():
        row, slot = key
        assert len(found) <= len(places_before[key])
        own = np.flatnonzero(batch["sequence_ids"][row] == slot)
        opens = (before[row, own] <= SEP) | ~VOCABULARY.is_continuation[before[row, own]]
        opens[1:] |= before[row, own][:-1] <= SEP
        words = np.cumsum(opens)
        chosen = set(words[np.isin(own, found)].tolist())
        whole = own[np.isin(words, list(chosen)) & (before[row, own] > SEP)]
        # a word that is longer than all that may be predicted is the one that is cut
        assert whole.tolist() == found or (len(chosen) == 1 and len(found) == len(places_before[key]))
        is_longer += len(whole) > len(chosen)
    assert is_longer > 5


def test_no_word_crosses_a_border_of_segments():
    sequence = bert_packs(3)[0][0]
    sequence.tokens, sequence.token_types = [CLS, MASK, SEP, 6, SEP], [0, 0, 0, 1, 1]  # B opens with ##w1
    sequence.prediction_positions, sequence.prediction_ids = [1], [5]
    one = batch_of([[sequence]], 5, 1, 1)
    drawn = [redraw(one, epoch, do_whole_word_mask=True)["prediction_positions"] for epoch in range(30)]
    assert {int(positions[0, 0]) for positions in drawn} == {1, 3}


def test_words_are_taken_by_their_order_as_they_fit():
    sequences, sizes = np.array([1, 1, 1, 2, 2, 3, 3]), np.array([2, 1, 1, 4, 3, 1, 2])
    order = np.array([5, 9, 2, 8, 4, 1, 0], np.uint64)
    kept = dynamic_masking._keep(sequences, sizes, order, wanted=np.array([0, 2, 2, 3]))
    assert kept.tolist() == [0, 1, 1, 0, 2, 1, 2]


def test_packs_without_predictions_stay_as_they_are(batch):
    empty = {name: np.zeros_like(values) for name, values in batch.items()}
    bare = {**batch, **{name: empty[name] for name in batch if name.startswith("prediction")}}
    for given in (empty, bare):
        for whole_words in (False, True):
            drawn = redraw(given, do_whole_word_mask=whole_words)
            for name, values in given.items():
                np.testing.assert_array_equal(drawn[name], values)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    packs = bert_packs(1)
    for number, some in enumerate((packs[:9], packs[9:])):
        write_packs(folder / f"packed-{number}.tfrecord", some, MAX_SEQ_LENGTH)
    return sorted(str(path) for path in Path(folder).iterdir())


def read(files, num_batches, first_step=0, shard=WHOLE, shuffle=5, num_devices=0):
    index = index_files(files)

    def deal(blocks):
        rest = num_devices, 4, index.num_packs, 4 * first_step
        return balance_steps(blocks, itertools.repeat(4), np.square, *rest)

    arrange = deal if num_devices else None
    packed = train_batches(index, SPEC, 4, 3, shuffle, first_step, shard=shard, arrange=arrange)
    batches = CheckedBatches(packed, files, SPEC, CONFIG)
    masking = DynamicMasking(VOCABULARY, MaskingRules(), 1)
    masked = MaskedBatches(batches, masking, index, shard, 4, first_step)
    return list(itertools.islice(masked, num_batches))


def test_masks_depend_on_the_epoch_and_not_on_the_order(files):
    """Fifteen packs in batches of four: sixty packs are four epochs, across whose ends batches run.

    A pack that is dealt to a place of the next epoch would have that epoch's masks twice.
    """

    def by_sequences(shuffle, num_devices=0):
        """Map a pack's tokens to the masked tokens of each epoch, as they come."""
        seen = collections.defaultdict(list)
        for batch in read(files, NUM_PACKS, shuffle=shuffle, num_devices=num_devices):
            for tokens, masked in zip(restored(batch)[0].tolist(), batch["token_ids"].tolist(), strict=True):
                seen[tuple(tokens)].append(tuple(masked))
        return seen

    seen = by_sequences(shuffle=5)
    assert len(seen) == NUM_PACKS and {len(masked) for masked in seen.values()} == {4}
    assert np.mean([len(set(masked)) for masked in seen.values()]) > 3
    assert by_sequences(shuffle=1) == by_sequences(shuffle=15) == by_sequences(5, num_devices=2) == seen


@pytest.mark.parametrize(("first_step", "num_processes"), [(1, 1), (2, 2), (10, 4)])
def test_masks_are_those_of_one_uninterrupted_process(files, first_step, num_processes):
    whole = read(files, first_step + 5)[first_step:]
    shards = [ProcessShard(4, index, num_processes) for index in range(num_processes)]
    parts = [read(files, 5, first_step, shard) for shard in shards]
    for batch, *shares in zip(whole, *parts, strict=True):
        for name, values in batch.items():
            joined = np.concatenate([share[name] for share in shares])
            np.testing.assert_array_equal(joined, values, err_msg=name)


def test_a_vocabulary_that_is_too_small(batch):
    small = DynamicMasking(Vocabulary(VOCABULARY.tokens[:20]), MaskingRules(), 1)
    with pytest.raises(InputError, match=r"`vocab_file` must be .* the records. Received: one of 20 tok"):
        small.redraw(batch, np.zeros(NUM_PACKS), np.arange(NUM_PACKS))
    # it is an error, too, if only the labels have a token that it lacks
    hidden = {**batch, "prediction_ids": np.where(batch["prediction_sequences"] > 0, 30, 0).astype(np.int32)}
    hidden["token_ids"] = np.minimum(batch["token_ids"], 19)
    with pytest.raises(InputError, match="for a token 30"):
        small.redraw(hidden, np.zeros(NUM_PACKS), np.arange(NUM_PACKS))
