"""Packs for each step of a fine-tuning: the same number of sequences in every step.

A pre-training step takes a number of packs. A fine-tuning recipe fixes the number of sequences of a step:
exactly that number is drawn, and then packed.

    epoch in packs      {4 0} {7} {2 5 1} {3 6} {8}      steps of 4 sequences
    step 0              {7} {2 5 1}                      complete packs, chosen to make up 4
    step 1              {4 0} {3 6}
    step 2              {8} and packs of the next epoch

The sequences of a step follow from the packs that one fixed algorithm makes without a limit of depth. So
unpacked runs and those of any algorithm see the same sequences in the same steps. The run's algorithm and
depth then pack a step's sequences again, where its packs are too deep or may not be the fewest.
"""

import dataclasses
import itertools

import numpy as np

from bert_packed.assembly.assignment import Packs, assign_sequences, fill_rows
from bert_packed.assembly.record_kinds import assemble_packs
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import count_lengths
from bert_packed.packing.nnlshp import MAX_STRATEGIES
from bert_packed.packing.plan import count_strategies
from bert_packed.records.sequences import to_offsets
from bert_packed.schema import PackSpec

LEAST_SQUARES = ("nnlshp", "ennlshp")


@dataclasses.dataclass(frozen=True)
class Updates:
    """The steps of a run."""

    packs: list[Packs]  # of each step; members index the sequences
    spec: PackSpec  # that every step fits, without predictions
    num_packs: int  # most in any step
    # Steps of rows have the number of each member among the sequences of its step, row by row, from 1. The
    # sequence's own number would not do: a step across the end of an epoch may hold a row twice
    places: tuple[np.ndarray, ...] = ()

    @property
    def packing_factor(self):
        """Mean sequences per pack."""
        return sum(len(packs.members) for packs in self.packs) / sum(map(len, self.packs))

    def efficiency(self, lengths):
        """Share of the packs' tokens that are not padding; packs that only fill up a step do not count."""
        real = sum(int(lengths[packs.members].sum()) for packs in self.packs)
        return real / (sum(map(len, self.packs)) * self.spec.max_seq_length)


def check_depth(algorithm, max_seq_length, depth):
    """Raise `InputError` where an algorithm cannot pack to a depth."""
    most = max_seq_length if depth == "max" else depth
    # Least squares has a column for every strategy, which are counted here, not listed
    if algorithm in LEAST_SQUARES and count_strategies(max_seq_length, most, MAX_STRATEGIES) > MAX_STRATEGIES:
        raise InputError(
            f"`max_sequences_per_pack` must be lower for packing_algorithm={algorithm}, which lists all "
            f"strategies, at most {MAX_STRATEGIES:,}. Received: {depth} for max_seq_length={max_seq_length}, "
            "which has more."
        )


def plan_updates(lengths, num_updates, batch_size, max_seq_length, depth, algorithm, seed):
    """Plan all steps of a run, each of `batch_size` sequences: `Updates`.

    An epoch's rest is filled from the next epoch. `lengths`, int64 `[n]`, are at most S; `seed` is below
    2**32; algorithm and depth pass `check_depth`.
    """
    pack = ALGORITHMS[algorithm]
    draw = ALGORITHMS[DEFAULT_ALGORITHM]  # not every algorithm can do without a limit of depth
    plan = draw(count_lengths(lengths, max_seq_length), max_seq_length, "max")
    limit = len(lengths) if depth == "max" else depth
    updates = []
    for groups in _draw(_endless_packs(plan, lengths, seed), num_updates, batch_size):
        members = np.concatenate(groups)
        is_too_deep = max(map(len, groups)) > limit
        # No packing has fewer packs than the second bound: at that, packing again cannot help
        if is_too_deep or len(groups) > -(-lengths[members].sum() // max_seq_length):
            again = _pack_again(pack, members, lengths, max_seq_length, depth, seed)
            groups = again if is_too_deep or len(again) < len(groups) else groups
        updates.append(Packs(np.concatenate(groups), to_offsets([len(group) for group in groups])))
    deepest = max(int(packs.depths.max()) for packs in updates)
    return Updates(updates, PackSpec(max_seq_length, deepest, 0), max(map(len, updates)))


def plan_row_updates(lengths, num_updates, num_rows, texts_per_row, max_seq_length, depth, algorithm, seed):
    """Plan steps that take whole rows of consecutive sequences: `Updates` with `places`.

    The rows of each epoch are shuffled, its rest is filled from the next epoch, and each step is packed by
    itself. Rows of 2 sequences, 2 rows a step:

        rows of a step    3 0      members  {7 0} {6 1}      places  {2 3} {1 4}

    Args:
        lengths: int64 `[rows * texts_per_row]`; none over S.
        num_rows: Rows of each step.
        Others: Arguments of `plan_updates`.
    """
    rows = _endless_rows(len(lengths) // texts_per_row, seed)
    updates, places = [], []
    for _ in range(num_updates):
        chosen = np.array(list(itertools.islice(rows, num_rows)))
        members = (chosen[:, None] * texts_per_row + np.arange(texts_per_row)).ravel()
        own = lengths[members]
        groups = _pack_again(ALGORITHMS[algorithm], np.arange(len(members)), own, max_seq_length, depth, seed)
        order = np.concatenate(groups)
        updates.append(Packs(members[order], to_offsets([len(group) for group in groups])))
        places.append(order + 1)
    deepest = max(int(packs.depths.max()) for packs in updates)
    spec = PackSpec(max_seq_length, deepest, 0)
    return Updates(updates, spec, max(map(len, updates)), tuple(places))


def _endless_rows(number, seed):
    """The shuffled numbers of all rows, epoch after epoch."""
    for epoch in itertools.count():
        yield from np.random.default_rng([seed, epoch]).permutation(number).tolist()


def fit_predictions(updates, num_predictions):
    """`Updates` whose packs have room for their sequences' predictions: int64 `[n]`, of every sequence."""
    most = max(int(packs.totals(num_predictions).max()) for packs in updates.packs)
    return dataclasses.replace(updates, spec=dataclasses.replace(updates.spec, max_predictions_per_pack=most))


def pack_all(lengths, max_seq_length, depth, algorithm):
    """Every sequence once: `Packs`, and the `PackSpec` that they need."""
    plan = ALGORITHMS[algorithm](count_lengths(lengths, max_seq_length), max_seq_length, depth)
    packs = assign_sequences(plan, lengths, seed=0)
    return packs, PackSpec(max_seq_length, max(plan.depth, 1), 0)


def assemble_filled(sequences, packs, spec, num_packs):
    """`assemble_packs`, with empty packs appended until there are `num_packs`."""
    arrays = assemble_packs(sequences, packs, spec)
    return {name: fill_rows(values, num_packs) for name, values in arrays.items()}


def by_slot(values, packs, num_slots, num_packs):
    """A value of each sequence, or `[C]` values, at its slot: `[num_packs, num_slots]`, or `[..., C]`.

    values [7 8 9], packs {2 0} {1}, 2 slots, 3 packs   ->   [[9 7] [8 0] [0 0]]
    """
    found = np.zeros((num_packs, num_slots, *values.shape[1:]), values.dtype)
    found[packs.owners, packs.slots] = values[packs.members]
    return found


def _endless_packs(plan, lengths, seed):
    """List of arrays of sequences, each a pack, epoch after epoch: every sequence once an epoch."""
    for epoch in itertools.count():
        # Sequences and slots of a length are shuffled; so are the packs
        packs = assign_sequences(plan, lengths, seed + epoch * 2**32)
        yield np.split(packs.members, packs.offsets[1:-1])


def _draw(epochs, num_updates, batch_size):
    """Yield for each step a list of packs, arrays of sequences, that hold `batch_size` together."""
    waiting = []
    for _ in range(num_updates):
        chosen, missing = [], batch_size
        while missing:
            if not waiting:
                waiting = next(epochs)
            available = sum(map(len, waiting))
            picked, waiting = (waiting, []) if available <= missing else _pick(waiting, missing)
            chosen += picked
            missing -= sum(map(len, picked))
        yield chosen


def _pick(waiting, wanted):
    """Packs that hold exactly `wanted` sequences, early ones where possible, and the packs that are left."""
    largest = max(map(len, waiting))
    picked, start = [], 0
    while wanted > 2 * largest:  # no choice matters yet
        picked.append(waiting[start])
        wanted -= len(waiting[start])
        start += 1
    rest = waiting[start:]
    places = _subset(list(map(len, rest)), wanted)
    # If no packs add up to it, one is cut in two, whose first part is a single sequence
    if places is None:
        place = next(i for i, pack in enumerate(rest) if len(pack) > 1)
        cut = rest[place]
        smaller = [*rest[:place], cut[:1], cut[1:], *rest[place + 1 :]]
        more, left = _pick(smaller, wanted)
        return picked + more, left
    chosen = set(places)
    left = [pack for i, pack in enumerate(rest) if i not in chosen]
    return picked + [rest[i] for i in places], left


def _subset(sizes, wanted):
    """Indices of sizes that add up to `wanted`, found early in the list: [2 2 3 1], wanted 5 -> [0 2]."""
    reached = {0: []}  # sum -> places
    for place, size in enumerate(sizes):
        for total in sorted(reached, reverse=True):
            if total + size <= wanted and total + size not in reached:
                reached[total + size] = [*reached[total], place]
        if wanted in reached:
            return reached[wanted]
    return None


def _pack_again(pack, members, lengths, max_seq_length, depth, seed):
    """Pack one step's sequences with a limit of depth: list of arrays of sequences."""
    if depth == 1:
        return np.split(members, np.arange(1, len(members)))
    own = lengths[members]
    plan = pack(count_lengths(own, max_seq_length), max_seq_length, depth)
    packs = assign_sequences(plan, own, seed)
    return [members[part] for part in np.split(packs.members, packs.offsets[1:-1])]
