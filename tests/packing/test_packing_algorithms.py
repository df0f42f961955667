"""The packs of SPFHP and LPFHP are those that the papers print, and those of their docstrings."""

import pytest

from bert_packed.packing.descending import pack_lpfhp, pack_spfhp
from bert_packed.packing.histogram import count_lengths, load_known_histogram

# Algorithm, histogram, S, depth; observed depth, strategies, packs, padding
PRINTED = [
    # Table 5 of Packing: Towards 2x NLP BERT Acceleration
    (pack_lpfhp, "wikipedia_512", 512, 1, 1, 508, 16_279_552, 4_170_334_451),
    (pack_lpfhp, "wikipedia_512", 512, 2, 2, 634, 10_099_081, 1_005_933_299),
    (pack_lpfhp, "wikipedia_512", 512, 3, 3, 648, 9_090_154, 489_362_675),
    (pack_lpfhp, "wikipedia_512", 512, 4, 4, 671, 8_657_119, 267_648_755),
    (pack_lpfhp, "wikipedia_512", 512, 8, 8, 670, 8_207_569, 37_479_155),
    (pack_lpfhp, "wikipedia_512", 512, 16, 16, 670, 8_140_006, 2_886_899),
    (pack_lpfhp, "wikipedia_512", 512, "max", 29, 670, 8_138_483, 2_107_123),
    # The table on SQuAD 1.1
    (pack_spfhp, "squad_1.1_384", 384, 1, 1, 348, 88_641, 18_788_665),
    (pack_spfhp, "squad_1.1_384", 384, 2, 2, 348, 45_335, 2_159_161),
    (pack_spfhp, "squad_1.1_384", 384, "max", 3, 344, 40_711, 383_545),
    # The table on GLUE at length 128 without limit
    (pack_spfhp, "glue_cola", 128, "max", 13, 29, 913, 20_005),
    (pack_spfhp, "glue_sst2", 128, "max", 15, 64, 7_691, 87_409),
    (pack_spfhp, "glue_mrpc", 128, "max", 4, 74, 1_606, 10_278),
    (pack_spfhp, "glue_stsb", 128, "max", 6, 83, 1_367, 15_097),
    (pack_spfhp, "glue_rte", 128, "max", 4, 108, 1_330, 4_500),
    (pack_spfhp, "glue_wnli", 128, "max", 6, 63, 192, 1_037),
]
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


@pytest.mark.parametrize(
    ("pack", "name", "size", "depth", "observed", "strategies", "packs", "padding"), PRINTED
)
def test_printed_packs(pack, name, size, depth, observed, strategies, packs, padding):
    plan = pack(load_known_histogram(name, size), size, depth)
    figures = plan.depth, len(plan.strategies), plan.num_packs, plan.num_padding
    assert figures == (observed, strategies, packs, padding)


@pytest.mark.parametrize(("depth", "packs", "efficiency", "factor"), SPFHP_WIKIPEDIA)
def test_spfhp_makes_the_printed_packs_of_wikipedia(depth, packs, efficiency, factor):
    plan = pack_spfhp(load_known_histogram("wikipedia_512", 512), 512, depth)
    printed = round(100 * plan.efficiency, 3), round(plan.packing_factor, 3)
    assert (plan.num_packs, *printed) == (packs, efficiency, factor)


def test_worst_fit_and_best_fit_choose_as_in_their_docstrings():
    assert pack_spfhp(count_lengths([5, 4, 3, 2], 8), 8, "max").strategies == {(2, 5): 1, (3, 4): 1}
    assert pack_lpfhp(count_lengths([5, 4, 4, 3], 8), 8, "max").strategies == {(3, 5): 1, (4, 4): 1}
    # several times at once where it fits: the second 5 stays alone
    assert pack_lpfhp(count_lengths([5, 5, 2, 2], 9), 9, "max").strategies == {(2, 2, 5): 1, (5,): 1}
    assert pack_lpfhp(count_lengths([5, 5, 2], 9), 9, "max").strategies == {(2, 5): 1, (5,): 1}
