"""The same sequences one at a time, in padded rows and in packs: batches of next-token prediction.

Random tokens: what a step costs does not depend on them.

Legend: B rows or packs per batch, S their length, n sequences.
"""

import dataclasses

import numpy as np

from bert_packed.assembly.causal_data import lay_out
from bert_packed.core.settings import InputError
from bert_packed.objectives.features import NEXT_TOKENS
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import count_lengths
from bert_packed.records.sequences import range_indices, to_offsets
from bert_packed.schema import PackSpec

SINGLE, PADDED, PACKED = "one at a time", "padded", "packed"


@dataclasses.dataclass(frozen=True)
class Batches:
    """All sequences in one way.

    Attributes:
        batches: List of batch dicts of `[B, ...]` arrays, in which each sequence is once.
        num_tokens: Real tokens of all of them.
    """

    batches: list[dict]
    num_tokens: int

    @property
    def padding(self):
        """Share of padding, 0..1."""
        return 1 - self.num_tokens / sum(batch["token_ids"].size for batch in self.batches)


def choose_packs(lengths, pack_length, num_packs):
    """As many sequences as go into some packs, that have the spread of all lengths.

        lengths 1 1 2 2 2 2 3 5, two packs of 5   ->   1 2 2 5, in packs 1 2 2 | 5

    Args:
        lengths: Int `[n]`, each at most S.
        pack_length: S.
        num_packs: Most packs.

    Returns:
        List of tuples of lengths: the plan of the default algorithm for them.

    Raises:
        InputError: there are too few lengths to fill the packs.
    """
    ordered = np.sort(lengths)
    num_sequences = int(num_packs * pack_length / np.mean(ordered)) + 1
    if num_sequences > len(ordered):
        raise InputError(
            f"`input_file` must hold enough to fill {num_packs} packs of {pack_length}. "
            f"Received: {len(ordered)} sequences."
        )
    while True:
        # In the middle of as many equal parts: a few sequences drawn would have another mean than all
        places = (np.arange(num_sequences) + 0.5) * len(ordered) / num_sequences
        histogram = count_lengths(ordered[places.astype(np.int64)], pack_length)
        plan = ALGORITHMS[DEFAULT_ALGORITHM](histogram, pack_length, "max")
        if plan.num_packs <= num_packs:
            return [strategy for strategy, count in plan.strategies.items() for _ in range(count)]
        num_sequences -= 1


def make_batches(packs, pack_length, row_length, batch_size, num_shapes, vocab_size, seed=0):
    """The sequences of some packs in three ways.

    Args:
        packs: List of tuples of lengths.
        pack_length: S of a pack.
        row_length: S of a padded row.
        batch_size: Packs in a batch; a batch of rows has as many tokens, padding included.
        num_shapes: Row lengths that sequences one at a time are filled up to, each one compiled program;
            chosen for the least padding.
        vocab_size: Ids are below it.
        seed: Of the tokens, and of the order in which sequences come to their rows.

    Returns:
        Dict from `SINGLE`, `PADDED` and `PACKED` to `Batches`.
    """
    rng = np.random.default_rng(seed)
    sequences = [[rng.integers(1, vocab_size, length) for length in pack] for pack in packs]
    alone = [sequence for pack in sequences for sequence in pack]
    rng.shuffle(alone)
    shapes = best_shapes([len(sequence) for sequence in alone], num_shapes)
    fitting = [shapes[np.searchsorted(shapes, len(sequence))] for sequence in alone]
    num_rows = max(1, batch_size * pack_length // row_length)
    batches = {
        SINGLE: [_batch([[one]], length) for one, length in zip(alone, fitting, strict=True)],
        PADDED: [
            _batch([[one] for one in alone[first : first + num_rows]], row_length)
            for first in range(0, len(alone), num_rows)
        ],
        PACKED: [
            _batch(sequences[first : first + batch_size], pack_length, max(map(len, packs)))
            for first in range(0, len(packs), batch_size)
        ],
    }
    num_tokens = sum(map(len, alone))
    return {way: Batches(some, num_tokens) for way, some in batches.items()}


def best_shapes(lengths, num_shapes):
    """The few row lengths that sequences are filled up to with the least padding in all.

        lengths [2 3 9 10 10], two shapes   ->   [3 10]

    Args:
        lengths: Int `[n]`.
        num_shapes: Most row lengths.

    Returns:
        int64 array, ascending; the last is the longest length.
    """
    values, counts = np.unique(lengths, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(counts)])
    # cost[i]: least tokens of the i shortest values' sequences, with as many shapes as there were rounds
    cost, chosen = np.where(np.arange(len(values) + 1) == 0, 0.0, np.inf), []
    for _ in range(num_shapes):
        # [i, j]: the last shape is value j - 1, and holds the values from i on
        tokens = cost[:, None] + (upto[None, :] - upto[:, None]) * np.concatenate([[0], values])[None, :]
        tokens = np.where(np.tri(len(cost), dtype=bool).T, tokens, np.inf)
        chosen.append(np.argmin(tokens, axis=0))
        cost = np.min(tokens, axis=0)
    shapes, last = [], len(values)
    for first in reversed(chosen):
        if last:
            shapes.append(values[last - 1])
        last = first[last]
    return np.unique(shapes)


def _batch(packs, length, num_slots=1):
    """The batch dict of packs, each a list of sequences of tokens; every token but the last predicts."""
    alone = [sequence for pack in packs for sequence in pack]
    depths, lengths = np.array([len(pack) for pack in packs]), np.array([len(one) for one in alone])
    ends = to_offsets(lengths)
    first_of_pack = ends[to_offsets(depths)[:-1]]
    owners = np.repeat(np.arange(len(packs)), depths)
    tokens = np.concatenate(alone)
    is_last = np.zeros(len(tokens), bool)
    is_last[ends[1:] - 1] = True
    arrays = lay_out(
        PackSpec(length, num_slots, 0),
        len(packs),
        owners=owners,
        slots=range_indices(np.zeros(len(packs), np.int64), depths),
        starts=ends[:-1] - first_of_pack[owners],
        lengths=lengths,
        first_positions=np.zeros(len(alone), np.int64),
        num_bytes=lengths,
        tokens=tokens,
        labels=np.where(is_last, 0, np.roll(tokens, -1)),
        label_mask=~is_last,
    )
    batch = {feature.name: arrays[feature.record_name] for feature in NEXT_TOKENS}
    return {
        name: values.astype(np.float32 if values.dtype.kind == "f" else np.int32)
        for name, values in batch.items()
    }
