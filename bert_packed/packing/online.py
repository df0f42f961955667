"""Online packing of an endless stream: a bounded buffer, packed as a histogram whenever it is full.

When the buffer is full, all of it is packed, the packs with the least padding leave, and the rest waits.
No sequence waits longer than a maximum age. The papers name online packing as future work; here it costs
about as much as the histogram algorithm that it calls. With a buffer of 1,000 Wikipedia packs to 99.9 %
without a limit of depth, and to 99.5 % at depth 3. At depth 2 it is 80.5 %: more is not possible.

    S = 8, a buffer of 4 of which half leaves at a time: 5 6 3 4   ->   5 3 leave, 6 and 4 wait for 2 and 4
"""

import itertools

import numpy as np

from bert_packed.packing.arguments import check_choice, check_whole, is_whole
from bert_packed.packing.descending import first_fit_decreasing, longest_pack_first, packs_of_three
from bert_packed.packing.histogram import check_lengths, check_limits

DEEPEST_OF_THREE = 5  # above, packs of three gain next to nothing, at a tenth of the speed


def _best_fit(histogram, depth):
    """LPFHP, or at small depths packs of three where these are fewer."""
    packs = longest_pack_first(histogram, depth)
    num_packs = sum(count for _, count in packs)
    if not 3 <= depth <= DEEPEST_OF_THREE or num_packs <= np.sum(histogram) / 3:  # three cannot be fewer
        return packs
    others = packs_of_three(histogram)  # each counted once
    return others if len(others) < num_packs else packs


POLICIES = {"best_fit": _best_fit, "first_fit": first_fit_decreasing}


class OnlinePacker:
    """Packs lengths as they arrive; sequences are named by the number of their arrival, from 0.

    Deterministic: the packs depend on the lengths and their order, not on how many are added at a time.
    """

    def __init__(
        self,
        max_seq_length,
        max_sequences_per_pack,
        *,
        buffer_size=10_000,
        max_age=None,
        policy="best_fit",
        leaving_share=0.75,
    ):
        """Start with an empty buffer.

        Args:
            max_seq_length, max_sequences_per_pack: Limits of a pack, as for all `algorithms`.
            buffer_size: Most sequences that wait, from 1.
            max_age: Most sequences that arrive after another before it has left. At least
                `buffer_size`, because packs leave when the buffer is full; None for ten times it, which on
                Wikipedia costs 0.01 % of efficiency; math.inf for no limit.
            policy: "best_fit" (LPFHP on the buffer or, at depths 3 to 5, packs of three where these are
                fewer). Or "first_fit" (first-fit decreasing on it, at depth 3 89.6 % of Wikipedia).
            leaving_share: Part of a full buffer that leaves at a time, over 0 to 1: less is better packed
                and slower (0.25 packs 0.01 % better than 0.75 at half the speed).
        """
        self._depth = check_limits(max_seq_length, max_sequences_per_pack)
        check_whole("buffer_size", buffer_size, 1)
        max_age = 10 * buffer_size if max_age is None else max_age
        if not max_age >= buffer_size:
            raise ValueError(f"`max_age` must be at least buffer_size={buffer_size}. Received: {max_age!r}.")
        check_choice("policy", policy, POLICIES)
        if not 0 < leaving_share <= 1:
            raise ValueError(f"`leaving_share` must be over 0 and at most 1. Received: {leaving_share!r}.")
        self._buffer_size, self._max_age, self._pack = buffer_size, max_age, POLICIES[policy]
        self._leaving = max(1, int(leaving_share * buffer_size))
        self._settings = {
            "max_seq_length": max_seq_length,
            "max_sequences_per_pack": max_sequences_per_pack,
            "buffer_size": buffer_size,
            "max_age": max_age,
            "policy": policy,
            "leaving_share": leaving_share,
        }
        self._lengths = np.zeros(0, np.int64)  # of those waiting, in order of arrival
        self._numbers = np.zeros(0, np.int64)
        self._num_arrived = 0

    def add(self, lengths):
        """Take in lengths `[n]`, and give out the packs that are ready, by their oldest sequence.

        Returns `(numbers, sizes)`: int64 arrival numbers, pack after pack, and int64 `[packs]`, how many are
        in each. A length that is no whole number in 1..S is a `ValueError`, and none is taken in then.
        """
        lengths = check_lengths(lengths, self.max_seq_length)
        ready = []
        taken = 0
        while taken < len(lengths):
            arriving = lengths[taken : taken + self._buffer_size - len(self._lengths)]
            numbers = np.arange(self._num_arrived, self._num_arrived + len(arriving))
            self._lengths = np.concatenate([self._lengths, arriving])
            self._numbers = np.concatenate([self._numbers, numbers])
            self._num_arrived += len(arriving)
            taken += len(arriving)
            if len(self._lengths) == self._buffer_size:
                ready.append(self._send(self._leaving))
        return _join(ready)

    def flush(self):
        """Give out all that waits, at the end of a stream; result as from `add`."""
        return _join([self._send(len(self._lengths))] if len(self._lengths) else [])

    def state(self):
        """Settings, lengths and arrival numbers of those waiting, to go on by `from_state`: plain JSON."""
        return {
            "settings": dict(self._settings),
            "lengths": self._lengths.tolist(),
            "numbers": self._numbers.tolist(),
            "num_arrived": self._num_arrived,
        }

    @classmethod
    def from_state(cls, state):
        """A packer that goes on where `state` was taken, with the same packs; raises `ValueError`."""
        settings = dict(state["settings"])
        packer = cls(settings.pop("max_seq_length"), settings.pop("max_sequences_per_pack"), **settings)
        packer._lengths = check_lengths(state["lengths"], packer.max_seq_length)
        numbers, num_arrived = state["numbers"], state["num_arrived"]
        if len(numbers) != len(packer._lengths) or len(numbers) >= packer._buffer_size:
            raise ValueError(
                f"a state must have as many `numbers` as `lengths`, below buffer_size={packer._buffer_size}. "
                f"Received: {len(numbers)}, {len(packer._lengths)}."
            )
        # a repeated number would give out one sequence twice, and a later one another sequence
        ascending = all(map(is_whole, [*numbers, num_arrived])) and all(
            before < after for before, after in itertools.pairwise([-1, *numbers, num_arrived])
        )
        if not ascending:
            raise ValueError(
                "the `numbers` of a state must be whole, ascend from 0 and be below num_arrived. "
                f"Received: num_arrived={num_arrived!r}, numbers={numbers!r:.100}."
            )
        packer._numbers = np.array(numbers, np.int64)
        packer._num_arrived = num_arrived
        return packer

    @property
    def num_arrived(self):
        """Sequences taken in so far."""
        return self._num_arrived

    @property
    def waiting(self):
        """Arrival numbers of those waiting, ascending: int64 `[n]`."""
        return self._numbers.copy()

    @property
    def max_seq_length(self):
        return self._settings["max_seq_length"]

    def _send(self, at_least):
        """Pack the buffer; packs of `at_least` sequences leave, and those of all that are too old."""
        histogram = np.bincount(self._lengths, minlength=self.max_seq_length + 1)
        packs = self._pack(histogram[1:], self._depth)
        packs = [(sum(pack), pack, count) for pack, count in packs]
        packs.sort(key=lambda entry: -entry[0])
        slots, sizes, sent = [], [], 0
        for index, (_, pack, count) in enumerate(packs):
            # equal packs leave only as many as are needed, so that the buffer does not run empty
            leaving = min(count, -(-(at_least - sent) // len(pack)))
            if leaving <= 0:
                break
            slots.extend(pack * leaving)
            sizes.extend([len(pack)] * leaving)
            sent += leaving * len(pack)
            packs[index] = (0, pack, count - leaving)
        self._add_overdue(packs, slots, sizes)
        return self._take(np.array(slots, np.int64), np.array(sizes, np.int64))

    def _add_overdue(self, packs, slots, sizes):
        """Add packs until each length leaves as often as it has sequences that could grow too old."""
        oldest_to_keep = self._num_arrived - self._max_age + self._buffer_size
        overdue = np.bincount(
            self._lengths[self._numbers < oldest_to_keep], minlength=self.max_seq_length + 1
        )
        missing = overdue - np.bincount(slots, minlength=self.max_seq_length + 1)
        if (missing <= 0).all():
            return
        missing = missing.tolist()
        for _, pack, count in packs:
            while count and any(missing[length] > 0 for length in pack):
                slots.extend(pack)
                sizes.append(len(pack))
                count -= 1
                for length in pack:
                    missing[length] -= 1

    def _take(self, slots, sizes):
        """Put the oldest waiting sequences of each length into slots, and take them from the buffer."""
        by_length = np.argsort(self._lengths, kind="stable")  # of equal lengths the oldest first
        present = np.bincount(self._lengths, minlength=self.max_seq_length + 1)
        wanted = np.bincount(slots, minlength=self.max_seq_length + 1)
        first_present = np.cumsum(present) - present
        first_wanted = np.cumsum(wanted) - wanted
        taken = by_length[np.arange(len(slots)) + np.repeat(first_present - first_wanted, wanted)]
        numbers = np.empty(len(slots), np.int64)
        numbers[np.argsort(slots, kind="stable")] = self._numbers[taken]
        waiting = np.ones(len(self._lengths), bool)
        waiting[taken] = False
        self._lengths, self._numbers = self._lengths[waiting], self._numbers[waiting]
        return _by_oldest(numbers, sizes)


def _by_oldest(numbers, sizes):
    """Order packs by their oldest sequence, and the sequences of a pack by age."""
    # Ordered by fullness, a buffer's packs would show a model other lengths early and late
    starts = np.cumsum(sizes) - sizes
    oldest = np.minimum.reduceat(numbers, starts)
    order = np.argsort(oldest)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return numbers[np.lexsort([numbers, np.repeat(rank, sizes)])], sizes[order]


def _join(ready):
    none = np.zeros(0, np.int64)
    return (
        np.concatenate([none, *(numbers for numbers, _ in ready)]),
        np.concatenate([none, *(sizes for _, sizes in ready)]),
    )
