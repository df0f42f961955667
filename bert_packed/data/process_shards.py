"""The packs of a step that each of several processes reads.

Legend: B packs per step, M packs per micro-batch, W processes.
"""

import dataclasses

import numpy as np

from bert_packed.core.settings import InputError


@dataclasses.dataclass(frozen=True)
class ProcessShard:
    """One process's part of every micro-batch. Joined, the parts are the order of one process.

    Steps of 8 packs in micro-batches of 4, by two processes:

        pack of the step    0  1  2  3  4  5  6  7
        micro-batch         0  0  0  0  1  1  1  1
        place in it         0  1  2  3  0  1  2  3
        process             0  0  1  1  0  0  1  1

    The batch of process 1 is the packs 2, 3, 6, 7. Halves of the step, 0 1 2 3 and 4 5 6 7, would add up
    other packs together, and sums of float32 would differ from those of one process.

    Attributes:
        micro_batch_size: M, packs that all processes compute at once.
        num_processes: W.

    Raises:
        InputError: W does not divide M.
    """

    micro_batch_size: int
    process_index: int = 0
    num_processes: int = 1

    def __post_init__(self):
        assert 0 <= self.process_index < self.num_processes
        self._check_divides("micro_batch_size", self.micro_batch_size)

    def batch_size(self, train_batch_size):
        """B / W, this process's packs of a step of B; raises `InputError` where M does not divide B."""
        if train_batch_size % self.micro_batch_size:
            raise InputError(
                "`micro_batch_size` must divide `train_batch_size`. Received: "
                f"micro_batch_size={self.micro_batch_size}, train_batch_size={train_batch_size}."
            )
        return train_batch_size // self.num_processes

    def of_evaluation(self, eval_batch_size):
        """`ProcessShard` of evaluation, whose batches are not cut into micro-batches; raises `InputError`."""
        self._check_divides("eval_batch_size", eval_batch_size)
        return dataclasses.replace(self, micro_batch_size=eval_batch_size)

    def holds(self, places):
        """True for packs of this process: bool `[n]`.

        Args:
            places: int64 `[n]`, the number of packs of all steps before each.
        """
        # As M divides B, a micro-batch begins at every multiple of M
        own = self.micro_batch_size // self.num_processes
        return places % self.micro_batch_size // own == self.process_index

    def places(self, step, train_batch_size):
        """Places, as in `holds`, of this process's packs of a step: int64 `[B / W]`."""
        places = step * train_batch_size + np.arange(train_batch_size)
        return places[self.holds(places)]

    def of_blocks(self, blocks, first=0):
        """This process's packs of every block.

        Args:
            blocks: Iterable of int64 `[n]`, packs in reading order; blocks end anywhere.
            first: Packs of all steps before them.

        Yields:
            int64 `[at most n]`.
        """
        for packs in blocks:
            yield packs[self.holds(first + np.arange(len(packs)))]
            first += len(packs)

    def _check_divides(self, name, value):
        if value % self.num_processes:
            raise InputError(
                f"the number of processes must divide `{name}`. Received: {self.num_processes} processes, "
                f"{name}={value}."
            )


WHOLE = ProcessShard(1)  # one process, however many packs it computes at once
