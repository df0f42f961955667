"""Division of a step's packs among processes.

Legend: B packs per step, M packs per micro-batch, W processes.
"""

import dataclasses

import numpy as np

from bert_packed.core.settings import InputError


@dataclasses.dataclass(frozen=True)
class ProcessShard:
    """One process's part of every micro-batch; raises `InputError` unless W divides M.

    Steps of 8 packs in micro-batches of 4, by two processes:

        pack of the step    0  1  2  3  4  5  6  7
        micro-batch         0  0  0  0  1  1  1  1
        process             0  0  1  1  0  0  1  1
    """

    # Not halves of the step, 0 1 2 3 and 4 5 6 7: these would form other micro-batches than one process, and
    # so other float32 sums

    micro_batch_size: int  # M, packs that all processes compute at once
    process_index: int = 0
    num_processes: int = 1

    def __post_init__(self):
        assert 0 <= self.process_index < self.num_processes
        self._check_divides("micro_batch_size", self.micro_batch_size)

    def batch_size(self, train_batch_size):
        """B / W, this process's packs of a step of B; raises `InputError` unless M divides B."""
        if train_batch_size % self.micro_batch_size:
            raise InputError(
                "`micro_batch_size` must divide `train_batch_size`. Received: "
                f"micro_batch_size={self.micro_batch_size}, train_batch_size={train_batch_size}."
            )
        return train_batch_size // self.num_processes

    def of_evaluation(self, eval_batch_size):
        """`ProcessShard` for evaluation, with one micro-batch per batch; raises `InputError`."""
        self._check_divides("eval_batch_size", eval_batch_size)
        return dataclasses.replace(self, micro_batch_size=eval_batch_size)

    def holds(self, places):
        """True for packs of this process, bool `[n]`; `places` are positions in the reading order."""
        # As M divides B, a micro-batch begins at every multiple of M
        own = self.micro_batch_size // self.num_processes
        return places % self.micro_batch_size // own == self.process_index

    def places(self, step, train_batch_size):
        """Positions in the reading order of this process's packs of a step: int64 `[B / W]`."""
        places = step * train_batch_size + np.arange(train_batch_size)
        return places[self.holds(places)]

    def of_blocks(self, blocks, first=0):
        """Yield this process's packs of each block, int64 `[at most n]`.

        Args:
            blocks: Iterable of int64 `[n]`, packs in reading order; blocks may end within a step.
            first: Number of packs of all steps before them.
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


WHOLE = ProcessShard(1)  # one process; any micro-batch size
