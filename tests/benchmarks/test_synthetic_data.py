"""Synthetic sequences have the wanted lengths, as packed and unpacked records hold them."""

import itertools

import numpy as np
import pytest
from next_tokens import VOCAB_SIZE as NUM_TOKENS
from tiny import CONFIG

from benchmarks.synthetic_data import (
    bert_batch,
    best_shapes,
    check_positions,
    count_predictions,
    draw_lengths,
    plan_corpus,
    spec_of,
    sums_of_a_row,
    token_batch,
    wikipedia_corpus,
    wikipedia_histogram,
    write_sequences,
)
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.settings import InputError
from bert_packed.objectives.pretraining import next_token_objective, pretraining_objective
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.records.read_bert import read_unpacked
from bert_packed.schema import CAUSAL_LM, PackSpec

PACKS = [(5, 9, 10), (24,), (3, 4)]


def test_sequences_have_their_lengths_places_and_predictions():
    batch = bert_batch(PACKS, PackSpec(24, 3, 5), CONFIG.vocab_size, np.random.default_rng(0))
    assert set(batch) == {feature.name for feature in pretraining_objective("per_sequence").features}
    assert max(batch[name].max() for name in ("token_ids", "prediction_ids")) < CONFIG.vocab_size
    for row, pack in enumerate(PACKS):
        slots = np.repeat(np.arange(1, len(pack) + 1), pack)
        padding = [0] * (24 - len(slots))
        assert batch["sequence_ids"][row].tolist() == [*slots, *padding]
        positions = [position for length in pack for position in range(length)]
        assert batch["position_ids"][row].tolist() == [*positions, *padding]
        used = batch["prediction_sequences"][row] > 0
        owners = batch["prediction_sequences"][row][used].astype(int)
        assert np.bincount(owners)[1:].tolist() == count_predictions(pack, 24).tolist()
        places = batch["prediction_positions"][row][used]
        assert (batch["sequence_ids"][row][places] == owners).all() and len({*places.tolist()}) == used.sum()
        assert batch["slot_weights"][row].tolist() == [1.0] * len(pack) + [0.0] * (3 - len(pack))
    assert count_predictions([3, 20, 24, 512], 512).tolist() == [1, 3, 4, 76]


def test_every_token_but_a_sequence_s_last_predicts_the_next():
    given = PACKS, spec_of(PACKS, 24), NUM_TOKENS
    batch, of_bert = (
        token_batch(*given, np.random.default_rng(0)),
        bert_batch(*given, np.random.default_rng(0)),
    )
    assert set(batch) == {feature.name for feature in next_token_objective("per_token").features}
    for name in ("token_ids", "sequence_ids", "position_ids"):
        np.testing.assert_array_equal(batch[name], of_bert[name])
    for row, pack in enumerate(PACKS):
        labels, owners = np.zeros((2, 24), int)
        for slot, end in enumerate(np.cumsum(pack), start=1):
            here = slice(end - pack[slot - 1], end - 1)
            labels[here], owners[here] = batch["token_ids"][row, here.start + 1 : end], slot
        assert batch["label_ids"][row].tolist() == labels.tolist()
        assert batch["label_sequences"][row].tolist() == owners.tolist()
        assert batch["sequence_bytes"][row].tolist() == [*pack] + [0] * (3 - len(pack))


def test_sums_of_a_row_count_what_a_head_predicts():
    histogram = np.array([0, 2, 0, 1])  # lengths 2, 2 and 4, of which the first two fill a pack
    corpus = plan_corpus(histogram, 2)
    sums = sums_of_a_row(corpus, True, CAUSAL_LM)
    assert corpus.plan.num_packs == 2
    assert (sums["num_tokens"], sums["num_predictions"], sums["num_sequences"]) == (8 / 2, 5 / 2, 3 / 2)
    assert sums_of_a_row(corpus, False, CAUSAL_LM)["num_predictions"] == 5 / 3
    of_bert = {"num_tokens": 8 / 3, "num_pairs": 24 / 3, "num_predictions": 1, "num_sequences": 1}
    assert sums_of_a_row(corpus, False) == of_bert  # a BERT predicts 15 %, and at least one token


def test_a_corpus_draws_as_its_plan_and_its_histogram():
    histogram = np.zeros(24, np.int64)
    histogram[[4, 11, 23]] = 60, 30, 10
    corpus, rng = plan_corpus(histogram, 3), np.random.default_rng(0)
    packs = corpus.draw_packs(4000, rng)
    assert np.mean([len(pack) for pack in packs]) == pytest.approx(corpus.plan.packing_factor, rel=0.03)
    assert set(packs) == set(corpus.plan.strategies)
    lengths = draw_lengths(histogram, 4000, rng)
    assert np.bincount(lengths)[[5, 12, 24]] / 4000 == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    batch = corpus.packed_batch(50, 31, rng)  # all fit
    assert batch["slot_weights"].shape == (50, corpus.plan.depth)
    assert corpus.unpacked_batch(50, 31, rng)["slot_weights"].tolist() == [[1.0]] * 50
    assert wikipedia_corpus(512).plan.packing_factor == pytest.approx(1.999, abs=0.001)


def test_lengths_are_wikipedias_in_proportion():
    counts = load_known_histogram("wikipedia_512")
    whole, short = wikipedia_histogram(512), wikipedia_histogram(64)
    assert (whole[12:] == counts[12:]).all() and whole[11] == counts[:12].sum() and not whole[:11].any()
    assert short[63] == counts[504:].sum() and short[20] == counts[160:168].sum()
    assert short.sum() == counts.sum() and short[11] == counts[:96].sum()
    assert wikipedia_histogram(8).nonzero()[0].tolist() == [7]


def test_files_hold_the_wanted_number_of_sound_records(tmp_path):
    def read(paths):
        return [batch for path in paths for batch in read_unpacked(path)]

    paths = write_sequences(tmp_path / "a", 10, 64, num_files=3, seed=1)
    batches = read(paths)  # checks every record
    assert [len(batch) for batch in batches] == [3, 3, 4]
    lengths = np.concatenate([batch["lengths"] for batch in batches])
    predictions = np.concatenate([batch["num_predictions"] for batch in batches])
    assert predictions.tolist() == count_predictions(lengths, 64).tolist() and lengths.max() <= 64
    again, other = (read(write_sequences(tmp_path / f"b{seed}", 10, 64, 3, seed)) for seed in (1, 2))
    first, same, others = (
        np.concatenate([b["tokens"] for b in some]).tolist() for some in (batches, again, other)
    )
    assert first == same != others


@pytest.mark.parametrize("num_shapes", [1, 2, 3, 9])
def test_the_best_shapes_are_those_of_all_choices(num_shapes):
    lengths = np.random.default_rng(num_shapes).integers(1, 30, 12)
    values = np.unique(lengths)
    costs = [
        sum(min(shape for shape in shapes if shape >= length) for length in lengths)
        for count in range(1, min(num_shapes, len(values)) + 1)
        for shapes in itertools.combinations(values, count)
        if max(shapes) == max(values)
    ]
    shapes = best_shapes(lengths, num_shapes)
    assert len(shapes) <= num_shapes and shapes[-1] == max(lengths)
    assert sum(shapes[np.searchsorted(shapes, lengths)]) == min(costs)


def test_rows_longer_than_the_model_are_refused():
    check_positions(24, CONFIG)
    with pytest.raises(InputError, match=r"at most max_position_embeddings=24\. Received: 25"):
        check_positions(25, CONFIG)
    check_positions(10**6, load_model_config("mamba-tiny", 64))  # without positions
