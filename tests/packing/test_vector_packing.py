"""Packs of sequences with several lengths: within all capacities, and never below a proven bound."""

from collections import Counter

import numpy as np

from bert_packed.assembly.feature_packs import lower_bound, pack_vectors


def test_vectors_are_packed_within_all_capacities():
    rng = np.random.default_rng(0)
    capacities = np.array([20, 7])
    sizes = np.unique(np.stack([rng.integers(1, 21, 60), rng.integers(0, 8, 60)], axis=1), axis=0)
    counts = rng.integers(1, 50, len(sizes))
    for depth in (1, 2, 5):
        strategies = pack_vectors(sizes, counts, capacities, depth)
        placed = np.zeros(len(sizes), np.int64)
        for strategy, times in strategies.items():
            assert len(strategy) <= depth and np.all(sizes[list(strategy)].sum(axis=0) <= capacities)
            np.add.at(placed, list(strategy), times)
        assert placed.tolist() == counts.tolist()
        assert sum(strategies.values()) >= lower_bound(sizes, counts, capacities, depth)
    assert sum(pack_vectors(sizes, counts, capacities, 1).values()) == counts.sum()


def fewest_by_trying(sequences, capacities, depth):
    """The fewest packs of a few sequences, each a tuple of lengths: every open pack is tried for each."""

    def fewest(index, packs):
        if index == len(sequences):
            return len(packs)
        options = [fewest(index + 1, (*packs, (sequences[index], 1)))]
        for place, (used, count) in enumerate(packs):
            total = tuple(a + b for a, b in zip(used, sequences[index], strict=True))
            if count < depth and all(a <= b for a, b in zip(total, capacities, strict=True)):
                options.append(fewest(index + 1, (*packs[:place], (total, count + 1), *packs[place + 1 :])))
        return min(options)

    return fewest(0, ())


def test_no_bound_is_false():
    """Plain trial on small cases: no plan is below the fewest packs, and no bound above."""
    rng = np.random.default_rng(3)
    seen = Counter()
    for _ in range(150):
        capacities = rng.integers(2, 9, 2)
        sizes = np.unique(rng.integers([1, 0], capacities + 1, (3, 2)), axis=0)
        counts, depth = rng.integers(1, 3, len(sizes)), int(rng.integers(1, 4))
        sequences = [tuple(size) for size in np.repeat(sizes, counts, axis=0).tolist()]
        fewest = fewest_by_trying(sequences, capacities.tolist(), depth)
        packs = sum(pack_vectors(sizes, counts, capacities, depth).values())
        bound = lower_bound(sizes, counts, capacities, depth)
        assert bound <= fewest <= packs
        seen[bound == fewest] += 1
        totals = [sum(lengths) for lengths in zip(*sequences, strict=True)]
        parts = [-(-total // capacity) for total, capacity in zip(totals, capacities.tolist(), strict=True)]
        assert bound == max(*parts, -(-len(sequences) // depth))
    assert min(seen[True], seen[False]) > 5  # cases where the bound is tight, and where it is not
