"""The common part of the kinds of records that are packed: reading, lengths and plans.

`bert_packs.py`, `causal_packs.py` and `feature_packs.py` add how packs are shaped and assembled.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.packing import histogram as histograms
from bert_packed.packing import plan as plans
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.records.sequences import Column, check_vocabulary, take


@dataclasses.dataclass(frozen=True)
class RecordKind:
    """Records of one objective, whose sequences have one length each."""

    max_seq_length: int
    overlong: str = "error"  # of longer sequences, or "truncate" or "drop"
    vocab_size: int | None = None  # ids are below it; None where it is not known

    layout: ClassVar[dict[str, Column]]  # what packing conserves of a sequence, and its origin
    measured_columns: ClassVar[tuple[str, ...]]  # those that `lengths` and `measure` need
    advice: ClassVar[str]  # settings that let longer sequences pass, for messages

    @property
    def num_lengths(self):
        """Lengths are below it."""
        return self.max_seq_length + 1

    @property
    def capacities(self):
        """Entries that a pack has room for, by the column that counts a sequence's."""
        return {"lengths": self.max_seq_length}

    def read(self, path):
        """Read, check and fit one file; raises `InputError` where a record cannot be used.

        Yields:
            Of a batch, `Sequences` to be packed; dict of those "truncated" and "dropped"; number of records.
        """
        for batch in self.read_unpacked(path):
            check_vocabulary(batch, self.vocab_size)
            yield *self.fit(batch), len(batch)

    def fit(self, sequences):
        """Drop sequences that are too long, or raise an `InputError` that names the first.

        Returns `Sequences`, and a dict with the numbers of those "truncated" and "dropped".
        """
        is_overlong = sequences["lengths"] > self.max_seq_length
        if is_overlong.any() and self.overlong != "drop":
            first = int(np.argmax(is_overlong))
            raise InputError(
                f"{sequences.origin(first)}: a sequence must have at most max_seq_length="
                f"{self.max_seq_length} tokens, unless {self.advice}. "
                f"Received: {sequences['lengths'][first]} tokens."
            )
        counts = {"truncated": 0, "dropped": int(is_overlong.sum())}
        return (take(sequences, ~is_overlong) if is_overlong.any() else sequences), counts

    def lengths(self, sequences):
        """What a plan is made for: int64 `[n]`, each from 1 and below `num_lengths`."""
        return sequences["lengths"]

    def describe_lengths(self, histogram):
        """What a manifest says of a histogram, int64 `[num_lengths]`: plain JSON."""
        return histograms.to_json(histogram[1:])

    def make_plan(self, histogram, algorithm, depth):
        """Plan the packs for a histogram, `[num_lengths]`: see `plan_lengths`."""
        return plan_lengths(histogram[1:], algorithm, self.max_seq_length, depth)

    def measure(self, sequences, packs):
        """What the fullest of some packs needs that the plan does not know: predictions, of BERT's."""
        return 0


def plan_lengths(histogram, algorithm, max_seq_length, depth):
    """Run a packing algorithm, by its name, and check what it made: dict of plain JSON for a manifest.

    `InputError` where the algorithm does not scale to this length, depth or number of sequences.
    """
    histogram = np.asarray(histogram, np.int64)
    try:
        plan = ALGORITHMS[algorithm](histogram, max_seq_length, depth)
    except ValueError as error:
        raise InputError(f"`algorithm` {algorithm} cannot pack these lengths: {error}") from error
    plans.validate_plan(plan, histogram)
    return {
        "plan": plan.to_json(),
        "num_sequences": plan.num_sequences,
        "num_packs": plan.num_packs,
        "efficiency": plan.efficiency,
        "packing_factor": plan.packing_factor,
        "depth": plan.depth,
        "lower_bound": plan.certificate.lower_bound,
        "gap": plan.certificate.gap,
    }
