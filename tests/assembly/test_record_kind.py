"""Figures of a plan follow from its packs, and a plan that loses sequences is refused."""

import pytest

from bert_packed.assembly import record_kind
from bert_packed.core.settings import InputError
from bert_packed.packing.plan import make_plan


@pytest.fixture
def made(monkeypatch):
    """Function that plans lengths 2 3 3 4 for S = 8 by an algorithm which makes these strategies."""

    def plan(strategies):
        algorithms = {"fixed": lambda histogram, size, depth: make_plan("fixed", size, depth, strategies)}
        monkeypatch.setattr(record_kind, "ALGORITHMS", algorithms)
        return record_kind.plan_lengths([0, 1, 2, 1, 0, 0, 0, 0], "fixed", 8, 3)

    return plan


def test_the_figures_are_those_of_the_packs(made):
    found = made([((2, 3), 1), ((3,), 1), ((4,), 1)])
    assert [name for name in found if name != "plan"] == [
        "num_sequences",
        "num_packs",
        "efficiency",
        "packing_factor",
        "depth",
        "lower_bound",
        "gap",
    ]
    del found["plan"]
    # 12 tokens need two packs of 8
    assert list(found.values()) == [4, 3, 12 / 24, 4 / 3, 2, 2, (3 - 2) / 2]


@pytest.mark.parametrize("strategies", [[((2, 3), 1), ((4,), 1)], [((2, 3), 1), ((3, 4), 1), ((3,), 1)]])
def test_a_plan_of_other_sequences_is_refused(made, strategies):
    """As our own mistake: no user chose it."""
    with pytest.raises(ValueError, match="must place each sequence exactly once") as caught:
        made(strategies)
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize(("depth", "num_packs"), [(1, 4), (2, 2), (3, 2), ("max", 1)])
def test_a_pack_is_as_deep_as_asked_for(depth, num_packs):
    """Four sequences of two tokens, of which a pack of eight has room for all."""
    histogram = [0, 4, 0, 0, 0, 0, 0, 0]
    assert record_kind.plan_lengths(histogram, "lpfhp", 8, depth)["num_packs"] == num_packs


def test_an_algorithm_that_cannot_is_named():
    with pytest.raises(InputError, match="`algorithm` nnlshp cannot pack these lengths: "):
        record_kind.plan_lengths([1] * 384, "nnlshp", 384, 20)
