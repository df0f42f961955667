"""Base of the kinds of records: reading, lengths and plans.

`bert_packs.py`, `causal_packs.py` and `feature_packs.py` add the shapes and the assembly of packs.
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
    overlong: str = "error"  # or "truncate" or "drop": the treatment of longer sequences
    vocab_size: int | None = None  # ids are below it; None where it is not known

    layout: ClassVar[dict[str, Column]]  # columns that packing preserves, and origins
    measured_columns: ClassVar[tuple[str, ...]]  # those that `lengths` and `measure` need
    advice: ClassVar[str]  # settings that accept longer sequences, for messages

    @property
    def num_lengths(self):
        """1 + the largest length."""
        return self.max_seq_length + 1

    @property
    def capacities(self):
        """Capacity of a pack, by the column that counts the entries of a sequence."""
        return {"lengths": self.max_seq_length}

    def read(self, path):
        """Read and check one file; raises `InputError` where a record cannot be used.

        Yields, by batch, the `Sequences` to be packed, the counts of `fit`, and the number of records.
        """
        for batch in self.read_unpacked(path):
            check_vocabulary(batch, self.vocab_size)
            yield *self.fit(batch), len(batch)

    def fit(self, sequences):
        """Drop overlong sequences, or raise `InputError` for the first.

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
        """Lengths for the plan: int64 `[n]`, each from 1 and below `num_lengths`."""
        return sequences["lengths"]

    def describe_lengths(self, histogram):
        """Plain JSON for a manifest, from a histogram, int64 `[num_lengths]`."""
        return histograms.to_json(histogram[1:])

    def make_plan(self, histogram, algorithm, depth):
        return plan_lengths(histogram[1:], algorithm, self.max_seq_length, depth)

    def measure(self, sequences, packs):
        """Maximum over packs of what plans do not limit: predictions, in BERT's records."""
        return 0


def plan_lengths(histogram, algorithm, max_seq_length, depth):
    """Run a packing algorithm and validate its plan: dict of plain JSON for a manifest.

    Raises `InputError` where the algorithm does not scale to this length, depth or number of sequences.
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
