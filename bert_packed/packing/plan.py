"""Packing plans, the result of every algorithm: strategies and how often each is used.

A strategy is an ascending tuple of sequence lengths that share one pack. With S = 8, the plan
`{(3, 5): 2, (2, 2, 4): 1}` places two sequences of length 2, two of 3, one of 4 and two of 5 in three packs.
"""

import dataclasses
import functools
import math
from collections import Counter

import numpy as np

from bert_packed.packing.arguments import is_whole
from bert_packed.packing.bounds import Certificate, certify
from bert_packed.packing.histogram import check_arguments


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Packs as strategies with counts."""

    algorithm: str  # that made it
    max_seq_length: int  # S, the tokens of a pack
    max_sequences_per_pack: int | str  # the limit of depth, "max" for none
    strategies: dict[tuple[int, ...], int]  # ascending tuple of lengths -> packs, at least 1
    notes: tuple[str, ...] = ()  # what a reader must know, such as an early stop, a sentence each
    # `[S]`, whole numbers that prove a lower bound (`bounds.dual_bound`); () if the algorithm computes none.
    # Stored in place of the bound, so that a reader can check it.
    dual_values: tuple[int, ...] = ()
    # The bound that they prove, if the search has computed it; None in a plan that was read
    lp_bound: int | None = dataclasses.field(default=None, compare=False, repr=False)

    def __repr__(self):
        # The generated one would list all strategies, thousands of them
        packed = (
            f"{self.num_sequences:,} sequences in {self.num_packs:,} packs of {self.max_seq_length} tokens"
        )
        return f"PackingPlan({self.algorithm}: {packed}, {self.efficiency:.2%} full)"

    @functools.cached_property
    def certificate(self) -> Certificate:
        """Proof of the plan's largest distance from the fewest packs possible; computed at first use."""
        limits = self.max_seq_length, self.max_sequences_per_pack
        return certify(self.num_packs, self.histogram(), *limits, self.dual_values, self.lp_bound)

    @property
    def num_packs(self):
        return sum(self.strategies.values())

    @property
    def num_sequences(self):
        return sum(len(strategy) * count for strategy, count in self.strategies.items())

    @property
    def num_tokens(self):
        """Tokens of all packs, padding included: the papers' "# tokens"."""
        return self.num_packs * self.max_seq_length

    @property
    def num_real_tokens(self):
        return sum(sum(strategy) * count for strategy, count in self.strategies.items())

    @property
    def num_padding(self):
        return self.num_tokens - self.num_real_tokens

    @property
    def efficiency(self):
        """Share of tokens that are not padding, 0..1; 1 for an empty plan, which wastes nothing."""
        return self.num_real_tokens / self.num_tokens if self.num_packs else 1.0

    @property
    def packing_factor(self):
        """Mean number of sequences per pack; 1 for an empty plan."""
        return self.num_sequences / self.num_packs if self.num_packs else 1.0

    @property
    def depth(self):
        """Largest number of sequences in any pack: the papers' observed depth; 0 for an empty plan."""
        return max((len(strategy) for strategy in self.strategies), default=0)

    def histogram(self):
        """The lengths that the plan places: int64 `[S]`."""
        counts = np.zeros(self.max_seq_length, np.int64)
        for strategy, count in self.strategies.items():
            for length in strategy:
                counts[length - 1] += count
        return counts

    def to_json(self):
        """Plain lists and numbers, for a manifest."""
        return {
            "algorithm": self.algorithm,
            "max_seq_length": self.max_seq_length,
            "max_sequences_per_pack": self.max_sequences_per_pack,
            "strategies": [[list(strategy), count] for strategy, count in self.strategies.items()],
            "notes": list(self.notes),
            "dual_values": list(self.dual_values),
            "certificate": dataclasses.asdict(self.certificate),
        }


def make_plan(
    algorithm, max_seq_length, max_sequences_per_pack, packs, notes=(), dual_values=(), lp_bound=None
):
    """A `PackingPlan` of packs as `merge_packs` takes them, for the algorithm's own arguments."""
    limits = max_seq_length, max_sequences_per_pack
    return PackingPlan(algorithm, *limits, merge_packs(packs), tuple(notes), tuple(dual_values), lp_bound)


def merge_packs(packs):
    """Add up equal packs `(lengths in any order, count)`: dict from ascending tuple to count, in order."""
    # The papers count strategies as their listings list them, without adding up equal ones; SPFHP and LPFHP
    # make no equal ones, so the two numbers agree
    total = Counter()
    for lengths, count in packs:
        if count and len(lengths):
            total[tuple(sorted(int(length) for length in lengths))] += int(count)
    return dict(sorted(total.items()))


def from_json(content):
    """The plan that `PackingPlan.to_json` wrote, but for its certificate, which is computed again."""
    strategies = {}
    for lengths, count in content["strategies"]:
        strategy = tuple(lengths)
        if list(strategy) != sorted(strategy):
            raise ValueError(f"the lengths of a strategy must ascend. Received: {strategy}.")
        if strategy in strategies:  # a dict would silently lose one
            raise ValueError(f"`strategies` must list each strategy once. Received twice: {strategy}.")
        strategies[strategy] = count
    return PackingPlan(
        content["algorithm"],
        content["max_seq_length"],
        content["max_sequences_per_pack"],
        strategies,
        tuple(content["notes"]),
        tuple(content.get("dual_values", ())),
    )


def validate_plan(plan, histogram):
    """Check that a plan places each sequence exactly once and breaks no limit; raises `ValueError`."""
    histogram, depth = check_arguments(histogram, plan.max_seq_length, plan.max_sequences_per_pack)
    for strategy, count in plan.strategies.items():
        if not is_whole(count) or count < 1:
            raise ValueError(f"every strategy must have a count from 1. Received: {strategy}: {count!r}.")
        for length in strategy:  # a length of 0 or less would be counted at the far end of the histogram
            if not is_whole(length) or not 1 <= length <= plan.max_seq_length:
                raise ValueError(
                    f"every length must be a whole number in 1..max_seq_length={plan.max_seq_length}. "
                    f"Received: {length!r} in {strategy}."
                )
        if sum(strategy) > plan.max_seq_length:
            raise ValueError(f"a pack must hold at most {plan.max_seq_length} tokens. Received: {strategy}.")
        if len(strategy) > depth:
            raise ValueError(f"a pack must hold at most {depth} sequences. Received: {strategy}.")
    difference = plan.histogram() - histogram
    if np.any(difference):
        length = int(np.flatnonzero(difference)[0]) + 1
        raise ValueError(
            f"a plan must place each sequence exactly once. Received: length {length} placed "
            f"{int(difference[length - 1]):+d} times too often."
        )


def count_strategies(max_seq_length, depth, limit=math.inf):
    """The number of partitions of S into at most `depth` parts; a number above `limit` where it is more."""
    # Partitions into at most d parts are partitions into parts of at most d.
    ways = [1] + [0] * max_seq_length
    for part in range(1, min(depth, max_seq_length) + 1):
        for total in range(part, max_seq_length + 1):
            ways[total] += ways[total - part]
        if ways[max_seq_length] > limit:
            break
    return ways[max_seq_length]


def list_strategies(max_seq_length, depth):
    """List all strategies in ascending order: int32 `[num_strategies, min(depth, S)]`, 0 to the right."""
    depth = min(depth, max_seq_length)
    finished = []
    parts = np.zeros((1, 0), np.int32)
    rest = np.array([max_seq_length], np.int32)
    for slot in range(depth):
        finished.append(np.column_stack([parts, rest, np.zeros((len(rest), depth - slot - 1), np.int32)]))
        # The next part is no shorter than the last and leaves at least as much for one more.
        lowest = parts[:, -1] if slot else np.ones(1, np.int32)
        choices = np.maximum(rest // 2 - lowest + 1, 0)
        origin = np.repeat(np.arange(len(rest)), choices)
        offset = np.arange(len(origin)) - np.repeat(np.cumsum(choices) - choices, choices)
        new = (lowest[origin] + offset).astype(np.int32)
        parts = np.column_stack([parts[origin], new])
        rest = rest[origin] - new
    strategies = np.concatenate(finished)
    return strategies[np.lexsort(strategies.T[::-1])]
