"""Does every algorithm place each sequence exactly once, and reproduce the papers' printed figures?"""

import numpy as np
import pytest

from bert_packed.packing.algorithms import ALGORITHM_NAMES, ALGORITHMS
from bert_packed.packing.bounds import lower_bound
from bert_packed.packing.histogram import count_lengths, load_known_histogram
from bert_packed.packing.lpfhp import pack_lpfhp
from bert_packed.packing.plan import validate_plan
from bert_packed.packing.spfhp import pack_spfhp

# depth, packs, efficiency and packing factor as printed in Table 1 of both papers. Depth max: the published
# code makes 8,166,708 packs (99.604 %), print has 8.168 M (99.60 %).
SPFHP_WIKIPEDIA = [
    (1, 16_279_552, 49.967, 1.0),
    (2, 10_101_683, 80.525, 1.612),
    (3, 9_094_695, 89.441, 1.790),
    (4, 8_658_996, 93.941, 1.880),
    (8, 8_224_673, 98.902, 1.979),
    ("max", 8_166_708, 99.604, 1.993),
]
# depth, observed depth, strategies, packs, padding: Table 5 of Packing: Towards 2x NLP BERT Acceleration
LPFHP_WIKIPEDIA = [
    (1, 1, 508, 16_279_552, 4_170_334_451),
    (2, 2, 634, 10_099_081, 1_005_933_299),
    (3, 3, 648, 9_090_154, 489_362_675),
    (4, 4, 671, 8_657_119, 267_648_755),
    (8, 8, 670, 8_207_569, 37_479_155),
    (16, 16, 670, 8_140_006, 2_886_899),
    ("max", 29, 670, 8_138_483, 2_107_123),
]
# depth, observed depth, strategies, packs, padding: the table on SQuAD 1.1
SPFHP_SQUAD = [
    (1, 1, 348, 88_641, 18_788_665),
    (2, 2, 348, 45_335, 2_159_161),
    ("max", 3, 344, 40_711, 383_545),
]
# task, observed depth, strategies, packs, padding: the table on GLUE at length 128 without limit
SPFHP_GLUE = [
    ("cola", 13, 29, 913, 20_005),
    ("sst2", 15, 64, 7_691, 87_409),
    ("mrpc", 4, 74, 1_606, 10_278),
    ("stsb", 6, 83, 1_367, 15_097),
    ("rte", 4, 108, 1_330, 4_500),
    ("wnli", 6, 63, 192, 1_037),
]


def figures(plan):
    return plan.depth, len(plan.strategies), plan.num_packs, plan.num_padding


@pytest.mark.parametrize("depth, packs, efficiency, factor", SPFHP_WIKIPEDIA)
def test_spfhp_makes_the_printed_packs_of_wikipedia(depth, packs, efficiency, factor):
    plan = pack_spfhp(load_known_histogram("wikipedia_512", 512), 512, depth)
    printed = round(100 * plan.efficiency, 3), round(plan.packing_factor, 3)
    assert (plan.num_packs, *printed) == (packs, efficiency, factor)


@pytest.mark.parametrize("depth, observed_depth, strategies, packs, padding", LPFHP_WIKIPEDIA)
def test_lpfhp_makes_the_printed_packs_of_wikipedia(depth, observed_depth, strategies, packs, padding):
    plan = pack_lpfhp(load_known_histogram("wikipedia_512", 512), 512, depth)
    assert figures(plan) == (observed_depth, strategies, packs, padding)


@pytest.mark.parametrize("depth, observed_depth, strategies, packs, padding", SPFHP_SQUAD)
def test_spfhp_makes_the_printed_packs_of_squad(depth, observed_depth, strategies, packs, padding):
    plan = pack_spfhp(load_known_histogram("squad_1.1_384", 384), 384, depth)
    assert figures(plan) == (observed_depth, strategies, packs, padding)


@pytest.mark.parametrize("task, observed_depth, strategies, packs, padding", SPFHP_GLUE)
def test_spfhp_makes_the_printed_packs_of_glue(task, observed_depth, strategies, packs, padding):
    plan = pack_spfhp(load_known_histogram(f"glue_{task}", 128), 128, "max")
    assert figures(plan) == (observed_depth, strategies, packs, padding)


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
@pytest.mark.parametrize("depth", [1, 2, 3, "max"])
def test_each_sequence_is_placed_exactly_once(name, depth):
    lengths = np.random.default_rng(7).integers(1, 25, 300)
    histogram = count_lengths(lengths, 24)
    plan = ALGORITHMS[name](histogram, 24, depth)
    validate_plan(plan, histogram)
    assert plan.algorithm == name
    assert plan.num_packs >= lower_bound(histogram, 24, depth)
    assert depth == 1 or plan.depth > 1


def test_worst_fit_and_best_fit_choose_as_in_their_docstrings():
    assert pack_spfhp(count_lengths([5, 4, 3, 2], 8), 8, "max").strategies == {(2, 5): 1, (3, 4): 1}
    assert pack_lpfhp(count_lengths([5, 4, 4, 3], 8), 8, "max").strategies == {(3, 5): 1, (4, 4): 1}
    # several times at once where it fits: the second 5 stays alone
    assert pack_lpfhp(count_lengths([5, 5, 2, 2], 9), 9, "max").strategies == {(2, 2, 5): 1, (5,): 1}
    assert pack_lpfhp(count_lengths([5, 5, 2], 9), 9, "max").strategies == {(2, 5): 1, (5,): 1}
