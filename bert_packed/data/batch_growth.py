"""Batch-size warm-up: batches that grow by whole micro-batches, in arrays of constant shape.

Legend: B packs per full step, M packs per micro-batch.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class BatchGrowth:
    """Packs of each step; all sizes last about as many steps. From 2 packs to 8 over 4 steps, M = 2:

    step           0  1  2  3  4  5
    packs          2  2  4  6  8  8
    packs before   0  2  4  8 14 22
    """

    initial: int  # a multiple of M
    full: int  # B, a multiple of M
    micro_batch_size: int
    num_steps: int = 0  # until B is reached; 0 for B from the start

    def packs(self, steps):
        """Packs of steps, from 0: int64 of the shape of `steps`, a scalar or `[n]`."""
        more = (self.full - self.initial) // self.micro_batch_size
        grown = more * np.minimum(steps, self.num_steps) // max(self.num_steps, 1)
        return np.where(
            np.asarray(steps) < self.num_steps, self.initial + grown * self.micro_batch_size, self.full
        )

    def packs_before(self, step):
        growing = np.arange(min(step, self.num_steps))
        return int(self.packs(growing).sum()) + self.full * max(step - self.num_steps, 0)

    def steps_for(self, num_packs):
        """Number of steps, at least 1, until `num_packs` are read; the last step may read more."""
        growing = np.cumsum(self.packs(np.arange(self.num_steps)))
        missing = num_packs - self.packs_before(self.num_steps)
        if missing > 0:
            return self.num_steps + -(-missing // self.full)
        return int(np.searchsorted(growing, num_packs)) + 1


class GrowingBatches(Iterator):
    """Batches of B packs, the first of which end in empty packs.

    Args:
        batches: `CheckedBatches` of one micro-batch each, or of a process's part of one.
        first_step: Step of the first batch.
    """

    def __init__(self, batches, growth, first_step):
        self._batches, self._growth, self._step = batches, growth, first_step
        self._sources = {}

    def __next__(self):
        growth = self._growth
        number = int(growth.packs(self._step)) // growth.micro_batch_size
        parts, self._sources = [], {}
        for _ in range(number):
            parts.append(next(self._batches))
            for file, records in self._batches.sources.items():
                self._sources.setdefault(file, []).extend(records)
        self._step += 1
        missing = growth.full // growth.micro_batch_size - number
        return {
            name: np.concatenate([*(part[name] for part in parts), *[np.zeros_like(values)] * missing])
            for name, values in parts[0].items()
        }

    @property
    def sources(self):
        return self._sources
